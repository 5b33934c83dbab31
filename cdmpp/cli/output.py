"""What commands print: JSON for machines, aligned tables for people. Nothing is ever cut."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cdmpp.errors import DataError
from cdmpp.predict.rendering import format_columns
from cdmpp.predict.rendering import percent as percent

if TYPE_CHECKING:
    from cdmpp.devices.spec import DeviceSpec
    from cdmpp.model.artifact.model import Artifact

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]
ModelOption = Annotated[
    Path | None, typer.Option("--model", metavar="DIR", help="Model folder; by default the one that ships with cdmpp.")
]
DevicesOption = Annotated[
    list[str],
    typer.Option(
        "--device",
        "-d",
        help="A known device (cdmpp devices), a .json/.toml specification, or native: this CPU; repeatable.",
    ),
]
DimOption = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=VALUE", help="Size of a dynamic dimension of an ONNX model; repeatable."),
]
NetworkOption = Annotated[
    str | None,
    typer.Option(
        help="Bytes per second of one device between nodes, or a name such as infiniband-ndr, roce-200 or efa-400. "
        "Default: assumed, and said."
    ),
]


def only_device(names: Sequence[str]) -> str:
    """The device of a command that takes one; DataError where several are given."""
    if len(set(names)) > 1:
        raise DataError(f"--device: {', '.join(names)}: this command takes one device", hint="run it once for each")
    return names[0]


def print_json(value: Any, indent: int | None = 1) -> None:
    """One JSON document; NaN and infinities are a bug and raise."""
    print(json.dumps(value, indent=indent, allow_nan=False))


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]], right: Iterable[int] = ()) -> None:
    """Print a header and rows as columns (:func:`cdmpp.predict.rendering.format_columns`)."""
    print("\n".join(format_columns([header, *rows], right)))


def on_terminal() -> bool:
    """Whether to show a progress bar: stderr is a terminal."""
    return sys.stderr.isatty()


ERROR_HEADER = ("n", "MAPE", "median", "within 10 %", "within 20 %", "tau", "coverage")
#: Order among the schedules of a task; only where some row has these figures.
RANKING_HEADER = ("tau in task", "top-1", "top-5", "tasks")


def error_cells(figures: dict[str, Any]) -> list[str]:
    """Cells of :data:`ERROR_HEADER` from the figures of :func:`cdmpp.train.evaluation.metrics.measure`."""
    tau = figures["kendall_tau"]
    return [
        f"{figures['n']:,}",
        percent(figures["mape"]),
        percent(figures["median_ape"]),
        percent(figures["within_10"]),
        percent(figures["within_20"]),
        "-" if tau is None else f"{tau:.3f}",
        percent(figures["coverage"]),
    ]


def ranking_cells(figures: dict[str, Any]) -> list[str]:
    """Cells of :data:`RANKING_HEADER` from the figures of :func:`cdmpp.train.evaluation.metrics.rank`."""
    if not figures.get("ranked_groups"):
        return ["-", "-", "-", str(figures.get("ranked_groups", "-"))]
    names = ("task_kendall_tau", "top1_score", "top5_score")
    return [*(f"{figures[name]:.3f}" for name in names), str(figures["ranked_groups"])]


def unknown_device_advice(names: Iterable[str]) -> str:
    """What to write in place of names that a table of measurements cannot use; empty without such names."""
    from cdmpp.devices.registry import family, lookup
    from cdmpp.errors import UnknownDeviceError

    for name in names:
        if not name:
            return "a row names no device: add a column device, or import a tuning log with --device"
        try:
            lookup(name)
        except UnknownDeviceError as error:
            if family(name):
                return f"{error.message}; name one of them"
    return ""


def device_of(artifact: Artifact, name: str) -> DeviceSpec:
    """A specification file (.json, .toml), ``native``, or a named device as :func:`named_device` finds it."""
    from cdmpp.devices import load_device

    return load_device(name, lambda plain: named_device(artifact, plain))


def named_device(artifact: Artifact, name: str) -> DeviceSpec:
    """Specification of a named device; a note on stderr where a short name means one of several boards."""
    from cdmpp.devices.registry import family, normalise, other_boards

    spec = artifact.device(name)
    others = other_boards(name) if normalise(name) != normalise(spec.name) and spec.name in family(name) else []
    if others:
        print(f"note: {name} is read as {spec.name}; other boards: {', '.join(others)}", file=sys.stderr)
    return spec
