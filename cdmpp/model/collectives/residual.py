"""Baseline and learned residual of a collective, and its correction by a few measurements.

Baseline: latency and bandwidth from the link's specification. ``t = (L^p + T^p)^(1/p)`` with
``L = base + hop * hops(operator, ranks)`` and ``T = traffic / (bandwidth * efficiency)``. ``traffic`` is what one rank
sends. ``base``, ``hop`` and ``efficiency`` are fitted per kind of link, ``p`` over all. With ``p`` below 1 the parts
add up to more than their sum, as with the protocols for short messages (LL, LL128), which send flags with the data.

Residual: log(measured / baseline) is a sum of smooth functions. Each component has one function for every value of its
key, so contexts with equal keys share it, and a context whose key training did not have goes without. A new device
keeps what operators, libraries and kinds of links have in common.

Correction: the measurements of one device or link condition the residual process on the components that training could
not know of their place. What training knows of operators, libraries and kinds of links stays as it is, apart from a
common offset.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from cdmpp.devices.links import KINDS
from cdmpp.model.collectives.context import CollectiveContext
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


def min_seconds(context: CollectiveContext, bytes_: Array) -> Array:
    """Lower bound: the traffic at :data:`OVER_NOMINAL` of the nominal link."""
    factor = traffic_factor(context.operator, context.ranks)
    return np.asarray(bytes_ * factor / (OVER_NOMINAL * context.bandwidth))


def roofline_seconds(context: CollectiveContext, bytes_: Array) -> Array:
    """Traffic over the nominal link: the roofline that reports compare with."""
    return np.asarray(bytes_ * traffic_factor(context.operator, context.ranks) / context.bandwidth)


class LinkBaseline:
    """Fitted parameters of the formula, logarithms.

    ``kinds``: (len(KINDS), 3), columns :data:`COLUMNS`. ``shared``: (2,), :data:`SHARED`.
    """

    def __init__(self, kinds: Array, shared: Array) -> None:
        self.kinds, self.shared = kinds, shared

    def parts(self, context: CollectiveContext) -> tuple[float, float]:
        """Seconds of an empty message, and seconds per byte."""
        base, hop, efficiency = np.exp(self.kinds[KINDS.index(context.kind)])
        latency = base + hop * hops(context.operator, context.ranks)
        if context.called:
            latency += np.exp(self.shared[0])
        rate = context.bandwidth * efficiency
        return float(latency), float(traffic_factor(context.operator, context.ranks) / rate)

    def log_seconds(self, context: CollectiveContext, log2_bytes: Array) -> Array:
        """log of the seconds at some sizes."""
        latency, slope = self.parts(context)
        power = np.exp(self.shared[1])
        transfer = np.log(slope) + np.log(2.0) * log2_bytes
        return np.asarray(np.logaddexp(power * np.log(latency), power * transfer) / power)

    def relative_size(self, context: CollectiveContext, log2_bytes: Array) -> Array:
        """log2 of (transfer time / latency): the axis on which contexts of different links resemble each other."""
        latency, slope = self.parts(context)
        return np.asarray(log2_bytes + np.log2(slope / latency))


Key = tuple[Any, ...]


@dataclass(frozen=True)
class Component:
    """One set of functions."""

    name: str
    key: Callable[[CollectiveContext], Key]  # contexts with equal keys share a function
    # ``relative``: log2 of transfer time over latency, on which links of any speed bend at one place. ``bytes``: log2
    # of the bytes.
    axis: Literal["relative", "bytes"]
    over_ranks: bool = True  # the function also varies smoothly with log2 of the ranks
    place: bool = False  # the key holds the device, so a new device or link has no function


def _exact(c: CollectiveContext) -> Key:
    return (*c.place, c.kind, c.operator, c.ranks, c.per_node, c.library, c.mode)


COMPONENTS: tuple[Component, ...] = (
    Component("all", lambda c: (), "relative"),
    Component("operator", lambda c: (c.operator,), "relative"),
    Component("mode", lambda c: (c.mode,), "relative"),
    Component("library", lambda c: (c.library,), "relative"),
    Component("stack", lambda c: (c.library, c.mode), "relative"),
    Component("kind", lambda c: (c.kind,), "relative"),
    Component("kind_operator", lambda c: (c.kind, c.operator), "relative"),
    Component("kind_stack", lambda c: (c.kind, c.library, c.mode), "relative"),
    Component("kind_stack_operator", lambda c: (c.kind, c.library, c.mode, c.operator), "relative"),
    Component("generation", lambda c: (c.generation, c.kind), "relative"),
    Component("generation_stack", lambda c: (c.generation, c.kind, c.library, c.mode), "relative"),
    Component("generation_operator", lambda c: (c.generation, c.kind, c.library, c.mode, c.operator), "relative"),
    Component("wire", lambda c: (c.kind, c.bandwidth), "bytes"),
    Component("device", lambda c: (c.device, c.kind), "bytes", place=True),
    Component("place", lambda c: (*c.place, c.kind), "bytes", place=True),
    Component("place_operator", lambda c: (*c.place, c.kind, c.operator), "bytes", place=True),
    Component("place_stack", lambda c: (*c.place, c.kind, c.library, c.mode), "bytes", place=True),
    Component("exact", _exact, "bytes", over_ranks=False, place=True),
    Component("exact_width", lambda c: (*_exact(c), c.narrow), "bytes", over_ranks=False, place=True),
)
#: Length scale over log2 of the ranks.
RANKS_SCALE = 1.5


#: Share of a place component's variance that stays uncertain where training had measurements of it.
KNOWN_SHARE = 0.1
#: Standard deviation of a measurement.
NOISE = 0.05


class LogSeconds(Protocol):
    """Predictions; ``point``: log of the seconds."""

    @property
    def point(self) -> Array:
        """Log of the predicted seconds."""


class LearnedResidual(Protocol):
    """The model that is corrected: its learned components, and its prediction."""

    functions: Sequence[Mapping[Key, Array]]  # contexts with measurements, by component
    # float64, one of each component
    variance: Array
    length: Array

    def predict(self, contexts: Sequence[CollectiveContext], context: Array, bytes_: Array) -> LogSeconds:
        """Predict messages of ``bytes_`` in ``contexts[context]``, in order."""


@dataclass(frozen=True)
class UnknownPart:
    """A part by which a new device may differ, beyond the components."""

    deviation: float  # standard deviation
    length: float  # length scale over log2 bytes
    key: Callable[[CollectiveContext], Key]  # contexts with equal keys share it


#: Chosen on devices left out: common to all of a device, to one place, and to one operator of a stack there.
UNKNOWN = (
    UnknownPart(0.4, 20.0, lambda c: (c.device,)),
    UnknownPart(0.5, 10.0, lambda c: (*c.place, c.kind)),
    UnknownPart(0.4, 8.0, lambda c: (*c.place, c.kind, c.operator, c.library, c.mode)),
)


@dataclass(frozen=True)
class Correction:
    """Measurements of one device and their weights."""

    contexts: tuple[CollectiveContext, ...]  # of the k measurements
    size: Array  # (k,): log2 of the bytes
    log_s: Array  # (k,): log of the measured seconds
    weights: Array  # (k,)
    inverse: Array  # (k, k): inverse covariance of the measurements

    @classmethod
    def fit(
        cls,
        model: LearnedResidual,
        contexts: Sequence[CollectiveContext],
        bytes_: Array,
        seconds: Array,
        weight: float = 1.0,
    ) -> Correction:
        """Fit to k measurements of one device; ``weight`` is the share of the correction that is applied."""
        contexts = [context._replace(one_node=()) for context in contexts]
        size, log_s = np.log2(np.asarray(bytes_, dtype=np.float64)), np.log(np.asarray(seconds, dtype=np.float64))
        output = model.predict(contexts, np.arange(len(contexts)), np.asarray(bytes_, dtype=np.float64))
        covariance = prior_covariance(model, contexts, size, contexts, size)
        inverse = np.linalg.inv(covariance + NOISE**2 * np.eye(len(size)))
        return cls(tuple(contexts), size, log_s, weight * (inverse @ (log_s - output.point)), inverse)

    def covers(self, context: CollectiveContext) -> bool:
        """Whether a measurement is of this context's device and link."""
        return any(c.place == context.place and c.kind == context.kind for c in self.contexts)

    def apply(
        self, model: LearnedResidual, context: CollectiveContext, size: Array, residual: Array, spread: float
    ) -> tuple[Array, float]:
        """Residual at some log2 sizes and spread of a context, with the correction; unchanged for other devices."""
        if not any(c.device == context.device for c in self.contexts):
            return residual, spread
        shared = prior_covariance(model, [context] * len(size), size, self.contexts, self.size)
        prior = _variance(model, context)
        explained = float(np.median(np.einsum("ij,jk,ik->i", shared, self.inverse, shared)))
        left = max(prior - explained, 0.0) + NOISE**2
        narrower = float(np.sqrt(max(spread**2 - prior, 0.0) + left)) if spread**2 > prior else spread
        return residual + shared @ self.weights, min(spread, narrower)


def _shares(model: LearnedResidual, context: CollectiveContext) -> Array:
    """Variance of each component of a place that training left unknown; 0 for the others."""
    return np.array(
        [
            variance * (KNOWN_SHARE if component.key(context) in functions else 1.0) if component.place else 0.0
            for component, functions, variance in zip(COMPONENTS, model.functions, model.variance, strict=True)
        ]
    )


def _variance(model: LearnedResidual, context: CollectiveContext) -> float:
    return float(_shares(model, context).sum()) + sum(u.deviation**2 for u in UNKNOWN)


def prior_covariance(
    model: LearnedResidual,
    left: Sequence[CollectiveContext],
    left_size: Array,
    right: Sequence[CollectiveContext],
    right_size: Array,
) -> Array:
    """Covariance of the corrections of two sets of points."""
    distance = np.abs(left_size[:, None] - right_size[None])
    ranks, right_ranks = (np.log2([c.ranks for c in contexts]) for contexts in (left, right))
    of_ranks = np.exp(-0.5 * ((ranks[:, None] - right_ranks[None]) / RANKS_SCALE) ** 2)
    out = np.zeros_like(distance)
    for unknown in UNKNOWN:
        match = _same(unknown.key, left, right)
        out += unknown.deviation**2 * match * of_ranks * _matern(distance / unknown.length)
    cache: dict[CollectiveContext, Array] = {}
    shares = np.stack([cache[c] if c in cache else cache.setdefault(c, _shares(model, c)) for c in left])
    right_shares = np.stack([cache[c] if c in cache else cache.setdefault(c, _shares(model, c)) for c in right])
    for j, component in enumerate(COMPONENTS):
        if not component.place:
            continue
        match = _same(component.key, left, right)
        scale = np.sqrt(shares[:, j][:, None] * right_shares[:, j][None])
        out += scale * match * (of_ranks if component.over_ranks else 1.0) * _matern(distance / model.length[j])
    return np.asarray(out)


def _same(
    key: Callable[[CollectiveContext], Key], left: Sequence[CollectiveContext], right: Sequence[CollectiveContext]
) -> Array:
    """1 where two contexts have equal keys, else 0."""
    numbers: dict[Key, int] = {}
    codes = [np.array([numbers.setdefault(key(c), len(numbers)) for c in part]) for part in (left, right)]
    return np.asarray(codes[0][:, None] == codes[1][None], dtype=np.float64)


def _matern(distance: Array) -> Array:
    r = np.sqrt(3) * distance
    return np.asarray((1 + r) * np.exp(-r))
