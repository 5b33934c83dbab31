"""The adapter: correction of a model's predictions for one device, fitted to k measurements."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any

import numpy as np

from cdmpp.devices.spec import DeviceSpec
from cdmpp.model.adapter.features import Names
from cdmpp.model.adapter.residuals import AdapterFeatures, ResidualProcess, prior_variance
from cdmpp.model.nn.config import LEVELS
from cdmpp.model.nn.weights import Tuned

Array = np.ndarray[Any, np.dtype[Any]]

_MEDIAN = LEVELS.index(0.5)
_NORMAL = np.array([NormalDist().inv_cdf(level) for level in LEVELS])


@dataclass(frozen=True, eq=False)
class Adapter:
    """Correction of a base model's predictions for one device.

    Attributes
    ----------
    device : DeviceSpec
        The adapted device. Queries on devices with other figures keep the base's predictions.
    process : ResidualProcess
    names : Names
        Texts of the codes in the process's features.
    weight : float
        Share of the correction that is applied, from cross-validation: 1 all of it, 0 the base's predictions.
    width : float
        Factor on the width of the adapted intervals, from cross-validation.
    tuned : dict of arrays, optional
        Tuned weights (:meth:`cdmpp.model.nn.weights.Weights.tuned`).
    report : dict
        Report of the adaptation (:mod:`cdmpp.train.adaptation`).
    scheduled : bool
        Whether it corrects the model's part for programs of backend ``tvm``, in place of the model itself.
    """

    device: DeviceSpec
    process: ResidualProcess
    names: Names
    weight: float
    width: float
    tuned: Tuned | None = None
    report: dict[str, Any] = field(default_factory=dict)
    scheduled: bool = False

    def apply(
        self, point: Array, levels: Array, features: AdapterFeatures, *, one_by_one: bool = False
    ) -> tuple[Array, Array, Array]:
        """Adapted predictions of queries.

        Parameters
        ----------
        point, levels : (n,), (n, len(LEVELS))
            The base's log latencies, with the shift of the tuned weights.
        features : AdapterFeatures, n rows
        one_by_one : bool
            See :meth:`ResidualProcess.mean_and_variance`.

        Returns
        -------
        point, levels
            Adapted values; :attr:`width` still has to scale ``levels``.
        unsure : (n,)
            Posterior over prior standard deviation: near 0 next to a measured query, 1 far from all. A
            :attr:`weight` below 1 moves it towards 1.
        """
        mean, variance = self.process.mean_and_variance(features, one_by_one=one_by_one)
        adapted, spread = centre_and_spread(self.process, point, levels, mean, variance, self.weight)
        unsure = np.sqrt(np.minimum(variance / prior_variance(features, self.process.settings), 1.0))
        return adapted, spread, unsure + (1.0 - self.weight) * (1.0 - unsure)


def centre_and_spread(
    process: ResidualProcess, point: Array, levels: Array, mean: Array, variance: Array, weight: float = 1.0
) -> tuple[Array, Array]:
    """Point and quantiles of queries, given mean and variance (without noise) of their residuals.

    The median is the base's point plus ``weight`` times the mean residual. Each quantile keeps the network's
    distance from the median, which depends on the program. The process's standard deviation and the part of the
    mean residual that is not applied are added in quadrature.
    """
    s = process.settings
    median = point + weight * mean
    away = levels - levels[:, _MEDIAN : _MEDIAN + 1]
    unsure = variance + ((1.0 - weight) * mean) ** 2
    widened = np.sign(_NORMAL) * np.sqrt(away**2 + _NORMAL**2 * unsure[:, None])
    return median - weight * s.shift * (variance + s.noise**2), median[:, None] + widened
