"""``cdmpp predict``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cdmpp.cli.errors import FAILED, INCOMPLETE, report
from cdmpp.cli.options import with_fields
from cdmpp.cli.output import device_of, print_json, print_table
from cdmpp.cli.predict_module import module_of, predict_module
from cdmpp.cli.predict_options import PredictOptions
from cdmpp.cli.predict_search import Result, executed, print_search, ranked
from cdmpp.cli.predict_table import predict_table, table_of
from cdmpp.cli.reading import parse_sizes
from cdmpp.errors import CdmppError
from cdmpp.predict.prediction_matrix import Failed, PredictionMatrix
from cdmpp.programs.query_options import DEFAULT_IMPLEMENTATION, DEFAULT_PROTOCOL, Backend
from cdmpp.utils.units import format_latency

if TYPE_CHECKING:
    from cdmpp.devices import DeviceSpec
    from cdmpp.predict.prediction_total import PredictionTotal
    from cdmpp.predict.predictor import LatencyPredictor, Prediction
    from cdmpp.programs.frontends.graph import Unsupported
    from cdmpp.programs.program import TensorProgram

_MEANING = {
    "kernel": "device time only, without launch cost",
    "graph": "inside a captured graph",
    "eager": "called from the host, with launch cost",
}
_BACKEND_MEANING = {
    "library": "library (kernels of cuDNN, cuBLAS, oneDNN, ...)",
    "tvm": "tvm (TVM code as scheduled; without a schedule it is much slower than a library)",
}


@with_fields(PredictOptions)
def predict(
    program: Annotated[
        list[str],
        typer.Argument(
            metavar="PROGRAM",
            help="An operator (linear:m=512,n=4096,k=1024,dtype=float16; cdmpp support lists all), model.onnx, "
            "model.pt2 (torch.export), program.py (TVMScript), program.json (TVM JSON) or a MetaSchedule folder; "
            "or one table of operators (.txt, .csv, .parquet); or one torch module (package.module:factory).",
        ),
    ],
    **options: Any,
) -> None:
    """Predict the latency of programs on devices.

    Prints one line per program, with a column for each of several devices, and the sum by device with its interval and
    the share of its time in each domain. A faulty program or device does not stop the others. A sum that leaves nodes
    or programs out is a lower bound. The exit code is 1 when nothing could be predicted or a device is unknown, and 3
    with --strict when a sum is a lower bound.

    The schedules of a MetaSchedule folder are alternatives: they are ranked by task, and the sum has the fastest one of
    each task.

    The answers of a table are rows of CSV or Parquet, in its order and with errors in their own columns. With
    --strict the exit code is 3 when a row has an error.

    A torch module is not run: the kernels of PyTorch are listed by shapes. The factory is a function without arguments
    that returns the module, or the module and its example inputs; the current directory is importable.
    """
    given = PredictOptions(**options)
    sizes = parse_sizes(given.dim or [])
    factory = module_of(program, given)
    if factory is not None:
        _check_devices(given.device)
        return predict_module(factory, given)
    table = table_of(program, given)
    if table is not None:
        return predict_table(table, given)
    devices = _check_devices(given.device)
    from cdmpp.predict.predictor import DEFAULT_QUANTILES, LatencyPredictor, check_quantiles

    levels = check_quantiles(given.quantile or DEFAULT_QUANTILES)
    predictor = LatencyPredictor.load(given.model)
    programs = _programs(program, given.backend, sizes)
    results = _predict(predictor, programs, devices, levels, given)
    totals = _totals(results, bool(programs.left_out.total()))
    if given.json:
        print_json(
            {
                "model_id": predictor.model_id,
                "results": _json(results),
                "totals": [{"device": device, **asdict(total)} for device, total in totals.items()],
                "unsupported": [
                    {"source": source, "operator": u.operator, "count": u.count, "reason": u.reason}
                    for source, u in programs.unsupported
                ],
            }
        )
    else:
        _print(results, programs, predictor.model_id, levels, given)
    _report_errors(results)
    if not results:
        report("no program to predict", "see the operators listed above; cdmpp support lists all known")
    wrong_device = any(r.prediction.error is not None and "device" in r.prediction.error.code for r in results)
    if wrong_device or not any(r.prediction.error is None for r in results):
        raise typer.Exit(FAILED)
    if given.strict and any(total.lower_bound for total in totals.values()):
        report("a total is a lower bound: something is left out of it", "leave --strict out to accept lower bounds")
        raise typer.Exit(INCOMPLETE)


def _check_devices(device: list[str] | None) -> list[str]:
    if not device:
        raise typer.BadParameter("name at least one device (cdmpp devices)", param_hint="--device / -d")
    return device


@dataclass
class _SourcePrograms:
    """Programs of the arguments, and nodes of models that cannot be predicted.

    ``left_out``: what the totals lack, by argument: nodes of a model, tasks of a search.
    """

    items: list[tuple[_Source, TensorProgram | Failed]] = field(default_factory=list)
    unsupported: list[tuple[str, Unsupported]] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class _Source:
    """The argument that a program comes from, how often the program runs, and its task in a search."""

    source: str
    count: int
    task: str = ""


def _programs(sources: Sequence[str], backend: Backend | None, sizes: dict[str, int]) -> _SourcePrograms:
    from cdmpp.programs.frontends.load import load_programs

    programs = _SourcePrograms()
    # With several arguments, the sizes apply to the ONNX models among them.
    models = [s for s in sources if s.lower().endswith(".onnx")] or sources
    for source in sources:
        try:
            graph = load_programs(source, backend, (sizes or None) if source in models else None)
        except CdmppError as error:
            programs.items.append((_Source(source, 1), Failed(source, error)))
            continue
        tasks = {index: task for task, schedules in graph.alternatives.items() for index in schedules}
        programs.items += [
            (_Source(source, graph.counts[i], tasks.get(i, "")), program) for i, program in enumerate(graph.programs)
        ]
        programs.unsupported += [(source, u) for u in graph.unsupported]
        if graph.alternatives:
            programs.left_out[source] = sum(not schedules for schedules in graph.alternatives.values())
        else:
            programs.left_out[source] = sum(u.count for u in graph.unsupported)
    return programs


def _predict(
    predictor: LatencyPredictor,
    programs: _SourcePrograms,
    devices: Sequence[str],
    levels: tuple[float, ...],
    given: PredictOptions,
) -> list[Result]:
    """Every program on every device, program by program."""
    from cdmpp.predict.predictor import ErrorInfo, Prediction, Query

    protocol, framework = given.protocol or DEFAULT_PROTOCOL, given.framework
    specs: list[DeviceSpec | Failed] = []
    for name in dict.fromkeys(devices):
        try:
            specs.append(device_of(predictor.artifact, name))
        except CdmppError as error:
            specs.append(Failed(name, error))

    def failed(program: TensorProgram | Failed, device: DeviceSpec | Failed) -> Prediction:
        fault = program if isinstance(program, Failed) else device
        assert isinstance(fault, Failed)
        backend = "library" if isinstance(program, Failed) else program.backend
        error = ErrorInfo.of(fault.error)
        return Prediction(
            program.name, None, device.name, backend, protocol, framework, predictor.model_id, error=error
        )

    matrix = PredictionMatrix([program for _, program in programs.items], specs)
    queries = [Query(program, device, protocol, framework, given.implementation) for program, device in matrix.pairs()]
    rows = matrix.results(predictor.predict_queries(queries, levels), failed)
    return [
        Result(item.source, prediction, item.count, item.task)
        for (item, _), row in zip(programs.items, rows, strict=True)
        for prediction in row
    ]


def _json(results: list[Result]) -> list[dict[str, Any]]:
    """Results in the order of the programs; schedules with their task and their rank among its alternatives."""
    ranks = {id(r): rank for schedules in ranked(results).values() for rank, r in enumerate(schedules, 1)}
    return [
        {**r.prediction.to_dict(), "count": r.count, "source": r.source}
        | ({"task": r.task, "rank": ranks[id(r)] if r.prediction.error is None else None} if r.task else {})
        for r in results
    ]


def _totals(results: list[Result], left_out: bool) -> dict[str, PredictionTotal]:
    """Sum of count x latency by device; of a search, of the fastest schedule of each task."""
    from cdmpp.predict.prediction_total import PredictionTotal

    by_device: dict[str, list[tuple[Prediction | None, int]]] = {}
    for r in executed(results):
        by_device.setdefault(r.prediction.device, []).append((r.prediction, r.count))
    return {device: PredictionTotal.of(counted, left_out=left_out) for device, counted in by_device.items()}


def _print_matrix(results: list[Result], devices: int, programs: _SourcePrograms) -> None:
    """Time of all launches: one row per program, a column per device; then the totals."""
    from cdmpp.predict.prediction import latency_text

    rows = [results[start : start + devices] for start in range(0, len(results), devices)]
    cells = [
        (row[0].prediction.name, f"{row[0].count} x", *(latency_text(r.seconds, r.prediction.domain) for r in row))
        for row in rows
    ]
    for name, part in _sums(results, programs.unsupported):
        totals = _totals(part, bool(_left_out(part, programs))).values()
        bounds = ("at least " if total.lower_bound and total.latency_s is not None else "" for total in totals)
        cells.append(
            (
                f"total{name}",
                "",
                *(b + latency_text(t.latency_s, t.domain) for b, t in zip(bounds, totals, strict=True)),
            )
        )
    print_table(("program", "count", *(r.prediction.device for r in rows[0])), cells, right=range(1, devices + 2))


def _left_out(results: list[Result], programs: _SourcePrograms) -> int:
    """Nodes and tasks that the total of results lacks."""
    return sum(programs.left_out[source] for source in {r.source for r in results})


def _print(
    results: list[Result], programs: _SourcePrograms, model_id: str, levels: tuple[float, ...], given: PredictOptions
) -> None:
    from cdmpp.model.domain.calibration import interval_levels
    from cdmpp.predict.prediction_total import total_line
    from cdmpp.predict.rendering import interval_text

    outer = interval_levels(levels)
    beside = () if outer is levels else tuple(dict.fromkeys(levels))
    rows = []
    for r in results:
        p = r.prediction
        if r.task or p.latency_s is None:
            continue
        interval = interval_text(p.lower_s, p.upper_s)
        values = [format_latency(p.quantiles[f"{level:g}"]) for level in beside]
        rows.append((p.name, f"{r.count} x", p.device, format_latency(p.latency_s), interval, *values, p.domain or ""))
    listed = [r for r in results if not r.task]
    devices = len({r.prediction.device for r in listed})
    several = devices > 1 and len(listed) > devices
    if rows and several:
        _print_matrix(listed, devices, programs)
        if given.verbose:
            print()
    if rows and (given.verbose or beside or not several):
        columns = [f"{100 * level:g} %" for level in beside]
        print_table(("program", "count", "device", "latency", "interval", *columns, "domain"), rows, right=(1, 3))
    searches = [r for r in results if r.task]
    for source, device in dict.fromkeys((r.source, r.prediction.device) for r in searches):
        schedules = [r for r in searches if (r.source, r.prediction.device) == (source, device)]
        left_out = programs.left_out[source]
        print_search(source, device, schedules, _totals(schedules, bool(left_out))[device], left_out)
    for name, part in _sums([r for r in results if not r.task], programs.unsupported):
        left_out = _left_out(part, programs)
        for device, total in _totals(part, bool(left_out)).items():
            if total.latency_s is not None:
                print(
                    f"total{name} on {device}: {total_line(total)} "
                    f"({total.launches} launches of {total.programs} programs{_lacking(total.failed, left_out)})"
                )
    predicted = sum(r.prediction.error is None for r in results)
    for reason, count in Counter(r.prediction.domain_reason for r in results if _is_explained(r)).items():
        print(f"{count} of {predicted}: {reason}")
    for source, node in programs.unsupported:
        print(f"not predicted: {node.operator} ({node.count} x in {source}): {node.reason}")
    if predicted:
        ends = f"{100 * min(outer):g} % – {100 * max(outer):g} %"
        protocol = given.protocol or DEFAULT_PROTOCOL
        backends = sorted({r.prediction.backend for r in results})
        print(f"latency: protocol {protocol}, {_MEANING[protocol]}; interval: {ends}; model {model_id}")
        implementations = Counter(r.prediction.implementation for r in results if r.prediction.implementation)
        if implementations.keys() - {DEFAULT_IMPLEMENTATION}:
            print("implementation: " + ", ".join(f"{name} ({count})" for name, count in implementations.items()))
        print(f"backend: {'; '.join(_BACKEND_MEANING[backend] for backend in backends)}")


def _is_explained(result: Result) -> bool:
    """Whether the reason is shown: "out", another type's prediction, a device's status, an unmeasured collective."""
    reason = result.prediction.domain_reason or ""
    return result.prediction.domain == "out" or any(
        part in reason for part in ("ratio of the rooflines", "the device", "measured")
    )


def _lacking(failed: int, left_out: int) -> str:
    """What a total leaves out."""
    parts = [f"{failed} not predicted"] if failed else []
    if left_out:
        parts.append(f"a lower bound: {left_out} {'node is' if left_out == 1 else 'nodes are'} left out")
    return "".join(f", {part}" for part in parts)


def _sums(results: list[Result], unsupported: list[tuple[str, Unsupported]]) -> list[tuple[str, list[Result]]]:
    """Groups to print totals of: each model, or all operators of the command line together."""
    partial = {source for source, _ in unsupported}
    sources: dict[str, list[Result]] = {}
    for r in results:
        sources.setdefault(r.source, []).append(r)

    def several(part: list[Result]) -> bool:
        if any(r.source in partial for r in part):
            return True
        return len({r.prediction.program_hash for r in part}) > 1 or any(r.count > 1 for r in part)

    models = [(f" of {source}", part) for source, part in sources.items() if several(part)]
    if len(sources) > 1 and models:
        return models
    return [("", results)] if several(results) else []


def _report_errors(results: list[Result]) -> None:
    """Report each distinct error once: a wrong device name is one mistake for any number of programs."""
    seen: dict[tuple[str, str], dict[str, None]] = {}
    for r in results:
        error = r.prediction.error
        if error is not None:
            names = seen.setdefault((error.message, error.hint), {})
            if "device" not in error.code and r.prediction.name not in error.message:
                names[r.prediction.name] = None
    for (message, hint), names in seen.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        report(f"{message} ({next(iter(names))}{more})" if names else message, hint)
