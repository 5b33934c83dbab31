"""``cdmpp replay``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from cdmpp.cli.output import JsonOption, ModelOption
from cdmpp.cli.plan import FigureOption, UrlOption, check_figure, prefix_with_file, show, solve
from cdmpp.cli.reading import parse_sizes, read_json
from cdmpp.cli.replay_trace import (
    FromOption,
    IterationOption,
    LinkOption,
    MarkOption,
    RanksOption,
    RemoveOption,
    SpeedUpOption,
    are_traces,
    replay_traces,
    save,
    write,
)
from cdmpp.errors import DataError, FieldError
from cdmpp.plan.registry import PLANNERS
from cdmpp.programs.query_options import Framework, Protocol
from cdmpp.utils.writing import check_output

#: Most nodes of an answer in JSON with a line for each value.
_MOST_INDENTED = 10_000
_SELECTORS = ("node", "device", "stream", "class")


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
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            "-d",
            help="For a model: a known device (cdmpp devices), a .json/.toml specification, or native. For a trace: "
            "what if its kernels ran there.",
        ),
    ] = None,
    gap_us: Annotated[
        float | None, typer.Option(min=0, help="For a model: idle µs between two kernels (launches). Default: 0.")
    ] = None,
    launch_us: Annotated[
        float | None,
        typer.Option(
            min=0, help="For a model: µs of the host for each launch; the host runs ahead of the device. Default: 0."
        ),
    ] = None,
    protocol: Annotated[Protocol | None, typer.Option(help="Predicted latency; overrides that of the graph.")] = None,
    framework: Annotated[
        Framework | None, typer.Option(help="Framework that launches library kernels; overrides that of the graph.")
    ] = None,
    dim: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Size of a dynamic dimension of an ONNX model; repeatable."),
    ] = None,
    save_graph: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the request: .json or .parquet.")
    ] = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NODES:CHANGE",
            help="class=comm:ratio=0.5, node=b1:delay_s=-1e-6; select by node, device, stream, class; repeatable.",
        ),
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=0, help="Samples of the interval; default: 256, fewer for large graphs.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of the samples.")] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a trace for chrome://tracing and Perfetto.")
    ] = None,
    figure: FigureOption = None,
    from_device: FromOption = None,
    ranks: RanksOption = None,
    link: LinkOption = None,
    speed_up: SpeedUpOption = None,
    remove: RemoveOption = None,
    iteration: IterationOption = None,
    mark: MarkOption = None,
    model: ModelOption = None,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Replay a graph of programs, transfers and given durations, or a profiler trace: makespan and critical path."""
    check_figure(figure)
    for output in (save_graph, trace):
        if output is not None:
            check_output(output)
    of_graphs = {
        "--gap-us": gap_us,
        "--launch-us": launch_us,
        "--protocol": protocol,
        "--framework": framework,
        "--dim": dim,
        "--what-if": what_if,
        "--samples": samples,
        "--seed": seed,
        "--trace": trace,
        "--figure": figure,
    }
    of_traces = {
        "--from": from_device,
        "--ranks": ranks,
        "--link": link,
        "--speed-up": speed_up,
        "--remove": remove,
        "--iteration": iteration,
        "--mark": mark,
    }
    if are_traces(files):
        _refuse(of_graphs, "not for a trace; --save-graph writes its graph, which has them")
        replay_traces(
            files,
            iteration=iteration,
            mark=mark,
            device=device,
            from_device=from_device,
            ranks=ranks,
            link=link,
            speed_up=speed_up or (),
            remove=remove or (),
            save_graph=save_graph,
            model=model,
            url=url,
            json=json,
        )
        return
    _refuse(of_traces, "only for a trace of torch.profiler or Nsight Systems")
    if len(files) > 1:
        raise typer.BadParameter("give one graph or model; only traces have a file for each rank", param_hint="FILES")
    graph = files[0]
    if device and _is_graph(graph):
        raise typer.BadParameter("needs a model: a graph names its devices", param_hint="--device")
    if device:
        request = _of_model(graph, device, gap_us or 0.0, launch_us or 0.0, parse_sizes(dim or []))
    elif gap_us is not None or launch_us is not None or dim:
        raise typer.BadParameter("need --device and a model", param_hint="--gap-us, --launch-us, --dim")
    elif graph.lower().endswith((".onnx", ".pt2", ".py")):
        raise typer.BadParameter("a model needs a device", param_hint="--device")
    else:
        request = _read(Path(graph))
    if not isinstance(request, dict):
        raise DataError(f"{graph}: not a replay request", hint="docs/replay.md has examples")
    overrides = [_override(text) for text in what_if or []]
    if overrides:
        request["overrides"] = [*_list(request.get("overrides", [])), *overrides]
    for name, value in (("protocol", protocol), ("framework", framework), ("samples", samples), ("seed", seed)):
        if value is not None:
            request[name] = value
    if save_graph is not None:
        from cdmpp.simulate.replay.records import as_json

        save(save_graph, {**request, "nodes": as_json(request.get("nodes"))})
    if trace is not None:
        request["trace"] = True
    from cdmpp.simulate.replay.records import paused_collector

    with paused_collector():
        try:
            read, plan = solve(PLANNERS["replay"], request, model, url)
        except FieldError as error:
            prefix_with_file(graph, error)
            raise
        if trace is not None:
            write(trace, plan.trace.model_dump())
            plan = plan.model_copy(update={"trace": None})
        # To indent a long timeline takes longer than to replay it.
        show(read, plan, json, figure, indent=1 if len(read.nodes) <= _MOST_INDENTED else None)


def _refuse(options: dict[str, Any], why: str) -> None:
    given = [name for name, value in options.items() if value not in (None, [])]
    if given:
        raise typer.BadParameter(why, param_hint=", ".join(given))


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


def _of_model(source: str, device: str, gap_us: float, launch_us: float, sizes: dict[str, int]) -> dict[str, Any]:
    from cdmpp.devices import is_local, load_device
    from cdmpp.programs.frontends.load import load_programs
    from cdmpp.simulate.replay.from_model import request_of

    target: str | dict[str, Any] = device
    if is_local(device):
        target = load_device(device).model_dump(mode="json", exclude_none=True)
    programs = load_programs(source, None, sizes or None)
    return request_of(programs, target, gap_s=gap_us * 1e-6, launch_s=launch_us * 1e-6)


def _list(value: Any) -> list[Any]:
    """A list; another value is put into one, for the schema to refuse."""
    return value if isinstance(value, list) else [value]


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
