"""Curves and their points, each with figures or an error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from cdmpp.model.domain.score import Label
from cdmpp.predict.curves.template import Value
from cdmpp.predict.prediction import ErrorInfo


@dataclass(frozen=True)
class CurvePoint:
    """One point on one device; with ``error``, there are no figures.

    Attributes
    ----------
    device : str
    at : dict of str to value
        The axes' values.
    latency_s : float
        Seconds, summed over the programs and their counts.
    lower_s, upper_s : float
        Sums of the programs' bounds. This assumes equal relative errors, so the width is an upper estimate.
    fitted_s : float
        The monotone fit at this point; equal to ``latency_s`` where no change is needed.
    domain : {"in", "near", "out"}
        Worst label of the programs; ``domain_score`` is their largest score.
    roofline_s : float
        Sum of the programs' bounds by arithmetic and traffic.
    """

    device: str
    at: dict[str, Value]
    latency_s: float | None = None
    lower_s: float | None = None
    upper_s: float | None = None
    fitted_s: float | None = None
    domain: Label | None = None
    domain_score: float | None = None
    roofline_s: float | None = None
    error: ErrorInfo | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, with either figures or an error."""
        if self.error is not None:
            return {"device": self.device, "at": self.at, "error": asdict(self.error)}
        return {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "error"}


@dataclass(frozen=True)
class Curve:
    """Predictions over a grid.

    Attributes
    ----------
    model_id : str
    axes : dict of str to list
    monotone : list of str
        Axes along which ``fitted_s`` does not decrease.
    points : list of CurvePoint
        Device by device, the last axis fastest.
    """

    model_id: str
    axes: dict[str, list[Value]]
    monotone: list[str]
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
