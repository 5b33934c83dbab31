"""``cdmpp curve``."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cdmpp.cli.errors import FAILED, report
from cdmpp.cli.options import option, with_fields
from cdmpp.cli.output import DevicesOption, JsonOption, ModelOption, print_json, print_table
from cdmpp.errors import DataError
from cdmpp.predict.rendering import out_reasons
from cdmpp.programs.query_options import DEFAULT_PROTOCOL, Backend, Framework, Implementation, Protocol
from cdmpp.utils.units import format_latency

if TYPE_CHECKING:
    from cdmpp.predict.curves import Curve, Template


@dataclass(frozen=True)
class CurveOptions:
    """Options of the predictions."""

    monotone: list[str] | None = option(
        None, "Axis along which latency cannot fall; repeatable. Default: every axis of numbers.", metavar="NAME"
    )
    protocol: Protocol = option(DEFAULT_PROTOCOL, "What the latency includes: device alone, in a graph, from the host.")
    framework: Framework | None = option(None, "Software that launches the library kernels, if known.")
    implementation: Implementation | None = option(None, "How the operators are executed, as in cdmpp predict.")
    backend: Backend | None = option(None, "A vendor library's kernels (default), or TVM programs.")
    quantile: list[float] | None = option(None, "Levels of the interval; repeatable. Default: 0.1 and 0.9.")
    model: ModelOption = None
    json: JsonOption = False


@with_fields(CurveOptions)
def curve(
    program: Annotated[
        list[str],
        typer.Argument(
            metavar="TEMPLATE",
            help="An operator whose sizes may be left to axes or be expressions over them "
            "(linear:m=batch*128,n=4096,k=1024); several are summed, each as N*TEMPLATE times N.",
        ),
    ],
    axis: Annotated[
        list[str],
        typer.Option(
            metavar="NAME=A,B,...",
            help="Values of an axis: numbers, or texts such as dtype=float16,float32; repeatable.",
        ),
    ],
    device: DevicesOption,
    **options: Any,
) -> None:
    """Predict the latency of a template over sizes, with a monotone fit.

    An invalid device or size does not stop the others. The exit code is 1 if no point can be predicted.
    """
    given = CurveOptions(**options)
    from cdmpp.devices import local_device
    from cdmpp.predict.curves import predict_curve
    from cdmpp.predict.predictor import DEFAULT_QUANTILES, LatencyPredictor

    devices = [local_device(d) for d in device]
    answer = predict_curve(
        LatencyPredictor.load(given.model),
        [_template(text) for text in program],
        _axes(axis),
        devices,
        backend=given.backend,
        protocol=given.protocol,
        framework=given.framework,
        quantiles=given.quantile or DEFAULT_QUANTILES,
        monotone=given.monotone,
        implementation=given.implementation,
    )
    if given.json:
        print_json(answer.to_dict())
    else:
        _print(answer, given.protocol)
    for (message, hint), _ in itertools.groupby(
        sorted((p.error.message, p.error.hint) for p in answer.points if p.error is not None)
    ):
        report(message, hint)
    if all(point.error is not None for point in answer.points):
        raise typer.Exit(FAILED)


def _template(text: str) -> Template:
    from cdmpp.predict.curves import Template

    times, star, rest = text.partition("*")
    if star and times.isdecimal():
        return Template.parse(rest, int(times[:18]))
    return Template.parse(text)


def _axes(texts: list[str]) -> dict[str, list[Any]]:
    from cdmpp.programs.operators import read_value

    axes: dict[str, list[Any]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        if not equals or not values or name in axes:
            raise DataError(f"--axis {text!r} is not NAME=A,B,... or says an axis twice", hint="for example m=1,2,4,8")
        read = [read_value(value.strip()) for value in values.split(",")]
        if any(isinstance(value, str) for value in read):
            read = [value.strip() for value in values.split(",")]
        axes[name.strip()] = read
    return axes


def _print(curve: Curve, protocol: Protocol) -> None:
    names = list(curve.axes)
    rows = []
    for p in curve.points:
        if p.latency_s is None or p.lower_s is None or p.upper_s is None or p.fitted_s is None:
            continue
        interval = f"{format_latency(p.lower_s)} – {format_latency(p.upper_s)}"
        at = (str(p.at[name]) for name in names)
        rows.append((p.device, *at, format_latency(p.latency_s), format_latency(p.fitted_s), interval, p.domain or ""))
    if rows:
        header = ("device", *names, "latency", "fitted", "interval", "domain")
        print_table(header, rows, right=range(1, len(names) + 3))
        for line in out_reasons((p.device, p) for p in curve.points):
            print(line)
        along = f"does not fall along {', '.join(curve.monotone)}" if curve.monotone else "is the latency"
        print(f"fitted {along}; protocol {protocol}; model {curve.model_id}")
