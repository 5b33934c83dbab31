"""Predictions before calibration: what the network, or the model of collectives, returns for queries."""

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


#: Arrays that are 0 where nothing sets them, with a default in common.
_DEFAULT_ZERO = ("distance", "step", "factor", "roofline_s", "adjusted")
#: Columns of :meth:`RawPredictions.to_table`; the network's quantile levels follow.
_COLUMNS = ("point", *_DEFAULT_ZERO)


@dataclass(frozen=True)
class RawPredictions:
    """Predictions of n queries before calibration, arrays of one length.

    :class:`cdmpp.model.inference.engine.Engine` sets the first four;
    :class:`cdmpp.model.inference.pipeline.InferencePipeline` adds the others.
    """

    point: Array  # (n,): log of the predicted seconds
    # (n, len(LEVELS)): log quantiles, before :func:`cdmpp.model.domain.calibration.read_quantiles` scales them by
    # ``factor``.
    levels: Array
    reference: Array = field(default_factory=_empty)  # (n,): log of the reference seconds; empty for collectives
    # (n, VIEW_COLUMNS) float32: projection of the last hidden layer; queries that the network treats alike are close
    # in it.
    view: Array | None = None
    # (n, trained devices) float32: log(latency / reference) predicted for each peer device; NaN for devices that are
    # no peers of the query.
    peers: Array | None = None
    # (n,): distance of the program from the training programs
    # (:meth:`cdmpp.model.domain.score.Domain.program_distance`).
    distance: Array = field(default_factory=_empty)
    # (n,): part of the domain score for a context that training did not have
    step: Array = field(default_factory=_empty)
    factor: Array = field(default_factory=_empty)  # (n,): calibrated factor on the interval's width
    # (n,): bound by arithmetic at peak and traffic at full bandwidth, in seconds
    roofline_s: Array = field(default_factory=_empty)
    # (n,): sum of the codes of :data:`cdmpp.model.inference.consistency.ADJUSTMENTS`: why a prediction is not the
    # network's own, or not "in" the domain. For a collective, 1 where the measurements lacked something of the query.
    adjusted: Array = field(default_factory=_empty)

    def __post_init__(self) -> None:
        for name in _DEFAULT_ZERO:
            if len(getattr(self, name)) != len(self.point):
                object.__setattr__(self, name, np.zeros(len(self.point)))

    def __len__(self) -> int:
        return len(self.point)

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
    def join(cls, blocks: Sequence[RawPredictions], rows: int) -> RawPredictions:
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
    def placed(cls, parts: Sequence[tuple[Array, RawPredictions]]) -> RawPredictions:
        """Outputs of several networks as one, without views and peers.

        ``parts``: positions of each output's rows, together 0 .. n - 1, and the output.
        """
        order = np.argsort(np.concatenate([positions for positions, _ in parts]))
        names = ("point", "levels", "reference", *_DEFAULT_ZERO)
        columns = {name: np.concatenate([getattr(output, name) for _, output in parts])[order] for name in names}
        return cls(**columns)

    @classmethod
    def empty(cls) -> RawPredictions:
        """Predictions of no queries."""
        return cls(np.zeros(0), np.zeros((0, len(LEVELS))))

    def to_table(self) -> Array:
        """One row of numbers per query, (n, columns), without reference, view and peers; for a cache."""
        return np.column_stack([*(getattr(self, name) for name in _COLUMNS), self.levels])

    @classmethod
    def from_table(cls, table: Array) -> RawPredictions:
        """Inverse of :meth:`to_table`."""
        columns = {name: table[:, position] for position, name in enumerate(_COLUMNS)}
        return cls(levels=table[:, len(_COLUMNS) :], **columns)
