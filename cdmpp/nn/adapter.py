"""An adapter: what k measurements of one device change in a model's answers for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any

import numpy as np

from cdmpp.devices.spec import DeviceSpec
from cdmpp.nn.adapter_features import Names
from cdmpp.nn.levels import LEVELS
from cdmpp.nn.residuals import AdapterFeatures, ResidualProcess, prior_variance
from cdmpp.nn.weights import Tuned

Array = np.ndarray[Any, np.dtype[Any]]

_MEDIAN = LEVELS.index(0.5)
_NORMAL = np.array([NormalDist().inv_cdf(level) for level in LEVELS])


@dataclass(frozen=True, eq=False)
class Adapter:
    """Residuals of one device on top of a base model.

    Attributes
    ----------
    device : DeviceSpec
        Rows of a device with these figures are adapted; all others are answered as by the base.
    process : ResidualProcess
    names : Names
        What the codes of the process's features stand for.
    weight : {0, 1}
        0: on the measurements left out, the base was better, so its answers are kept.
    width : float
        Factor on the intervals that :meth:`apply` gives, from the measurements left out.
    tuned : dict of arrays, optional
        Tuned weights (:meth:`cdmpp.nn.weights.Weights.tuned`).
    report : dict
        How it was made, and what it gains (:mod:`cdmpp.adaptation`).
    """

    device: DeviceSpec
    process: ResidualProcess
    names: Names
    weight: int
    width: float
    tuned: Tuned | None = None
    report: dict[str, Any] = field(default_factory=dict)

    def apply(
        self, point: Array, levels: Array, features: AdapterFeatures, *, one_by_one: bool = False
    ) -> tuple[Array, Array, Array]:
        """Adapted answers of queries.

        Parameters
        ----------
        point, levels : (n,), (n, len(LEVELS))
            The base's log latencies, with what tuning adds.
        features : AdapterFeatures, n rows
        one_by_one : bool
            See :meth:`ResidualProcess.mean_and_variance`.

        Returns
        -------
        point, levels
            Adapted; ``levels`` are to be scaled by :attr:`width`.
        unsure : (n,)
            Share of the process's prior deviation that is left: near 0 beside a measured query, 1 far off.
        """
        mean, variance = self.process.mean_and_variance(features, one_by_one=one_by_one)
        adapted, spread = centre_and_spread(self.process, point, levels, mean, variance)
        unsure = np.sqrt(np.minimum(variance / prior_variance(features, self.process.settings), 1.0))
        return adapted, spread, unsure


def centre_and_spread(
    process: ResidualProcess, point: Array, levels: Array, mean: Array, variance: Array
) -> tuple[Array, Array]:
    """Point and quantiles of queries with a residual of this mean and variance (without noise).

    The median is the base's point with the mean residual. Each quantile keeps the network's distance from its
    median, which knows which programs scatter, and the process's deviation is added in quadrature.
    """
    s = process.settings
    median = point + mean
    away = levels - levels[:, _MEDIAN : _MEDIAN + 1]
    widened = np.sign(_NORMAL) * np.sqrt(away**2 + _NORMAL**2 * variance[:, None])
    return median - s.shift * (variance + s.noise**2), median[:, None] + widened
