"""``cdmpp adapt``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from cdmpp.cli.output import (
    ERROR_HEADER,
    JsonOption,
    ModelOption,
    error_cells,
    on_terminal,
    percent,
    print_json,
    print_table,
)

if TYPE_CHECKING:
    from cdmpp.devices import DeviceSpec


#: cdmpp.adaptation.samplers.SAMPLERS, without its imports.
Sampler = Literal["kmeans", "random", "variance"]


def adapt(
    records: Annotated[
        Path,
        typer.Option(
            "--records",
            metavar="FILE|DIR",
            help="Measurements: project records, a folder of cdmpp collect or measure, a public operator "
            "table, or a CSV with the columns program and latency_us (or latency_ms, latency_s).",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder of the adapted model.", show_default=False)],
    device: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="A known device or a .toml/.json specification. Default: the device named in the records.",
            show_default=False,
        ),
    ] = None,
    k: Annotated[
        int | None,
        typer.Option(
            "--k",
            min=1,
            help="Use so many records, chosen without their latencies, and report the error on the others. "
            "Default: use all.",
            show_default=False,
        ),
    ] = None,
    sampler: Annotated[Sampler, typer.Option(help="How the k records are chosen.")] = "kmeans",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the choice.")] = 0,
    model: ModelOption = None,
    json: JsonOption = False,
) -> None:
    """Adapt a model to a device by measurements of it.

    Writes a small folder that refers to the model and that every --model option accepts. Predictions for other
    devices do not change. Prints the errors on held-out measurements before and after. The correction is shrunk
    until it reduces that error. If no part of it does, the model's predictions are kept, with a warning.
    """
    from cdmpp.adaptation.adapt import adapt as adapt_model
    from cdmpp.adaptation.records import device_records
    from cdmpp.artifact.adapted import check_target, save_adapted
    from cdmpp.artifact.folder import default_model
    from cdmpp.artifact.load import load_artifact

    artifact = load_artifact(model or default_model())
    check_target(out, artifact)
    rows = device_records(records, _device(device), artifact)
    with _progress(len(rows.usable)) as done:
        made = adapt_model(artifact, rows, k=k, sampler=sampler, seed=seed, progress=done)
    save_adapted(out, made.artifact)
    result = made.report
    if json:
        print_json(result)
    else:
        _print(result, out)
    for entry in result["warnings"]:
        print(f"warning: {entry['code']}: {entry['message']}", file=sys.stderr)


def _device(text: str | None) -> DeviceSpec | str | None:
    """A file's specification; a name stays one, for the model may know devices that no table has."""
    from cdmpp.devices.loading import load_device

    if text is None or not text.lower().endswith((".toml", ".json")):
        return text
    return load_device(text)


@contextmanager
def _progress(rows: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal; nothing elsewhere."""
    if not on_terminal():
        yield lambda _rows: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("records", total=rows)
        yield lambda count: bars.advance(task, count)


def _print(result: dict[str, Any], out: Path) -> None:
    checked = result["cross_validated"]
    families = ", ".join(f"{name} {count}" for name, count in result["families"].items())
    print(f"{result['model_id']}: {result['programs']} programs of {result['device']} ({families})")
    if result["weight"]:
        share = "" if result["weight"] == 1.0 else f", {result['weight']:.0%} of the correction is applied"
        after = f"{percent(checked['before'])} before, {percent(checked['after'])} after{share}"
        print(f"mean error on measurements left out: {after}")
    else:
        print(f"the base model's predictions are kept; mean error on the measurements: {percent(checked['before'])}")
    if result["after"] is not None:
        rows = [(name, *error_cells(result[name]["overall"])) for name in ("before", "after")]
        print_table(("other rows", *ERROR_HEADER), rows, right=range(1, len(ERROR_HEADER) + 1))
    for reason, count in result["unsupported"].items():
        print(f"not used: {count:,} rows, {reason}")
    print(f"written to {out}")
