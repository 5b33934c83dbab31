"""``cdmpp predict`` for tables of operators."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from cdmpp.cli.errors import FAILED, INCOMPLETE, report
from cdmpp.cli.output import device_of
from cdmpp.cli.predict_options import PredictOptions
from cdmpp.cli.progress import progress_bar
from cdmpp.errors import DataError
from cdmpp.predict.tables.sources import is_table
from cdmpp.programs.query_options import DEFAULT_PROTOCOL

if TYPE_CHECKING:
    from cdmpp.devices.spec import DeviceSpec
    from cdmpp.predict.tables.predict import AnsweredSlice, SlicePredictor, TableSummary, TableTask

#: Requests to a service at a time, and seconds for the rows of one of them, with all retries.
_REQUESTS, _REQUEST_S, _RETRIES = 4, 600.0, 20


def table_of(programs: Sequence[str], options: PredictOptions) -> Path | None:
    """The table among the arguments of the command; None where there is none.

    Raises DataError: a table with other arguments or options of programs, or an option of tables without one.
    """
    tables = [program for program in programs if is_table(program)]
    if tables and len(programs) > 1:
        raise DataError(f"{tables[0]} is a table, which is predicted alone", hint="give one PROGRAM, or one table")
    given = options.flags(*(("dim", "json") if tables else ("out", "url", "ray")))
    if not given:
        return Path(tables[0]) if tables else None
    hint = "leave it out" if tables else "name a table of operators (.txt, .csv, .parquet)"
    raise DataError(f"{given[0]} is not for {'tables' if tables else 'programs, only for tables'}", hint=hint)


def predict_table(path: Path, given: PredictOptions) -> None:
    """Predict a table; answers go to ``out`` or, as CSV, to the standard output."""
    from cdmpp.predict.prediction import DEFAULT_QUANTILES, check_quantiles, check_settings
    from cdmpp.predict.tables.answers import format_of
    from cdmpp.predict.tables.predict import SlicePredictor, TableTask, predict_slices
    from cdmpp.predict.tables.rows import TableOptions

    devices = list(dict.fromkeys(given.device or ()))
    protocol = given.protocol or DEFAULT_PROTOCOL
    kind = format_of(given.out)
    if given.out is not None and path.exists() and given.out.exists() and path.samefile(given.out):
        raise DataError(f"{given.out} is the table itself", hint="write the answers to another file")
    if given.ray is not None and given.url is not None:
        raise DataError("--ray and --url exclude each other", hint="leave one of them out")
    check_settings(protocol, given.framework, given.implementation)
    levels = check_quantiles(given.quantile or DEFAULT_QUANTILES)

    def task(devices: Sequence[DeviceSpec | str]) -> TableTask:
        options = TableOptions(tuple(devices), given.backend, protocol, given.framework, given.implementation)
        return TableTask(path.absolute(), options, levels, kind)

    if given.url is not None:
        from cdmpp.client import PredictorClient
        from cdmpp.devices import local_device

        chosen = task([local_device(name) for name in given.device or ()])
        key = os.environ.get("CDMPP_API_KEY")
        with PredictorClient(given.url, api_key=key, timeout_s=_REQUEST_S, retries=_RETRIES) as client:
            predict = SlicePredictor(chosen, client)
            summary = _run(chosen, predict, given, predict_slices(predict, _REQUESTS))
    else:
        from cdmpp.predict.predictor import LatencyPredictor

        predictor = LatencyPredictor.load(given.model)
        chosen = task([device_of(predictor.artifact, name) for name in devices])
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
    task: TableTask, predict: SlicePredictor, given: PredictOptions, parts: Iterable[AnsweredSlice]
) -> TableSummary:
    """Write all slices, with a progress bar on a terminal."""
    from cdmpp.predict.tables.predict import write_answers

    if predict.reader.unused:
        print(f"note: columns that are not read: {', '.join(predict.reader.unused)}", file=sys.stderr)
    with progress_bar(task.path.name, "rows") as advance:
        return write_answers(task, parts, given.out, lambda part: advance(part.read, part.rows))


def _report(summary: TableSummary, given: PredictOptions) -> None:
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
