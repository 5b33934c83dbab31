"""``cdmpp replay``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from cdmpp.cli.options import with_fields
from cdmpp.cli.plan import check_figure, prefix_with_file, show, solve
from cdmpp.cli.reading import parse_sizes, read_json
from cdmpp.cli.replay_trace import ReplayOptions, are_traces, replay_traces, save, write
from cdmpp.errors import DataError, FieldError
from cdmpp.plan.registry import PLANNERS
from cdmpp.utils.writing import check_output

#: Most nodes of an answer in JSON with a line for each value.
_MOST_INDENTED = 10_000
_SELECTORS = ("node", "device", "stream", "class")
_OF_GRAPHS = ["gap_us", "launch_us", "protocol", "framework", "dim", "what_if", "samples", "seed", "trace", "figure"]
_OF_TRACES = ["from_device", "ranks", "link", "speed_up", "remove", "iteration", "mark", "search", "all_reduce_us"]


@with_fields(ReplayOptions)
def replay(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="GRAPH.json|GRAPH.parquet|MODEL|TRACE...",
            help="A replay request as JSON or Parquet (docs/replay.md), - for JSON on stdin; or with --device a model: "
            "one inference of model.onnx, its programs on one stream; or traces of torch.profiler or Nsight Systems, "
            "one for each rank (docs/traces.md).",
        ),
    ],
    **options: Any,
) -> None:
    """Replay a graph of programs, transfers and given durations, or a profiler trace: makespan and critical path."""
    given = ReplayOptions(**options)
    check_figure(given.figure)
    for output in (given.save_graph, given.trace):
        if output is not None:
            check_output(output)
    if are_traces(files):
        _refuse(given, _OF_GRAPHS, "not for a trace; --save-graph writes its graph, which has them")
        replay_traces(files, given)
        return
    if missing := [name for name in files if name.endswith((".json.gz", ".sqlite")) and not Path(name).exists()]:
        raise DataError(f"{missing[0]}: no such file", hint="give the trace of each rank")
    _refuse(given, _OF_TRACES, "only for a trace of torch.profiler or Nsight Systems")
    if len(files) > 1:
        raise typer.BadParameter("give one graph or model; only traces have a file for each rank", param_hint="FILES")
    graph, device, trace = files[0], given.device, given.trace
    if device and _is_graph(graph):
        raise typer.BadParameter("needs a model: a graph names its devices", param_hint="--device")
    if device:
        request = _of_model(graph, device, given)
    elif given.gap_us is not None or given.launch_us is not None or given.dim:
        raise typer.BadParameter("need --device and a model", param_hint="--gap-us, --launch-us, --dim")
    elif graph.lower().endswith((".onnx", ".pt2", ".py")):
        raise typer.BadParameter("a model needs a device", param_hint="--device")
    else:
        request = _read(Path(graph))
    if not isinstance(request, dict):
        raise DataError(f"{graph}: not a replay request", hint="docs/replay.md has examples")
    overrides = [_override(text) for text in given.what_if or []]
    if overrides:
        given_overrides = request.get("overrides", [])  # one that is no list is put into one, for the schema to refuse
        stated = given_overrides if isinstance(given_overrides, list) else [given_overrides]
        request["overrides"] = [*stated, *overrides]
    for name in ("protocol", "framework", "samples", "seed"):
        if options[name] is not None:
            request[name] = options[name]
    if given.save_graph is not None:
        from cdmpp.simulate.replay.records import as_json

        save(given.save_graph, {**request, "nodes": as_json(request.get("nodes"))})
    if trace is not None:
        request["trace"] = True
    from cdmpp.simulate.replay.records import paused_collector

    with paused_collector():
        try:
            read, plan = solve(PLANNERS["replay"], request, given.model, given.url)
        except FieldError as error:
            prefix_with_file(graph, error)
            raise
        if trace is not None:
            write(trace, plan.trace.model_dump())
            plan = plan.model_copy(update={"trace": None})
        # To indent a long timeline takes longer than to replay it.
        show(read, plan, given.json, given.figure, indent=1 if len(read.nodes) <= _MOST_INDENTED else None)


def _refuse(given: ReplayOptions, names: Sequence[str], why: str) -> None:
    given_names = [name for name in names if getattr(given, name) not in (None, [], False)]
    if given_names:
        flags = ("--" + name.removesuffix("_device").replace("_", "-") for name in given_names)
        raise typer.BadParameter(why, param_hint=", ".join(flags))


def _read(path: Path) -> Any:
    if path.suffix.lower() != ".parquet":
        from cdmpp.simulate.replay.records import paused_collector

        with paused_collector():
            return read_json(path)
    from cdmpp.simulate.replay.parquet import read_parquet

    return read_parquet(path)


def _is_graph(source: str) -> bool:
    """Whether a file is a replay request. Programs as JSON also have nodes, in another form."""
    if source.lower().endswith(".parquet"):
        return True
    if not source.lower().endswith(".json") or not Path(source).is_file():
        return False
    value = read_json(Path(source))
    return isinstance(value, dict) and "nodes" in value and "root_index" not in value


def _of_model(source: str, device: str, given: ReplayOptions) -> dict[str, Any]:
    from cdmpp.devices import local_device
    from cdmpp.programs.frontends.load import load_programs
    from cdmpp.simulate.replay.from_model import request_of

    spec = local_device(device)
    target = spec if isinstance(spec, str) else spec.model_dump(mode="json", exclude_none=True)
    programs = load_programs(source, None, parse_sizes(given.dim or []) or None)
    gap_s, launch_s = ((microseconds or 0.0) * 1e-6 for microseconds in (given.gap_us, given.launch_us))
    return request_of(programs, target, gap_s=gap_s, launch_s=launch_s)


def _override(text: str) -> dict[str, Any]:
    selected, colon, change = text.rpartition(":")
    override: dict[str, Any] = {}
    for part in selected.split(","):
        name, equals, value = part.partition("=")
        if name not in _SELECTORS or not equals or not value or not colon:
            raise typer.BadParameter(f"{text!r} is not like class=comm:ratio=0.5", param_hint="--what-if")
        override[name] = value
    for part in change.split(","):
        name, _, value = part.partition("=")
        try:
            number = float(value)
        except ValueError:
            number = float("nan")
        if name not in ("ratio", "delay_s") or number != number:
            raise typer.BadParameter(f"{text!r} is not like class=comm:ratio=0.5", param_hint="--what-if")
        override[name] = number
    return override
