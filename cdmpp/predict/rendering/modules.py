"""Predictions of modules as HTML and Arrow tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from cdmpp.predict.rendering.arrow import Column
from cdmpp.predict.rendering.html import html_table
from cdmpp.predict.rendering.predictions import share_text, total_cells
from cdmpp.utils.units import format_latency

if TYPE_CHECKING:
    from cdmpp.predict.modules.prediction import ModulePrediction, ModuleProgram
    from cdmpp.predict.prediction_total import PredictionTotal

PROGRAM_HEADER = ("program", "call", "module", "phase", "count", "each", "total", "share", "domain")
#: Columns of :data:`PROGRAM_HEADER` that are aligned to the right.
PROGRAM_RIGHT = (4, 5, 6, 7)


def program_cells(program: ModuleProgram, module: str) -> tuple[str, ...]:
    """Cells of :data:`PROGRAM_HEADER`; ``module`` is the name of the root."""
    each, seconds = program.prediction.latency_s, program.seconds
    where = program.module or (module if program.phase != "optimizer" else "")
    return (
        program.program,
        program.call,
        where,
        program.phase,
        f"{program.count:,} x",
        "error" if each is None else format_latency(each),
        "" if seconds is None else format_latency(seconds),
        "" if program.share is None else share_text(program.share),
        program.domain or "",
    )


def by_time(prediction: ModulePrediction) -> list[ModuleProgram]:
    """The programs, most expensive first; those without a prediction last."""
    return sorted(prediction.programs, key=lambda program: -(program.seconds or 0.0))


def settings_text(prediction: ModulePrediction) -> str:
    """Mode, protocol, framework, types and model as one line."""
    parts = [prediction.mode, f"protocol {prediction.protocol}"]
    parts += [f"framework {prediction.framework}"] if prediction.framework else []
    parts += [f"dtype {prediction.dtype}"] if prediction.dtype else []
    parts += [f"autocast {prediction.autocast}"] if prediction.autocast else []
    return ", ".join([*parts, f"model {prediction.model_id}"])


def left_out_lines(prediction: ModulePrediction) -> list[str]:
    """One line per call that is not predicted, and one per failed program."""
    lines = [f"not predicted: {u.operator} ({u.count} x): {u.reason}" for u in prediction.left_out]
    for program in prediction.programs:
        if program.prediction.error is not None:
            lines.append(f"not predicted: {program.program} ({program.count} x): {program.prediction.error.message}")
    return lines


def module_html(prediction: ModulePrediction) -> str:
    """The total and its phases, then the programs, most expensive first."""
    caption = f"{prediction.name} on {prediction.device}: {settings_text(prediction)}"
    header = ("", "latency", "interval", "domain", "time by domain", "launches", "programs", "not predicted")
    rows = [("total", *total_cells(prediction.total))]
    if len(prediction.phases) > 1:
        rows += [(phase, *total_cells(total)) for phase, total in prediction.phases.items()]
    totals = html_table(header, rows, right=(1, 5, 6, 7), caption=caption)
    cells = [program_cells(program, prediction.name) for program in by_time(prediction)]
    return totals + html_table(PROGRAM_HEADER, cells, right=PROGRAM_RIGHT, notes=left_out_lines(prediction))


def modules_html(predictions: Sequence[ModulePrediction]) -> str:
    """One row per device."""
    header = ("module", "device", "latency", "interval", "domain", "time by domain", "launches", "programs", "failed")
    rows = [(p.name, p.device, *total_cells(p.total)) for p in predictions]
    notes = dict.fromkeys(line for prediction in predictions for line in left_out_lines(prediction))
    caption = settings_text(predictions[0]) if predictions else ""
    return html_table(header, rows, right=(2, 6, 7, 8), caption=caption, notes=list(notes))


def module_columns(predictions: Sequence[ModulePrediction]) -> dict[str, Column]:
    """Columns of an Arrow table with one row per program and device."""
    rows = [(prediction, program) for prediction in predictions for program in prediction.programs]

    def of(value: Callable[[ModulePrediction, ModuleProgram], Any]) -> list[Any]:
        return [value(prediction, program) for prediction, program in rows]

    def scaled(name: str) -> list[float | None]:
        """A figure of one launch times the number of launches."""
        values = of(lambda _, program: getattr(program.prediction, name))
        return [
            None if value is None else value * program.count for value, (_, program) in zip(values, rows, strict=True)
        ]

    return {
        "device": Column("string", of(lambda whole, _: whole.device)),
        "phase": Column("string", of(lambda _, program: program.phase)),
        "module": Column("string", of(lambda _, program: program.module)),
        "program": Column("string", of(lambda _, program: program.program)),
        "call": Column("string", of(lambda _, program: program.call)),
        "count": Column("int64", of(lambda _, program: program.count)),
        "latency_s": Column("float64", of(lambda _, program: program.prediction.latency_s), "s"),
        "seconds": Column("float64", of(lambda _, program: program.seconds), "s"),
        "seconds_lower": Column("float64", scaled("lower_s"), "s"),
        "seconds_upper": Column("float64", scaled("upper_s"), "s"),
        "share": Column("float64", of(lambda _, program: program.share)),
        "domain": Column("string", of(lambda _, program: program.domain)),
        "remark": Column("string", of(lambda _, program: program.remark)),
        "error": Column("string", of(lambda _, program: _message(program))),
    }


def _message(program: ModuleProgram) -> str | None:
    error = program.prediction.error
    return None if error is None else error.message


def total_line(total: PredictionTotal) -> str:
    """A total as text: "12.3 ms [10.0 ms – 15.0 ms], domain in: 100 % of the time in"."""
    latency, interval, domain, shares, *_ = total_cells(total)
    return f"{latency} [{interval}], domain {domain}: {shares}" if total.latency_s is not None else "not predicted"
