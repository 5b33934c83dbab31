"""``cdmpp replay``."""

from __future__ import annotations

import json as json_text
from pathlib import Path
from typing import Annotated, Any

import typer

from cdmpp.cli.dims import parse_sizes
from cdmpp.cli.output import JsonOption, ModelOption
from cdmpp.cli.plan import FigureOption, UrlOption, check_figure, prefix_with_file, read_json, show, solve
from cdmpp.errors import DataError, FieldError
from cdmpp.planning.registry import PLANNERS
from cdmpp.programs.query_options import Framework, Protocol

#: Most nodes of an answer in JSON with a line for each value.
_MOST_INDENTED = 10_000
_SELECTORS = ("node", "device", "stream", "class")


def replay(
    graph: Annotated[
        str,
        typer.Argument(
            metavar="GRAPH.json|GRAPH.parquet|MODEL",
            help="A replay request as JSON or Parquet (docs/replay.md), - for JSON on stdin; or with --device a model: "
            "one inference of model.onnx, its programs on one stream.",
            show_default=False,
        ),
    ],
    device: Annotated[
        str | None,
        typer.Option(
            "--device", "-d", help="For a model: a known device (cdmpp devices) or a .json/.toml specification."
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
    model: ModelOption = None,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Replay a graph of programs, transfers and given durations: makespan and critical path."""
    check_figure(figure)
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
        _save(save_graph, request)
    if trace is not None:
        request["trace"] = True
    from cdmpp.replay.collector import paused_collector

    with paused_collector():
        try:
            read, plan = solve(PLANNERS["replay"], request, model, url)
        except FieldError as error:
            prefix_with_file(graph, error)
            raise
        if trace is not None:
            _write(trace, plan.trace.model_dump())
            plan = plan.model_copy(update={"trace": None})
        # To indent a long timeline takes longer than to replay it.
        show(read, plan, json, figure, indent=1 if len(read.nodes) <= _MOST_INDENTED else None)


def _read(path: Path) -> Any:
    if path.suffix.lower() != ".parquet":
        from cdmpp.replay.collector import paused_collector

        with paused_collector():
            return read_json(path)
    from cdmpp.replay.parquet import read_parquet

    return read_parquet(path)


def _save(path: Path, request: dict[str, Any]) -> None:
    if path.suffix.lower() == ".parquet":
        from cdmpp.replay.parquet import write_parquet

        request["nodes"] = PLANNERS["replay"].read(request).nodes  # type: ignore[attr-defined]
        write_parquet(path, request, request["nodes"])
    else:
        from cdmpp.replay.records import as_json

        _write(path, {**request, "nodes": as_json(request.get("nodes"))})


def _is_graph(source: str) -> bool:
    """Whether a file is a replay request. Programs as JSON also have nodes, in another form."""
    if source.lower().endswith(".parquet"):
        return True
    if not source.lower().endswith(".json") or not Path(source).is_file():
        return False
    value = read_json(Path(source))
    return isinstance(value, dict) and "nodes" in value and "root_index" not in value


def _of_model(source: str, device: str, gap_us: float, launch_us: float, sizes: dict[str, int]) -> dict[str, Any]:
    from cdmpp.devices import load_device
    from cdmpp.frontends.load import load_programs
    from cdmpp.replay.from_model import request_of

    target: str | dict[str, Any] = device
    if device.lower().endswith((".json", ".toml")):
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


def _write(path: Path, value: Any) -> None:
    try:
        path.write_text(json_text.dumps(value, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error.strerror or error}") from None
