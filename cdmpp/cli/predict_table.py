"""``cdmpp predict`` for tables of operators."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cdmpp.cli.errors import FAILED, INCOMPLETE, report
from cdmpp.cli.output import device_of
from cdmpp.cli.progress import progress_bar
from cdmpp.errors import DataError
from cdmpp.predict.tables.sources import is_table
from cdmpp.programs.query_options import Backend, Framework, Implementation, Protocol

if TYPE_CHECKING:
    from cdmpp.devices.spec import DeviceSpec
    from cdmpp.model.artifact.model import Artifact
    from cdmpp.predict.tables.predict import AnsweredSlice, SlicePredictor, TableSummary, TableTask

#: Requests to a service at a time, and seconds for the rows of one of them, with all retries.
_REQUESTS, _REQUEST_S, _RETRIES = 4, 600.0, 20

OutOption = Annotated[
    Path | None,
    typer.Option("--out", metavar="FILE", help="Answers of a table: .csv or .parquet; default: CSV on stdout."),
]
UrlOption = Annotated[
    str | None,
    typer.Option(
        "--url",
        help="The service at this address predicts the table or torch module, not a local model; CDMPP_API_KEY has "
        "its key.",
    ),
]


@dataclass(frozen=True)
class TableArguments:
    """Options of ``cdmpp predict`` that concern tables."""

    devices: Sequence[str]
    protocol: Protocol
    framework: Framework | None
    backend: Backend | None
    levels: Sequence[float] | None
    model: Path | None
    strict: bool
    out: Path | None
    url: str | None
    #: Address of a Ray cluster, "" for the default one; None: without Ray.
    ray: str | None = None
    implementation: Implementation | None = None


def table_of(programs: Sequence[str], for_tables: dict[str, Any], for_programs: dict[str, Any]) -> Path | None:
    """The table among the arguments of the command; None where there is none.

    Parameters
    ----------
    for_tables, for_programs : dict
        Options that only tables have, and those that only programs have, by name.

    Raises
    ------
    DataError
        A table with other arguments, or an option of tables without one.
    """
    tables = [program for program in programs if is_table(program)]
    if tables and len(programs) > 1:
        raise DataError(f"{tables[0]} is a table, which is predicted alone", hint="give one PROGRAM, or one table")
    given = [name for name, value in (for_programs if tables else for_tables).items() if value]
    if not given:
        return Path(tables[0]) if tables else None
    hint = "leave it out" if tables else "name a table of operators (.txt, .csv, .parquet)"
    raise DataError(f"{given[0]} is not for {'tables' if tables else 'programs, only for tables'}", hint=hint)


def predict_table(path: Path, arguments: TableArguments) -> None:
    """Predict a table; answers go to ``out`` or, as CSV, to the standard output."""
    from cdmpp.predict.prediction import DEFAULT_QUANTILES, check_quantiles, check_settings
    from cdmpp.predict.tables.answers import format_of
    from cdmpp.predict.tables.predict import SlicePredictor, TableTask, predict_slices
    from cdmpp.predict.tables.rows import TableOptions

    given = arguments
    kind = format_of(given.out)
    if given.out is not None and path.exists() and given.out.exists() and path.samefile(given.out):
        raise DataError(f"{given.out} is the table itself", hint="write the answers to another file")
    if given.ray is not None and given.url is not None:
        raise DataError("--ray and --url exclude each other", hint="leave one of them out")
    check_settings(given.protocol, given.framework, given.implementation)
    levels = check_quantiles(given.levels or DEFAULT_QUANTILES)

    def task(devices: Sequence[DeviceSpec | str]) -> TableTask:
        options = TableOptions(tuple(devices), given.backend, given.protocol, given.framework, given.implementation)
        return TableTask(path.absolute(), options, levels, kind)

    if given.url is not None:
        from cdmpp.client import PredictorClient

        chosen = task([_specification(name) or name for name in given.devices])
        key = os.environ.get("CDMPP_API_KEY")
        with PredictorClient(given.url, api_key=key, timeout_s=_REQUEST_S, retries=_RETRIES) as client:
            predict = SlicePredictor(chosen, client)
            summary = _run(chosen, predict, given, predict_slices(predict, _REQUESTS))
    else:
        from cdmpp.predict.predictor import LatencyPredictor

        predictor = LatencyPredictor.load(given.model)
        chosen = task(_devices(predictor.artifact, given.devices))
        predict = SlicePredictor(chosen, predictor)
        if given.ray is None:
            summary = _run(chosen, predict, given, predict_slices(predict))
        else:
            from cdmpp.plan.distributed import load_predictor, predict_slices_on_ray, ray_cluster

            load = partial(load_predictor, None if given.model is None else given.model.absolute())
            with ray_cluster(given.ray) as ray:
                summary = _run(chosen, predict, given, predict_slices_on_ray(ray, chosen, load))
    _report(summary, given)


def _run(
    task: TableTask, predict: SlicePredictor, given: TableArguments, parts: Iterable[AnsweredSlice]
) -> TableSummary:
    """Write all slices, with a progress bar on a terminal."""
    from cdmpp.predict.tables.predict import write_answers

    if predict.reader.unused:
        print(f"note: columns that are not read: {', '.join(predict.reader.unused)}", file=sys.stderr)
    with progress_bar(task.path.name, "rows") as advance:
        return write_answers(task, parts, given.out, lambda part: advance(part.read, part.rows))


def _devices(artifact: Artifact, names: Sequence[str]) -> list[DeviceSpec]:
    return [device_of(artifact, name) for name in dict.fromkeys(names)]


def _specification(name: str) -> DeviceSpec | None:
    """The device of a file or this machine; None for the name of a device, which the service resolves."""
    from cdmpp.devices import is_local, load_device

    return load_device(name) if is_local(name) else None


def _report(summary: TableSummary, given: TableArguments) -> None:
    """Report rows with errors on stderr, and set the exit code."""
    if not summary.rows:
        report("the table has no rows", "one operator per row")
        raise typer.Exit(FAILED)
    if summary.first_error is None:
        return
    row, error = summary.first_error
    report(
        f"{summary.failed:,} of {summary.answers:,} answers have an error; row {row}: {error.message}",
        error.hint or "the columns error_code, error and error_hint have all errors",
    )
    if summary.failed == summary.answers:
        raise typer.Exit(FAILED)
    if given.strict:
        raise typer.Exit(INCOMPLETE)
