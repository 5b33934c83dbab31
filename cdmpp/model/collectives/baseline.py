"""Latency and bandwidth of a collective from the link's specification, before any residual.

``t = (L^p + T^p)^(1/p)`` with ``L = base + hop * hops(operator, ranks)`` and
``T = traffic / (bandwidth * efficiency)``. ``traffic`` is what one rank sends. ``base``, ``hop`` and ``efficiency`` are
fitted per kind of link, ``p`` over all. With ``p`` below 1 the parts add up to more than their sum, as with the
protocols for short messages (LL, LL128), which send flags with the data.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cdmpp.devices.links import KINDS
from cdmpp.model.collectives.context import Context
from cdmpp.programs.collectives import traffic_factor

Array = np.ndarray[Any, np.dtype[Any]]

#: Columns of the baseline's parameters, per kind of link: log base, log hop (seconds), log efficiency.
COLUMNS = ("base", "hop", "efficiency")
#: Parameters that are not per kind: log of the seconds of a call from the host, log p.
SHARED = ("call", "power")
#: Bandwidth that measurements may exceed the nominal link by; the largest in the table is 1.05.
OVER_NOMINAL = 1.06


def hops(operator: str, ranks: int) -> float:
    """Steps that follow each other for a short message: trees for all-reduce, rings and direct sends grow alike."""
    steps = float(np.log2(ranks))
    return 2.0 * steps if operator == "all_reduce" else steps


def least_seconds(context: Context, bytes_: Array) -> Array:
    """Lower bound: the traffic at :data:`OVER_NOMINAL` of the nominal link."""
    factor = traffic_factor(context.operator, context.ranks)
    return np.asarray(bytes_ * factor / (OVER_NOMINAL * context.bandwidth))


def roofline_seconds(context: Context, bytes_: Array) -> Array:
    """Traffic over the nominal link: the roofline that reports compare with."""
    return np.asarray(bytes_ * traffic_factor(context.operator, context.ranks) / context.bandwidth)


class Baseline:
    """Fitted parameters of the formula.

    Parameters
    ----------
    kinds : (len(KINDS), 3)
        Logarithms, columns :data:`COLUMNS`.
    shared : (2,)
        Logarithms, :data:`SHARED`.
    """

    def __init__(self, kinds: Array, shared: Array) -> None:
        self.kinds, self.shared = kinds, shared

    def parts(self, context: Context) -> tuple[float, float]:
        """Seconds of an empty message, and seconds per byte."""
        base, hop, efficiency = np.exp(self.kinds[KINDS.index(context.kind)])
        latency = base + hop * hops(context.operator, context.ranks)
        if context.called:
            latency += np.exp(self.shared[0])
        rate = context.bandwidth * efficiency
        return float(latency), float(traffic_factor(context.operator, context.ranks) / rate)

    def log_seconds(self, context: Context, log2_bytes: Array) -> Array:
        """log of the seconds at some sizes."""
        latency, slope = self.parts(context)
        power = np.exp(self.shared[1])
        transfer = np.log(slope) + np.log(2.0) * log2_bytes
        return np.asarray(np.logaddexp(power * np.log(latency), power * transfer) / power)

    def relative_size(self, context: Context, log2_bytes: Array) -> Array:
        """log2 of (transfer time / latency): the axis on which contexts of different links resemble each other."""
        latency, slope = self.parts(context)
        return np.asarray(log2_bytes + np.log2(slope / latency))
