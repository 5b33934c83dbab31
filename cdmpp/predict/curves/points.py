"""Points of a curve, each with figures or an error, and the monotone fit through their latencies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from cdmpp.model.domain.score import Label
from cdmpp.predict.curves.template import Value
from cdmpp.predict.prediction import ErrorInfo
from cdmpp.utils.isotonic import pool_adjacent_violators


@dataclass(frozen=True)
class CurvePoint:
    """One point on one device; with ``error``, there are no figures."""

    device: str
    #: The axes' values.
    at: dict[str, Value]
    #: Seconds, summed over the programs and their counts.
    latency_s: float | None = None
    #: Sums of the programs' bounds. This assumes equal relative errors, so the width is an upper estimate.
    lower_s: float | None = None
    upper_s: float | None = None
    #: The monotone fit at this point; equal to ``latency_s`` where no change is needed.
    fitted_s: float | None = None
    #: By the share of the time, as that of any sum (:class:`cdmpp.model.domain.score.TotalDomain`); ``domain_score`` is
    #: the programs' largest score, ``domain_reason`` the largest part that is not ``in``.
    domain: Label | None = None
    domain_score: float | None = None
    #: Sum of the programs' bounds by arithmetic and traffic.
    roofline_s: float | None = None
    domain_reason: str | None = None
    error: ErrorInfo | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, with either figures or an error."""
        if self.error is not None:
            return {"device": self.device, "at": self.at, "error": asdict(self.error)}
        return {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "error"}


@dataclass(frozen=True)
class Curve:
    """Predictions over a grid."""

    model_id: str
    axes: dict[str, list[Value]]
    #: Axes along which ``fitted_s`` does not decrease.
    monotone: list[str]
    #: Device by device, the last axis fastest.
    points: list[CurvePoint]

    def to_dict(self) -> dict[str, Any]:
        """Body of a response of ``POST /curve``."""
        return {
            "model_id": self.model_id,
            "axes": self.axes,
            "monotone": self.monotone,
            "points": [point.to_dict() for point in self.points],
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Curve:
        """Inverse of :meth:`to_dict`."""
        points = []
        for point in fields["points"]:
            error = point.get("error")
            rest = {name: value for name, value in point.items() if name != "error"}
            points.append(CurvePoint(**rest, error=None if error is None else ErrorInfo(**error)))
        return cls(fields["model_id"], fields["axes"], fields["monotone"], points)


Array = np.ndarray[Any, np.dtype[np.float64]]

#: Maximum rounds of alternating projections, and the change at which they stop.
MAX_ROUNDS, TOLERANCE = 60, 1e-7


def monotone_fit(values: Array, axes: Sequence[int]) -> Array:
    """Fit that does not decrease along ``axes``, exactly, despite rounding.

    The nearest such values by least squares. Along one axis: pool adjacent violators. Along several axes: Dykstra's
    alternating projections onto the cones of the axes (Boyle and Dykstra 1986), which converge to the nearest point of
    their intersection. Values that need no change have none. A NaN in ``values`` is missing: it stays NaN and does not
    affect the fit.
    """
    if not axes or not values.size:
        return values.copy()
    free = [axis for axis in range(values.ndim) if axis not in axes]
    moved = np.moveaxis(values, free, range(len(free)))
    rest = moved.shape[len(free) :]
    grids = moved.reshape(-1, *rest)
    # Each grid separately: the fit of one device does not depend on the others.
    fitted = np.stack([_fit(grid) for grid in grids]).reshape(moved.shape)
    return np.moveaxis(fitted, range(len(free)), free)


def _fit(grid: Array) -> Array:
    known = np.isfinite(grid)
    if not known.any():
        return grid.copy()
    current, axes = grid.copy(), range(grid.ndim)
    corrections = [np.zeros_like(grid) for _ in axes]
    for _ in range(MAX_ROUNDS if grid.ndim > 1 else 1):
        before = current
        for axis in axes:
            corrected = current + corrections[axis]
            current = _project(corrected, axis)
            corrections[axis] = corrected - current
        if np.abs(current - before)[known].max() <= TOLERANCE:
            break
    return _running_maximum(current)


def _project(grid: Array, axis: int) -> Array:
    """Nearest grid that does not decrease along one axis."""
    lines = np.moveaxis(grid, axis, -1)
    out = lines.copy()
    flat, result = lines.reshape(-1, lines.shape[-1]), out.reshape(-1, lines.shape[-1])
    known = np.isfinite(flat)
    filled = np.where(known, flat, -np.inf)
    falls = (filled < np.maximum.accumulate(filled, axis=1)) & known
    for line in np.flatnonzero(falls.any(axis=1)):
        result[line, known[line]] = pool_adjacent_violators(flat[line, known[line]])
    return np.moveaxis(result.reshape(lines.shape), -1, axis)


def _running_maximum(grid: Array) -> Array:
    """Remove decreases of about 1e-8 that alternating projections leave; missing values stay missing."""
    known = np.isfinite(grid)
    out = np.where(known, grid, -np.inf)
    for axis in range(grid.ndim):
        out = np.maximum.accumulate(out, axis=axis)
    return np.where(known, out, np.nan)
