"""The record that inference returns for queries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cdmpp.model.nn.config import LEVELS

Array = np.ndarray[Any, np.dtype[Any]]

_LOW, _HIGH = LEVELS.index(0.1), LEVELS.index(0.9)
#: Weight of the interval's width (a natural logarithm) in the domain score.
SPREAD_STEP = 2.0


def _empty() -> Array:
    return np.zeros(0)


@dataclass(frozen=True)
class NetworkOutput:
    """Network output of n queries, arrays of one length.

    :class:`cdmpp.model.inference.engine.Engine` sets the first four;
    :class:`cdmpp.model.inference.pipeline.InferencePipeline` adds the others.

    Attributes
    ----------
    point : (n,)
        log of the predicted seconds.
    levels : (n, len(LEVELS))
        Log quantiles, before :func:`cdmpp.model.domain.calibration.read_quantiles` scales them by ``factor``.
    reference : (n,)
        log of the reference seconds.
    view : (n, VIEW_COLUMNS) float32, or None
        Projection of the last hidden layer; queries that the network treats alike are close in it.
    peers : (n, trained devices) float32, or None
        log(latency / reference) predicted for each peer device; NaN for devices that are no peers of the query.
    distance : (n,)
        Distance of the program from the training programs (:meth:`cdmpp.model.domain.score.Domain.program_distance`).
    step : (n,)
        Part of the domain score for a context that training did not have.
    factor : (n,)
        Calibrated factor on the interval's width.
    bent : (n,) int8
        Sum of the codes of :data:`cdmpp.model.inference.consistency.BENT`: why a prediction is not the network's own,
        or not "in" the domain.
    """

    point: Array
    levels: Array
    reference: Array
    view: Array | None = None
    peers: Array | None = None
    distance: Array = field(default_factory=_empty)
    step: Array = field(default_factory=_empty)
    factor: Array = field(default_factory=_empty)
    bent: Array = field(default_factory=_empty)

    @property
    def coverage(self) -> Array:
        """Distance from the training set, (n,): decides the domain label and the interval's factor."""
        return np.asarray(self.distance + self.step)

    @property
    def score(self) -> Array:
        """Domain score, (n,): ranks queries by the error to expect.

        Coverage separates new devices from known ones. Within either group, the width of the calibrated 80 %
        interval separates a convolution with ten possible library algorithms from a copy.
        """
        width = (self.levels[:, _HIGH] - self.levels[:, _LOW]) * self.factor
        return np.asarray(self.coverage + SPREAD_STEP * width)

    @classmethod
    def join(cls, blocks: Sequence[NetworkOutput], rows: int) -> NetworkOutput:
        """The first ``rows`` rows of an engine's outputs, in order; blocks without a view come last."""
        if len(blocks) == 1:
            view = None if blocks[0].view is None else blocks[0].view[:rows]
            return cls(blocks[0].point[:rows], blocks[0].levels[:rows], blocks[0].reference[:rows], view)
        views = [block.view for block in blocks if block.view is not None]
        return cls(
            np.concatenate([block.point for block in blocks])[:rows],
            np.concatenate([block.levels for block in blocks])[:rows],
            np.concatenate([block.reference for block in blocks])[:rows],
            np.concatenate(views)[:rows] if views else None,
        )

    @classmethod
    def placed(cls, parts: Sequence[tuple[Array, NetworkOutput]]) -> NetworkOutput:
        """Outputs of several networks as one, without views and peers.

        Parameters
        ----------
        parts : sequence of (rows, output)
            Positions of each output's rows; together they are 0 .. n - 1.
        """
        rows = np.concatenate([positions for positions, _ in parts])
        order = np.argsort(rows)

        def joined(name: str) -> Array:
            columns = [getattr(output, name) for _, output in parts]
            if not any(len(column) for column in columns):
                return _empty()
            filled = [c if len(c) else np.zeros(len(p)) for c, (p, _) in zip(columns, parts, strict=True)]
            return np.asarray(np.concatenate(filled)[order])

        names = ("point", "levels", "reference", "distance", "step", "factor", "bent")
        return cls(**{name: joined(name) for name in names})
