"""Predictions of whole torch modules: total, phases, and a table of programs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from cdmpp.devices import DeviceSpec, described_device, find_known
from cdmpp.devices.registry import commonest
from cdmpp.errors import DataError
from cdmpp.model.domain.score import Label, worst
from cdmpp.predict.modules.execution import Execution, HostProfile, ModuleTimeline, host_profile, is_compiled, run
from cdmpp.predict.modules.work import GATHERED, cached_s, seconds_of
from cdmpp.predict.prediction import Device, Prediction, device_list
from cdmpp.predict.prediction_total import PredictionTotal, total_cells, total_line
from cdmpp.predict.rendering import Column, Table, arrow_table, html_table, percent
from cdmpp.programs.frontends.graph import Unsupported
from cdmpp.programs.frontends.torch_module import ListedProgram, ModuleListing
from cdmpp.programs.operators import operator_family
from cdmpp.programs.query_options import Protocol
from cdmpp.utils.units import format_latency

#: A module's kernels are called from the host, one by one, by PyTorch, while the device computes.
DEFAULT_EXECUTION: Execution = "eager"
#: A module that is executed is the time line of its kernels.
KERNEL_PROTOCOL: Protocol = "kernel"
DEFAULT_FRAMEWORK = "pytorch"
PROGRAM_HEADER = ("call", "program", "module", "phase", "count", "each", "total", "share", "domain")
#: Columns of :data:`PROGRAM_HEADER` that are aligned to the right.
PROGRAM_RIGHT = (4, 5, 6, 7)


@dataclass(frozen=True)
class ModuleProgram:
    """A program in a module's table.

    Attributes
    ----------
    prediction : Prediction
        Of one launch; its ``error`` is set where the program cannot be predicted.
    call : str
        The ATen call that launches it, such as ``addmm``.
    module : str
        Qualified names of the modules that launch it, as one text: ``layers.0-31.mlp.up``.
    modules : tuple of str
        The same names one by one. The root has the empty name.
    count : int
        Launches in one run.
    share : float or None
        Of the total; None without a prediction.
    remark : str
        Why the program is not the call's own, where it is not.
    """

    prediction: Prediction
    call: str
    module: str
    modules: tuple[str, ...]
    phase: str
    count: int
    share: float | None
    remark: str

    @property
    def program(self) -> str:
        """The operator as text."""
        return self.prediction.name

    @property
    def seconds(self) -> float | None:
        """Latency of all launches in seconds; None without a prediction."""
        return None if self.prediction.latency_s is None else self.count * self.prediction.latency_s

    @property
    def domain(self) -> Label | None:
        """Domain of the prediction."""
        return self.prediction.domain

    def to_dict(self) -> dict[str, Any]:
        """The prediction's values for JSON, with call, module, phase, count, seconds, share and remark."""
        return {
            **self.prediction.to_dict(),
            "call": self.call,
            "phase": self.phase,
            "module": self.module,
            "count": self.count,
            "seconds": self.seconds,
            "share": self.share,
            "remark": self.remark,
        }


@dataclass(frozen=True)
class ModulePrediction:
    """Prediction of one run of a torch module on one device.

    Attributes
    ----------
    name : str
        Class of the module.
    device, protocol, framework, model_id
        As in :class:`cdmpp.Prediction`.
    dtype, autocast : str or None
        Type to which the module was cast, and type of products under autocast; None for neither.
    execution : {"eager", "compiled", "cuda-graph", "compiled-graph"} or None
        How the kernels are launched. None: the total is the sum of the programs by ``protocol``.
    timeline : ModuleTimeline or None
        Seconds of the device, of waiting for the host, and of the first call; None without an execution.
    total : PredictionTotal
        Latency with interval and domain. Transfers and communication are not in it.
    phases : dict of str to PredictionTotal
        The same for ``forward``; in training also for ``backward``, and for ``optimizer`` if it was asked for.
    programs : tuple of ModuleProgram
        In the order of their first launch.
    left_out : tuple of Unsupported
        Calls that launch something for which there is no operator: name, number and reason. The total is then a lower
        bound.
    assumptions : tuple of str
        What was assumed of values that the module reads: ``Tensor.item() is 1``.
    """

    name: str
    mode: str
    device: str
    protocol: str
    framework: str | None
    model_id: str
    dtype: str | None
    autocast: str | None
    execution: str | None
    timeline: ModuleTimeline | None
    total: PredictionTotal
    phases: dict[str, PredictionTotal]
    programs: tuple[ModuleProgram, ...]
    left_out: tuple[Unsupported, ...]
    assumptions: tuple[str, ...] = ()

    @property
    def latency_s(self) -> float | None:
        """Seconds of the total; None where nothing is predicted."""
        return self.total.latency_s

    @property
    def latency_ms(self) -> float | None:
        """Milliseconds of the total; None where nothing is predicted."""
        return self.total.latency_ms

    @property
    def lower_s(self) -> float | None:
        """Lower bound of the total's interval in seconds."""
        return self.total.lower_s

    @property
    def upper_s(self) -> float | None:
        """Upper bound of the total's interval in seconds."""
        return self.total.upper_s

    @property
    def domain(self) -> Label | None:
        """Domain of the total, by the share of the time."""
        return self.total.domain

    @property
    def lower_bound(self) -> bool:
        """Whether something is left out of the total: ``latency_s`` is then no prediction to compare."""
        return self.total.lower_bound

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        options = ("name", "mode", "device", "protocol", "framework", "model_id", "dtype", "autocast", "execution")
        return {
            **{name: getattr(self, name) for name in options},
            "timeline": None if self.timeline is None else asdict(self.timeline),
            "total": asdict(self.total),
            "phases": {phase: asdict(total) for phase, total in self.phases.items()},
            "programs": [program.to_dict() for program in self.programs],
            "left_out": [asdict(entry) for entry in self.left_out],
            "assumptions": list(self.assumptions),
        }

    def to_arrow(self) -> Any:
        """A ``pyarrow.Table`` with one row per program; ``.to_pandas()`` makes a data frame of it.

        Raises
        ------
        MissingDependencyError
            pyarrow is not installed.
        """
        return arrow_table(module_columns([self]))

    def __str__(self) -> str:
        return module_text(self)

    def _repr_html_(self) -> str:
        return module_html(self)


class ModulePredictions(list[ModulePrediction]):
    """Predictions of one module on several devices; notebooks show a row per device."""

    @property
    def latency_ms(self) -> list[float | None]:
        """Milliseconds of each total."""
        return [prediction.latency_ms for prediction in self]

    def to_arrow(self) -> Any:
        """A ``pyarrow.Table`` with one row per program and device.

        Raises
        ------
        MissingDependencyError
            pyarrow is not installed.
        """
        return arrow_table(module_columns(self))

    def __str__(self) -> str:
        if not self:
            return "no predictions"
        matrix = [str(module_matrix(self, SHOWN_PROGRAMS)), ""] if _is_one_module(self) else []
        return "\n".join([*matrix, *map(total_text, self), settings_text(self[0])])

    def _repr_html_(self) -> str:
        return modules_html(self)


def module_predictions(
    listing: ModuleListing,
    predictions: Sequence[Prediction],
    device: Device | Sequence[Device],
    execution: Execution | None = None,
    host: Any = None,
) -> ModulePrediction | ModulePredictions:
    """The answer for the device as the caller gave it, or a list with one answer for each of d devices.

    ``predictions``: of the p programs of the listing on the devices, program by program. ``execution`` None: the sum of
    the programs. ``host``: as :func:`cdmpp.predict.modules.execution.host_profile` takes it.
    """
    count = len(listing.programs)
    if not count:
        reasons = "; ".join(f"{entry.operator} ({entry.count} x): {entry.reason}" for entry in listing.left_out)
        raise DataError(f"{listing.name}: no kernel has an operator: {reasons}"[:500], hint="see cdmpp support")
    several = isinstance(device, Sequence) and not isinstance(device, str)
    devices = device_list(device)
    answers = ModulePredictions()
    for column, given in enumerate(devices):
        spec = specification_of(given)
        rows = kernels_of(listing, predictions[column :: len(devices)], spec, execution is not None)
        answers.append(_on_device(listing, rows, execution, host_profile(spec, host)))
    return answers if several else answers[0]


def kernels_of(
    listing: ModuleListing, predictions: Sequence[Prediction], device: DeviceSpec | None, executed: bool = True
) -> list[Prediction]:
    """The prediction of each row's kernel from those of the listing's programs on one device."""
    return [_of_kernel(row, predictions[row.program], device, executed) for row in listing.rows]


def specification_of(device: Device) -> DeviceSpec | None:
    """Figures of a device; None for one that only the predictor knows."""
    if isinstance(device, DeviceSpec):
        return device
    return find_known(device) or commonest(device) if isinstance(device, str) else described_device(device)


def _of_kernel(row: ListedProgram, prediction: Prediction, device: DeviceSpec | None, executed: bool) -> Prediction:
    """The prediction of a row's kernel, which may have more work than its program, or data in the cache."""
    if device is None or prediction.latency_s is None:
        return prediction
    program_s, reason = prediction.latency_s, ""
    may_be_cached = executed and device.kind != "cpu" and (row.work is None or row.call in GATHERED)
    if may_be_cached and operator_family(prediction.name.partition(":")[0]) == "vector":
        program_s, reason = cached_s(program_s, prediction.roofline_s or 0.0, row.call, device), "data in the cache"
    latency_s = program_s
    if row.work is not None:
        latency_s = seconds_of(row.work, program_s, device)
        reason = reason if latency_s == program_s else f"the kernel's own work ({row.work.kind})"
    if latency_s == prediction.latency_s:
        return prediction
    scale = latency_s / prediction.latency_s
    lower_s, upper_s = (scale * (bound or 0.0) for bound in (prediction.lower_s, prediction.upper_s))
    return replace(
        prediction,
        latency_s=latency_s,
        lower_s=min(lower_s, latency_s / WORK_INTERVAL),
        upper_s=max(upper_s, latency_s * WORK_INTERVAL),
        quantiles={level: scale * value for level, value in prediction.quantiles.items()},
        domain=worst(("near", prediction.domain)),
        domain_reason="; ".join(
            filter(None, (f"by {reason}, at sustained rates of the device", prediction.domain_reason))
        ),
    )


def _on_device(
    listing: ModuleListing, predictions: Sequence[Prediction], execution: Execution | None, host: HostProfile
) -> ModulePrediction:
    """``predictions`` are of the listing's rows."""

    def total_of(rows: Iterable[int], left_out: bool) -> PredictionTotal:
        return PredictionTotal.of(((predictions[i], listing.rows[i].count) for i in rows), left_out=left_out)

    total = total_of(range(len(predictions)), bool(listing.left_out))
    phases = {
        phase: total_of((i for i, row in enumerate(listing.rows) if row.phase == phase), phase in listing.incomplete)
        for phase in listing.phases
    }
    timeline = None
    if execution is not None and total.latency_s is not None:
        widened = [(p, row.count) for p, row in zip(predictions, listing.rows, strict=True)]
        seconds = [prediction.latency_s or 0.0 for prediction in predictions]
        device_width = math.hypot(total_width(widened), RULES_WIDTH if is_compiled(execution) else 0.0)
        middle, low, high = (
            run(
                listing.calls,
                seconds,
                host,
                execution,
                device_factor=math.exp(sign * device_width),
                host_factor=math.exp(sign * HALF_INTERVAL * host.residual),
            )
            for sign in (0, -1, 1)
        )
        timeline = middle
        total = replace(total, latency_s=middle.latency_s, lower_s=low.latency_s, upper_s=high.latency_s)
        for phase, part in phases.items():
            if part.latency_s is not None:
                bounds = [_phase_s(line, phase) for line in (middle, low, high)]
                phases[phase] = replace(part, latency_s=bounds[0], lower_s=bounds[1], upper_s=bounds[2])
    programs = []
    busy_s = sum(row.count * (p.latency_s or 0.0) for row, p in zip(listing.rows, predictions, strict=True))
    for row, prediction in zip(listing.rows, predictions, strict=True):
        latency_s = prediction.latency_s
        share = row.count * latency_s / busy_s if latency_s is not None and busy_s else None
        where = (row.call, row.module, row.modules, row.phase)
        programs.append(ModuleProgram(prediction, *where, row.count, share, row.remark))
    first = predictions[0]
    return ModulePrediction(
        listing.name,
        listing.mode,
        first.device,
        first.protocol,
        first.framework,
        first.model_id,
        listing.dtype,
        listing.autocast,
        execution,
        timeline,
        total,
        phases,
        tuple(programs),
        listing.left_out,
        listing.assumptions,
    )


def _phase_s(line: ModuleTimeline, phase: str) -> float:
    """Seconds of a phase on a time line; the first has the first call."""
    ends = list(line.phase_ends_s)
    place = ends.index(phase)
    return line.phase_ends_s[phase] - (line.phase_ends_s[ends[place - 1]] if place else -line.first_call_s)


#: Bounds of a kernel that is predicted by its work, as a factor.
WORK_INTERVAL = 2.0
#: Half of an 80 % interval in standard deviations.
HALF_INTERVAL = 1.2816
#: Half of the interval of the rules of ``torch.compile``, as a logarithm.
RULES_WIDTH = 0.2
#: Correlation of the errors of two programs of a module.
CORRELATION = 0.5


def total_width(counted: Sequence[tuple[Prediction, int]]) -> float:
    """Half of a total's interval as a logarithm: errors of different programs are partly independent."""
    shares, widths = [], []
    for prediction, count in counted:
        if prediction.latency_s and prediction.lower_s and prediction.upper_s:
            shares.append(count * prediction.latency_s)
            widths.append(0.5 * math.log(prediction.upper_s / prediction.lower_s))
    total = sum(shares)
    parts = [share / total * width for share, width in zip(shares, widths, strict=True)]
    return math.sqrt(CORRELATION * sum(parts) ** 2 + (1 - CORRELATION) * sum(part**2 for part in parts))


def program_cells(program: ModuleProgram, module: str) -> tuple[str, ...]:
    """Cells of :data:`PROGRAM_HEADER`; ``module`` is the name of the root."""
    launch_s, seconds = program.prediction.latency_s, program.seconds
    where = program.module or (module if program.phase != "optimizer" else "")
    return (
        program.call,
        program.program,
        where,
        program.phase,
        f"{program.count:,} x",
        "error" if launch_s is None else format_latency(launch_s),
        "" if seconds is None else format_latency(seconds),
        "" if program.share is None else percent(program.share),
        program.domain or "",
    )


def by_time(prediction: ModulePrediction) -> list[ModuleProgram]:
    """The programs, most expensive first; those without a prediction last."""
    return sorted(prediction.programs, key=lambda program: -(program.seconds or 0.0))


def settings_text(prediction: ModulePrediction) -> str:
    """Mode, protocol, framework, types and model as one line."""
    how = f"protocol {prediction.protocol}" if prediction.execution is None else f"execution {prediction.execution}"
    parts = [prediction.mode, how]
    parts += [f"framework {prediction.framework}"] if prediction.framework else []
    parts += [f"dtype {prediction.dtype}"] if prediction.dtype else []
    parts += [f"autocast {prediction.autocast}"] if prediction.autocast else []
    return ", ".join([*parts, f"model {prediction.model_id}"])


def total_text(prediction: ModulePrediction) -> str:
    """Total and its parts as one line; a lower bound is called so."""
    text = f"{prediction.name} on {prediction.device}: {total_line(prediction.total)}"
    if prediction.lower_bound:
        count = sum(entry.count for entry in prediction.left_out) + prediction.total.failed
        text += f"; a lower bound: {count} {'call is' if count == 1 else 'calls are'} left out"
    return text


def timeline_text(line: ModuleTimeline) -> str:
    """Parts of a time line as text."""
    parts = {"device busy": line.device_busy_s, "waiting for the host": line.waiting_s, "first call": line.first_call_s}
    return ", ".join(f"{name} {format_latency(seconds)}" for name, seconds in parts.items())


#: Programs of a printed prediction.
SHOWN_PROGRAMS = 8


def module_text(prediction: ModulePrediction) -> str:
    """The total, its parts, and the most expensive programs."""
    lines = [total_text(prediction)]
    lines += ["  " + timeline_text(prediction.timeline)] if prediction.timeline is not None else []
    if len(prediction.phases) > 1:
        lines += [f"  {phase}: {total_line(total)}" for phase, total in prediction.phases.items()]
    programs = by_time(prediction)
    rows = [program_cells(program, prediction.name) for program in programs[:SHOWN_PROGRAMS]]
    if rest := programs[SHOWN_PROGRAMS:]:
        rows.append(_rest([program.seconds for program in rest], [program.share for program in rest]))
    table = str(Table(PROGRAM_HEADER, rows, PROGRAM_RIGHT))
    return "\n".join([*lines, "", table, "", *left_out_lines(prediction), settings_text(prediction)])


def _rest(seconds: Sequence[float | None], shares: Sequence[float | None]) -> tuple[str, ...]:
    """Cells of the programs that are not shown."""
    time_s, share = (sum(value or 0.0 for value in values) for values in (seconds, shares))
    return f"{len(seconds)} more", "", "", "", "", "", format_latency(time_s), percent(share), ""


def _is_one_module(predictions: Sequence[ModulePrediction]) -> bool:
    """Whether all predictions have the same programs, so that devices can be columns."""
    return len({tuple((p.call, p.program, p.phase) for p in answer.programs) for answer in predictions}) == 1


def module_matrix(predictions: Sequence[ModulePrediction], max_rows: int | None = None) -> Table:
    """One row per program, the ``max_rows`` most expensive first, a column per device; then the totals."""
    rows = sorted(
        zip(*(answer.programs for answer in predictions), strict=True),
        key=lambda row: -max(program.seconds or 0.0 for program in row),
    )
    first = predictions[0]
    cells = [
        (*program_cells(row[0], first.name)[:5], *(_seconds_text(program.seconds) for program in row))
        for row in rows[:max_rows]
    ]
    if rest := rows[len(cells) :]:
        sums = [format_latency(sum(program.seconds or 0.0 for program in column)) for column in zip(*rest, strict=True)]
        cells.append((f"{len(rest)} more", "", "", "", "", *sums))
    cells.append(("total", "", "", "", "", *(_seconds_text(answer.latency_s) for answer in predictions)))
    header = (*PROGRAM_HEADER[:5], *(answer.device for answer in predictions))
    return Table(header, cells, range(4, len(header)))


def _seconds_text(seconds: float | None) -> str:
    return "error" if seconds is None else format_latency(seconds)


def left_out_lines(prediction: ModulePrediction) -> list[str]:
    """One line per call that is not predicted, per failed program, and per assumption."""
    lines = [f"assumed: {text}" for text in prediction.assumptions]
    lines += [f"not predicted: {u.operator} ({u.count} x): {u.reason}" for u in prediction.left_out]
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
    """Programs by devices, then one row per device."""
    matrix = module_matrix(predictions).html() if len(predictions) > 1 and _is_one_module(predictions) else ""
    header = ("module", "device", "latency", "interval", "domain", "time by domain", "launches", "programs", "failed")
    rows = [(p.name, p.device, *total_cells(p.total)) for p in predictions]
    notes = dict.fromkeys(line for prediction in predictions for line in left_out_lines(prediction))
    caption = settings_text(predictions[0]) if predictions else ""
    return matrix + html_table(header, rows, right=(2, 6, 7, 8), caption=caption, notes=list(notes))


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
