"""Interval of the makespan from the intervals of the predictions, by sampling."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from cdmpp.predict.prediction import Prediction
from cdmpp.predict.requests.request import PriceRequest
from cdmpp.simulate.replay.build import NodeDurations
from cdmpp.simulate.replay.engine import Replayer
from cdmpp.simulate.replay.graph import Floats, Ints

#: Most node durations in memory at a time, 8 bytes each.
_CHUNK = 2_000_000


@dataclass(frozen=True)
class Spread:
    """Errors of the predictions as factors around 1.

    Attributes
    ----------
    below, above : Floats, length draws
        Logarithm of the factor for one standard deviation to either side.
    draw : Ints, length prices
        Draw of each price: equal programs on equal devices have the same error.
    device : Ints, length draws
        Device of each draw.
    """

    below: Floats
    above: Floats
    draw: Ints
    device: Ints

    def factors(self, samples: int, seed: int, correlation: float) -> Floats:
        """Sampled factors, shape samples x prices.

        A draw z from the normal distribution gives exp(z x below) or exp(z x above), by its sign: a
        lognormal in two pieces, whose median is the prediction and whose quantiles are the interval's ends.
        ``correlation`` is that of the draws of different programs on one device.
        """
        random = np.random.default_rng(seed)
        z = random.standard_normal((samples, len(self.below)))
        if correlation:
            shared = random.standard_normal((samples, int(self.device.max()) + 1))[:, self.device]
            z = np.sqrt(correlation) * shared + np.sqrt(1.0 - correlation) * z
        factors: Floats = np.exp(z * np.where(z < 0, self.below, self.above))
        return factors[:, self.draw]


def spread_of(requests: Sequence[PriceRequest], prices: Sequence[Prediction]) -> Spread:
    """The errors of predictions, from their intervals."""
    keys = [
        (json.dumps(request.device, sort_keys=True), price.name, str(price.program_hash), price.backend)
        for request, price in zip(requests, prices, strict=True)
    ]
    numbers = {key: i for i, key in enumerate(sorted(set(keys)))}  # independent of the order of the request
    below, above = np.zeros(len(numbers)), np.zeros(len(numbers))
    for key, price in zip(keys, prices, strict=True):
        below[numbers[key]], above[numbers[key]] = _slopes(price)
    devices = {name: i for i, name in enumerate(sorted({key[0] for key in keys}))}
    return Spread(
        below,
        above,
        np.array([numbers[key] for key in keys], dtype=np.int64),
        np.array([devices[key[0]] for key in numbers], dtype=np.int64),
    )


def _slopes(price: Prediction) -> tuple[float, float]:
    assert price.latency_s is not None and price.lower_s is not None and price.upper_s is not None
    levels = [float(level) for level in price.quantiles]
    low, high = min(levels), max(levels)
    below = np.log(price.latency_s / price.lower_s) / -NormalDist().inv_cdf(low) if low < 0.5 else 0.0
    above = np.log(price.upper_s / price.latency_s) / NormalDist().inv_cdf(high) if high > 0.5 else 0.0
    return float(below), float(above)


def sample_makespans(replayer: Replayer, nodes: NodeDurations, factors: Floats) -> Floats:
    """Makespans with the predictions scaled by sampled factors, one for each sample."""
    rows = max(1, _CHUNK // max(len(nodes.given_s), 1))
    makespans = [
        replayer.makespans(np.stack([nodes.durations(row) for row in factors[at : at + rows]]))
        for at in range(0, len(factors), rows)
    ]
    return np.concatenate(makespans)
