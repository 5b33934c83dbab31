"""A curve before and after it is predicted: the queries of a grid, and what their answers make of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cdmpp.curves.isotonic import monotone_fit
from cdmpp.curves.points import Curve, CurvePoint
from cdmpp.curves.template import MAX_POINTS, Axes, Grid, Template, Value
from cdmpp.devices.loading import from_mapping
from cdmpp.devices.spec import DeviceSpec
from cdmpp.domain.score import worst
from cdmpp.errors import CdmppError, DataError
from cdmpp.prediction import DEFAULT_QUANTILES, ErrorInfo, Prediction, Query, check_quantiles, check_settings
from cdmpp.programs.program import TensorProgram
from cdmpp.programs.query_options import DEFAULT_PROTOCOL, Backend, Protocol

Device = DeviceSpec | Mapping[str, Any] | str
Programs = Template | str | Mapping[str, Any] | Sequence[Template]


class CurvePlan:
    """What to ask for a curve. Parameters and errors are those of :func:`cdmpp.curves.predict_curve`.

    Parameters
    ----------
    find : callable, optional
        Looks the name of a device up, once for all points; without it the predictor does.
    most : int
        Queries that may be asked.

    Attributes
    ----------
    queries : list of Query
        For a predictor; their answers go to :meth:`curve`.
    levels : tuple of float
    """

    def __init__(
        self,
        programs: Programs,
        axes: Axes,
        devices: Sequence[Device],
        *,
        backend: Backend | None = None,
        protocol: Protocol = DEFAULT_PROTOCOL,
        framework: str | None = None,
        quantiles: Sequence[float] = DEFAULT_QUANTILES,
        monotone: Sequence[str] | None = None,
        find: Callable[[str], DeviceSpec] | None = None,
        most: int = MAX_POINTS,
    ) -> None:
        self.levels = check_quantiles(quantiles)
        check_settings(protocol, framework)
        self._grid = grid = Grid(_templates(programs), axes)
        self._along = _along(grid, monotone)
        if not devices:
            raise DataError("a curve needs a device")
        rows = len(grid) * grid.programs_each * len(devices)
        if rows > most:
            raise DataError(
                f"{len(grid)} points of {grid.programs_each} programs on {len(devices)} devices are "
                f"{rows:,} predictions",
                hint=f"at most {most:,}: ask for fewer values at once",
            )
        self._places = [_device(device, find) for device in devices]
        self._points = list(grid.points())
        self._made = [grid.programs(at, backend or "library") for at in self._points]
        self.queries = [
            Query(program, device, protocol, framework)
            for _, device in self._places
            if not isinstance(device, CdmppError)
            for one in self._made
            if not isinstance(one, CdmppError)
            for program, _ in one
        ]

    def curve(self, model_id: str, answers: Sequence[Prediction]) -> Curve:
        """The curve that the answers to :attr:`queries` make."""
        left = iter(answers)
        out: list[CurvePoint] = []
        for name, device in self._places:
            row = [_point(name, at, device, one, left) for at, one in zip(self._points, self._made, strict=True)]
            # An alias of a known device becomes its name, at points with errors too.
            called = next((point.device for point in row if point.error is None), name)
            out += _fitted([replace(point, device=called) for point in row], self._grid, self._along)
        return Curve(model_id, self._grid.axes, self._along, out)


def _templates(programs: Programs) -> Sequence[Template]:
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


def _device(device: Device, find: Callable[[str], DeviceSpec] | None) -> tuple[str, DeviceSpec | str | CdmppError]:
    """What a device is called in the answer, and the device or why it is none."""
    if isinstance(device, str) and find is None:
        return device, device
    try:
        if isinstance(device, str):
            assert find is not None
            device = find(device)
        elif isinstance(device, Mapping):
            device = from_mapping(device)
    except CdmppError as error:
        called = device if isinstance(device, str) else device.get("name", "")  # type: ignore[union-attr]
        return str(called)[:100], error
    return device.name, device


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
        domain=worst(answer.domain for answer, _ in found),
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
