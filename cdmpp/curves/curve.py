"""Predicting a curve: a grid of questions to any predictor, sums over programs, and a monotone fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from cdmpp.curves.isotonic import monotone_fit
from cdmpp.curves.template import MAX_POINTS, Axes, Grid, Template, Value
from cdmpp.devices.loading import from_mapping
from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import CdmppError, DataError, InvalidDeviceError
from cdmpp.nn.domain import Label
from cdmpp.prediction import (
    DEFAULT_QUANTILES,
    ErrorInfo,
    Prediction,
    Predictor,
    Question,
    check_quantiles,
    check_settings,
)
from cdmpp.programs.program import TensorProgram
from cdmpp.programs.question import DEFAULT_PROTOCOL, Backend, Protocol

#: Worst last.
_DOMAINS: tuple[Label, ...] = ("in", "near", "out")
Device = DeviceSpec | Mapping[str, Any] | str


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
        Sums of the programs' bounds: errors are taken to be shared, so the width is an upper estimate.
    fitted_s : float
        The monotone fit at this point; ``latency_s`` itself where that needs no change.
    domain : {"in", "near", "out"}
        The worst of the programs'; ``domain_score`` is the largest.
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
        """Plain values for JSON; an error instead of figures, never both."""
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
        Devices outermost, the last axis fastest.
    """

    model_id: str
    axes: dict[str, list[Value]]
    monotone: list[str]
    points: list[CurvePoint]

    def to_dict(self) -> dict[str, Any]:
        """As ``POST /curve`` answers."""
        return {
            "model_id": self.model_id,
            "axes": self.axes,
            "monotone": self.monotone,
            "points": [point.to_dict() for point in self.points],
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Curve:
        """Back from :meth:`to_dict`."""
        points = []
        for point in fields["points"]:
            error = point.get("error")
            rest = {name: value for name, value in point.items() if name != "error"}
            points.append(CurvePoint(**rest, error=None if error is None else ErrorInfo(**error)))
        return cls(fields["model_id"], fields["axes"], fields["monotone"], points)


def predict_curve(
    predictor: Predictor,
    programs: Template | str | Mapping[str, Any] | Sequence[Template],
    axes: Axes,
    devices: Sequence[Device],
    *,
    backend: Backend | None = None,
    protocol: Protocol = DEFAULT_PROTOCOL,
    framework: str | None = None,
    quantiles: Sequence[float] = DEFAULT_QUANTILES,
    monotone: Sequence[str] | None = None,
) -> Curve:
    """Predict a template over axes on devices.

    Parameters
    ----------
    predictor : Predictor
    programs : Template, operator text, operator object, or sequence of Template
        What runs at each point; several are summed, each times its count.
    axes : mapping of name to values
        An axis replaces the field of its name, and stands in expressions. Numbers, texts ("float16") or truth
        values; every axis must be used.
    devices : sequence of DeviceSpec, mapping of its fields, or name
    backend, protocol, framework, quantiles
        As for :meth:`cdmpp.predictor.LatencyPredictor.predict`.
    monotone : sequence of str, optional
        Axes of numbers along which latency cannot fall; default: all of them.

    Returns
    -------
    Curve
        A device that is not known, or sizes that make no program, are errors of their points.

    Raises
    ------
    DataError
        An axis is not used or is none, ``monotone`` names something else, there are more than
        :data:`MAX_POINTS` programs to predict, or the settings are not known.
    InvalidProgramError, UnsupportedOperatorError
        A template is none.

    Examples
    --------
    >>> predict_curve(predictor, "linear:n=4096,k=1024", {"m": [1, 2, 4, 8]}, ["t4"])      # doctest: +SKIP
    """
    levels = check_quantiles(quantiles)
    check_settings(protocol, framework)
    grid = Grid(_templates(programs), axes)
    along = _along(grid, monotone)
    places = [_device(device) for device in devices]
    if not places:
        raise DataError("a curve needs a device")
    points = list(grid.points())
    made = [grid.programs(at, backend or "library") for at in points]
    asked = sum(1 if isinstance(one, CdmppError) else len(one) for one in made) * len(places)
    if asked > MAX_POINTS:
        raise DataError(
            f"{len(points)} points on {len(places)} devices are {asked:,} predictions",
            hint=f"at most {MAX_POINTS:,}: ask for fewer values at once",
        )
    answers = iter(
        predictor.predict_questions(
            [
                Question(program, device, protocol, framework)
                for _, device in places
                if not isinstance(device, CdmppError)
                for one in made
                if not isinstance(one, CdmppError)
                for program, _ in one
            ],
            levels,
        )
    )
    out: list[CurvePoint] = []
    for name, device in places:
        row = [_point(name, at, device, one, answers) for at, one in zip(points, made, strict=True)]
        # An alias of a known device becomes its name, at points with errors too.
        called = next((point.device for point in row if point.error is None), name)
        out += _fitted([replace(point, device=called) for point in row], grid, along)
    return Curve(predictor.model_id, grid.axes, along, out)


def _templates(programs: Template | str | Mapping[str, Any] | Sequence[Template]) -> Sequence[Template]:
    if isinstance(programs, str):
        return [Template.parse(programs)]
    if isinstance(programs, Mapping):
        return [Template(programs)]
    return [programs] if isinstance(programs, Template) else programs


def _along(grid: Grid, monotone: Sequence[str] | None) -> list[str]:
    numeric = grid.numeric
    if monotone is None:
        return numeric
    for name in monotone:
        if name not in numeric:
            raise DataError(f"monotone names {name[:40]!r}, which is not an axis of numbers")
    return [name for name in grid.axes if name in monotone]


def _device(device: Device) -> tuple[str, DeviceSpec | str | CdmppError]:
    """What a device is called in the answer, and the device or why it is none."""
    if isinstance(device, str):
        return device, device
    if isinstance(device, DeviceSpec):
        return device.name, device
    try:
        spec = from_mapping(device)
    except InvalidDeviceError as error:
        return str(device.get("name", ""))[:100], error
    return spec.name, spec


def _point(
    name: str,
    at: dict[str, Value],
    device: DeviceSpec | str | CdmppError,
    programs: list[tuple[TensorProgram, int]] | CdmppError,
    answers: Iterator[Prediction],
) -> CurvePoint:
    if isinstance(programs, CdmppError):
        return CurvePoint(name, at, error=ErrorInfo.of(programs))
    if isinstance(device, CdmppError):
        return CurvePoint(name, at, error=ErrorInfo.of(device))
    found = [(next(answers), count) for _, count in programs]
    failed = next((answer.error for answer, _ in found if answer.error is not None), None)
    if failed is not None:
        return CurvePoint(name, at, error=failed)

    def total(figure: str) -> float:
        return float(sum(count * getattr(answer, figure) for answer, count in found))

    return CurvePoint(
        found[0][0].device,
        at,
        latency_s=total("latency_s"),
        lower_s=total("lower_s"),
        upper_s=total("upper_s"),
        domain=max((answer.domain for answer, _ in found if answer.domain), key=_DOMAINS.index),
        domain_score=max(answer.domain_score for answer, _ in found if answer.domain_score is not None),
        roofline_s=total("roofline_s"),
    )


def _fitted(points: list[CurvePoint], grid: Grid, along: Sequence[str]) -> list[CurvePoint]:
    """Points of one device with their fit: of the logarithms, for errors of latencies are ratios."""
    latency = np.array([np.nan if p.latency_s is None else p.latency_s for p in points], dtype=np.float64)
    values = np.log(latency).reshape(grid.shape)
    names = list(grid.axes)
    # Along each axis by value, in whatever order the values were given.
    order = [np.argsort(grid.axes[n]) if n in along else np.arange(len(grid.axes[n])) for n in names]
    window = np.ix_(*order)
    fit = np.empty_like(values)
    fit[window] = monotone_fit(values[window], [names.index(name) for name in along])
    seconds = np.where(fit == values, latency.reshape(grid.shape), np.exp(fit)).reshape(-1)
    return [
        point if point.error is not None else replace(point, fitted_s=float(second))
        for point, second in zip(points, seconds, strict=True)
    ]
