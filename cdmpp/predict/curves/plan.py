"""Plan of a curve: the queries of a grid, and the curve made of their predictions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cdmpp.devices.loading import resolve_device
from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import CdmppError, DataError
from cdmpp.predict.curves.points import Curve, CurvePoint, monotone_fit
from cdmpp.predict.curves.template import MAX_POINTS, Axes, Grid, Template
from cdmpp.predict.interface import Predictor
from cdmpp.predict.prediction import (
    DEFAULT_QUANTILES,
    Device,
    ErrorInfo,
    Prediction,
    Query,
    check_quantiles,
    check_settings,
)
from cdmpp.predict.prediction_matrix import Failed, PredictionMatrix
from cdmpp.predict.prediction_total import PredictionTotal
from cdmpp.programs.program import TensorProgram
from cdmpp.programs.query_options import DEFAULT_PROTOCOL, Backend, Protocol

Programs = Template | str | Mapping[str, Any] | Sequence[Template]


class CurvePlan:
    """Queries of a curve, and the curve made of their predictions.

    Parameters and errors are those of :func:`cdmpp.predict.curves.predict_curve`. ``find``: looks up a device by name,
    once for all points; without it the predictor does. ``max_predictions``: limit of the queries. Attribute
    ``levels``: of the quantiles.
    """

    def __init__(
        self,
        programs: Programs,
        axes: Axes,
        devices: Sequence[Device],
        backend: Backend | None = None,
        protocol: Protocol = DEFAULT_PROTOCOL,
        framework: str | None = None,
        quantiles: Sequence[float] = DEFAULT_QUANTILES,
        monotone: Sequence[str] | None = None,
        implementation: str | None = None,
        *,
        find: Callable[[str], DeviceSpec] | None = None,
        max_predictions: int = MAX_POINTS,
    ) -> None:
        self.levels = check_quantiles(quantiles)
        check_settings(protocol, framework, implementation)
        self._grid = grid = Grid(_templates(programs), axes)
        self._along = _along(grid, monotone)
        if not devices:
            raise DataError("a curve needs a device", hint="pass at least one device")
        rows = len(grid) * grid.programs_each * len(devices)
        if rows > max_predictions:
            raise DataError(
                f"{len(grid)} points of {grid.programs_each} programs on {len(devices)} devices are "
                f"{rows:,} predictions",
                hint=f"at most {max_predictions:,} predictions are allowed: use fewer values",
            )
        self._devices = [_device(device, find) for device in devices]
        points = [grid.programs(at, backend or "library") for at in grid.points()]
        of_points = [Failed("", point) if isinstance(point, CdmppError) else point for point in points]
        self._matrix: PredictionMatrix[_CurveDevice, _Programs] = PredictionMatrix(self._devices, of_points)
        self.queries = [
            Query(program, device.device, protocol, framework, implementation)
            for device, point in self._matrix.pairs()
            for program, _ in point
        ]

    def curve(self, model_id: str, predictions: Sequence[Prediction]) -> Curve:
        """The curve made of the predictions of :attr:`queries`."""
        remaining = iter(predictions)
        totals = (_total(device, point, remaining) for device, point in self._matrix.pairs())
        points: list[CurvePoint] = []
        for device, row in zip(self._devices, self._matrix.results(totals, _failed), strict=True):
            located = [replace(point, at=at) for point, at in zip(row, self._grid.points(), strict=True)]
            # A known device's alias is replaced by its name, at points with errors too.
            name = next((point.device for point in located if point.error is None), device.name)
            points += _fitted([replace(point, device=name) for point in located], self._grid, self._along)
        return Curve(model_id, self._grid.axes, self._along, points)


@dataclass(frozen=True)
class _CurveDevice:
    """A device and its name as given."""

    name: str
    device: DeviceSpec | str


#: Programs of one point with their counts.
_Programs = list[tuple[TensorProgram, int]]


def _templates(programs: Programs) -> Sequence[Template]:
    if isinstance(programs, str):
        return [Template.parse(programs)]
    if isinstance(programs, Mapping):
        return [Template(programs)]
    return [programs] if isinstance(programs, Template) else programs


#: Axes along which each device has less to do: latencies fall.
DIVIDING = ("tp", "ep", "ranks_per_node")


def _along(grid: Grid, monotone: Sequence[str] | None) -> list[str]:
    numeric = grid.numeric
    if monotone is None:
        return [name for name in numeric if name not in DIVIDING]
    for name in monotone:
        if name not in numeric:
            raise DataError(f"monotone names {name[:40]!r}, which is not a numeric axis", hint="name numeric axes only")
    return [name for name in grid.axes if name in monotone]


def _device(device: Device, find: Callable[[str], DeviceSpec] | None) -> _CurveDevice | Failed:
    try:
        spec: DeviceSpec | str = resolve_device(device, str if find is None else find)
    except CdmppError as error:
        name = device if isinstance(device, str) else device.get("name", "")  # type: ignore[union-attr]
        return Failed(str(name)[:100], error)
    return _CurveDevice(spec if isinstance(spec, str) else spec.name, spec)


def _failed(device: _CurveDevice | Failed, point: _Programs | Failed) -> CurvePoint:
    fault = point if isinstance(point, Failed) else device
    assert isinstance(fault, Failed)
    return CurvePoint(device.name, {}, error=ErrorInfo.of(fault.error))


def _total(device: _CurveDevice, point: _Programs, predictions: Iterator[Prediction]) -> CurvePoint:
    """A point's sums over its programs, from the next predictions; or its first error."""
    counted = [(next(predictions), count) for _, count in point]
    error = next((prediction.error for prediction, _ in counted if prediction.error is not None), None)
    if error is not None:
        return CurvePoint(device.name, {}, error=error)
    total = PredictionTotal.of(counted)
    return CurvePoint(
        counted[0][0].device,
        {},
        total.latency_s,
        total.lower_s,
        total.upper_s,
        domain=total.domain,
        domain_score=max(p.domain_score for p, _ in counted if p.domain_score is not None),
        roofline_s=float(sum(count * (p.roofline_s or 0.0) for p, count in counted)),
        domain_reason=total.domain_reason,
    )


def _fitted(points: list[CurvePoint], grid: Grid, along: Sequence[str]) -> list[CurvePoint]:
    """Points of one device with a monotone fit to the log latencies, because errors are ratios."""
    latency = np.array([np.nan if p.latency_s is None else p.latency_s for p in points], dtype=np.float64)
    values = np.log(latency).reshape(grid.shape)
    names = list(grid.axes)
    # The fit needs each axis sorted by value; the points keep the given order.
    order = [np.argsort(grid.axes[n]) if n in along else np.arange(len(grid.axes[n])) for n in names]
    window = np.ix_(*order)
    fit = np.empty_like(values)
    fit[window] = monotone_fit(values[window], [names.index(name) for name in along])
    seconds = np.where(fit == values, latency.reshape(grid.shape), np.exp(fit)).reshape(-1)
    return [
        point if point.error is not None else replace(point, fitted_s=float(second))
        for point, second in zip(points, seconds, strict=True)
    ]


def predict_curve(
    predictor: Predictor,
    programs: Programs,
    axes: Axes,
    devices: Sequence[Device],
    *,
    backend: Backend | None = None,
    protocol: Protocol = DEFAULT_PROTOCOL,
    framework: str | None = None,
    quantiles: Sequence[float] = DEFAULT_QUANTILES,
    monotone: Sequence[str] | None = None,
    implementation: str | None = None,
) -> Curve:
    """Predict a template over axes on devices.

    Parameters
    ----------
    programs : Template, operator text, operator object, or sequence of Template
        Programs of each point; several are summed, each times its count.
    axes : mapping of name to values
        An axis replaces the field of its name, or occurs in expressions. Values are numbers, texts ("float16") or
        booleans; every axis must be used.
    backend, protocol, framework, quantiles, implementation
        See :meth:`cdmpp.predict.predictor.LatencyPredictor.predict`.
    monotone : sequence of str, optional
        Numeric axes along which the fit does not decrease; default: all but ``tp``, ``ep`` and ``ranks_per_node``.

    Returns
    -------
    Curve
        An unknown device, or sizes that are not valid for the operator, are errors of their points.

    Raises
    ------
    DataError
        An axis is unused or invalid, ``monotone`` names something else, there are more than
        :data:`MAX_POINTS` programs to predict, or the options are not known.
    InvalidProgramError, UnsupportedOperatorError
        A template is invalid.

    Examples
    --------
    >>> predict_curve(predictor, "linear:n=4096,k=1024", {"m": [1, 2, 4, 8]}, ["t4"])      # doctest: +SKIP
    """
    settings = (backend, protocol, framework, quantiles, monotone, implementation)
    plan = CurvePlan(programs, axes, devices, *settings)
    return plan.curve(predictor.model_id, predictor.predict_queries(plan.queries, plan.levels))
