"""``cdmpp eval``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from cdmpp.cli.output import (
    ERROR_HEADER,
    RANKING_HEADER,
    JsonOption,
    ModelOption,
    error_cells,
    named_device,
    print_json,
    print_table,
    ranking_cells,
    unknown_device_advice,
)
from cdmpp.cli.progress import Show, progress_display

if TYPE_CHECKING:
    from cdmpp.data.table import MeasurementTable
    from cdmpp.errors import DataError
    from cdmpp.model.artifact.model import Artifact


Part = Literal["train", "validation", "test"]


def evaluate(
    records: Annotated[
        list[Path],
        typer.Option(
            metavar="FILE|DIR",
            help="Project records, a folder of cdmpp collect, a public table, a tuning log, or a CSV with the columns "
            "program, latency_us and device; repeatable.",
        ),
    ],
    model: ModelOption = None,
    devices: Annotated[
        str | None,
        typer.Option(
            metavar="A,B", help="Only these devices: names as in --device of other commands, or as the table has them."
        ),
    ] = None,
    split: Annotated[Part | None, typer.Option(help="Only rows of this part of the model's own split.")] = None,
    json: JsonOption = False,
) -> None:
    """Compare a model's predictions with measured tables.

    Errors by source, device, operator and element types, and over all rows. A last line says how many rows the model
    was trained on, by the hash of their shape or task: --split test leaves these out. Rows that cannot be predicted
    are counted by reason. "tau" is Kendall's tau of the latencies, "coverage" the share of measurements inside the
    80 % interval. --json prints fractions (0.073), the table per cent. For schedules of tasks it also prints the
    ranking within each task: Kendall's tau, and the best latency of a task over the best of the 1 and 5 programs
    that were predicted fastest.
    """
    from cdmpp.model.artifact.load import load_artifact
    from cdmpp.predict.predictor import default_model
    from cdmpp.train.evaluation.tables import evaluate as evaluate_tables

    chosen = None if devices is None else [name.strip() for name in devices.split(",") if name.strip()]
    # Mistakes first: a wrong path to the third file shall not show after an hour.
    _check(records)
    artifact = load_artifact(model or default_model())
    chosen = None if chosen is None else _device_names(artifact, records, chosen)
    with progress_display() as show:
        rows = _RowReport(show)
        result = evaluate_tables(artifact, rows.tables(records), devices=chosen, part=split, progress=rows.done)
    if not result["overall"]["n"]:
        raise _nothing(result, chosen, split)
    if json:
        print_json(result)
    else:
        _print(result)


def _device_names(artifact: Artifact, files: list[Path], chosen: list[str]) -> list[str]:
    """Names of devices; a short name that no table has becomes its commonest board.

    Raises UnknownDeviceError: neither cdmpp nor the model nor any table has a name.
    """
    from cdmpp.data.load import load_table
    from cdmpp.devices.host import is_native, native_name
    from cdmpp.devices.registry import lookup
    from cdmpp.errors import UnknownDeviceError

    def board(name: str) -> str:
        if is_native(name):
            return native_name(name)
        try:
            return lookup(name).name
        except UnknownDeviceError:
            if any(name in load_table(file).device_name.used() for file in files):
                return name
            return named_device(artifact, name).name

    return [board(name) for name in chosen]


def _nothing(result: dict[str, Any], chosen: list[str] | None, split: str | None) -> DataError:
    """Why not a single row was predicted."""
    from cdmpp.errors import DataError

    reasons: Counter[str] = Counter()
    for entry in result["unsupported"]:
        reasons[entry["reason"]] += entry["n"]
    unknown = [entry["device"] for entry in result["unsupported"] if entry["reason"] == "unknown_device"]
    of = f" of {', '.join(chosen)}" if chosen is not None else ""
    of += f" in the {split} part" if split else ""
    left = ", ".join(f"{reason} {n:,}" for reason, n in reasons.most_common(5))
    left += f" (devices: {', '.join(sorted(set(unknown))[:5])})" if any(unknown) else ""
    return DataError(
        f"no row{of} can be compared with a prediction" + (f": {left}" if left else ""),
        hint=unknown_device_advice(unknown) or "cdmpp data info FILE shows devices and reasons",
    )


def _check(files: list[Path]) -> None:
    """Raise for a file that is missing or no table, before the first is evaluated."""
    from cdmpp.data.folder import records_file
    from cdmpp.data.importers.log_files import log_importer
    from cdmpp.data.load import detect, load_table
    from cdmpp.data.raw import read_columns
    from cdmpp.data.records import NEEDED

    for file in map(records_file, files):
        if log_importer(file) is not None:
            continue
        columns = read_columns(file)
        if not set(columns) >= NEEDED and detect(columns) is None:
            load_table(file)  # raises the specific error


class _RowReport:
    """Reads tables one after the other, each when the one before is done with, and shows their rows."""

    def __init__(self, show: Show) -> None:
        self._show, self._name, self._done, self._total = show, "", 0, 0

    def tables(self, files: list[Path]) -> Iterator[MeasurementTable]:
        """Yield the tables."""
        from cdmpp.data.load import load_table

        for file in files:
            table = load_table(file)
            self._name, self._done, self._total = file.name, 0, len(table)
            yield table

    def done(self, rows: int) -> None:
        """Add predicted rows of the present table."""
        self._done += rows
        self._show(self._name, self._done, self._total)


def _trained_on(result: dict[str, Any]) -> str:
    """One sentence about the rows that were training rows."""
    parts, rows = result["parts"], result["overall"]["n"]
    if parts is None:
        return "The model does not name its split: some of these rows may have been training rows."
    return (
        f"The model was trained on {parts['trained_on']:,} of these {rows:,} rows; "
        f"{parts['test']:,} belong to the test part of its split (--split test)."
    )


def _print(result: dict[str, Any]) -> None:
    ranked = "ranked_groups" in result["overall"]

    def cells(figures: dict[str, Any]) -> list[str]:
        return error_cells(figures) + (ranking_cells(figures) if ranked else [])

    rows = [(g["source"], g["device"], g["op"], g["dtype"], *cells(g)) for g in result["groups"]]
    rows.append(("all", "", "", "", *cells(result["overall"])))
    header = ("source", "device", "operator", "types", *ERROR_HEADER, *(RANKING_HEADER if ranked else ()))
    print_table(header, rows, right=range(4, len(header)))
    print(_trained_on(result))
    if result["unsupported"]:
        print("not predicted:")
        names = ("source", "device", "op", "n", "reason")
        print_table(names, [[str(u[name]) for name in names] for u in result["unsupported"]], right=(3,))
