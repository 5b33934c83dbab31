"""``cdmpp replay`` on profiler traces."""

from __future__ import annotations

import json as json_text
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from cdmpp.cli.options import option
from cdmpp.cli.output import DimOption, JsonOption, ModelOption, print_json
from cdmpp.cli.plan_files import FigureOption, UrlOption
from cdmpp.programs.query_options import Framework, Protocol


@dataclass(frozen=True)
class ReplayOptions:
    """Options of ``cdmpp replay``."""

    device: str | None = option(
        None,
        "For a model: a known device (cdmpp devices), a .json/.toml specification, or native. For a trace: "
        "what if its kernels ran there.",
        "--device",
        "-d",
    )
    gap_us: float | None = option(None, "For a model: idle µs between two kernels (launches). Default: 0.", min=0)
    launch_us: float | None = option(
        None, "For a model: µs of the host for each launch; the host runs ahead of the device. Default: 0.", min=0
    )
    protocol: Protocol | None = option(None, "Predicted latency; overrides that of the graph.")
    framework: Framework | None = option(None, "Framework that launches library kernels; overrides that of the graph.")
    dim: DimOption = None
    save_graph: Path | None = option(None, "Write the request: .json or .parquet.", metavar="FILE")
    what_if: list[str] | None = option(
        None,
        "class=comm:ratio=0.5, node=b1:delay_s=-1e-6; select by node, device, stream, class; repeatable.",
        metavar="NODES:CHANGE",
    )
    samples: int | None = option(None, "Samples of the interval; default: 256, fewer for large graphs.", min=0)
    seed: int | None = option(None, "Seed of the samples.", min=0)
    trace: Path | None = option(None, "Write a trace for chrome://tracing and Perfetto.", metavar="FILE")
    figure: FigureOption = None
    from_device: str | None = option(
        None, "For a trace: the device that it was recorded on, where the trace does not name it.", "--from"
    )
    ranks: int | None = option(None, "For a trace: what if its collectives had this many ranks.", min=2)
    link: str | None = option(None, "For a trace: what if its collectives used this link (nvlink4, 64GB/s).")
    speed_up: list[str] | None = option(
        None, "For a trace: what if these kernels were X times faster; repeatable.", metavar="REGEX=X"
    )
    remove: list[str] | None = option(
        None, "For a trace: what if these operators were not there; repeatable.", metavar="REGEX"
    )
    search: bool = option(
        False, "For a trace: search for buckets of all-reduces and fused kernels that help.", "--search"
    )
    all_reduce_us: float | None = option(
        None, "For --search: µs of an all-reduce without bytes. Default: from those of the trace.", min=0
    )
    iteration: int | None = option(None, "For a trace: replay ProfilerStep#N alone. Default: all iterations.")
    mark: str | None = option(
        None, "For a trace: annotations that mark iterations. Default: ProfilerStep#N.", metavar="REGEX"
    )
    model: ModelOption = None
    url: UrlOption = None
    json: JsonOption = False


def are_traces(files: Sequence[str]) -> bool:
    """Whether the arguments are traces: the first file decides."""
    from cdmpp.simulate.traces.load import is_trace

    return is_trace(files[0]) or any(file.lower().endswith((".nsys-rep", ".qdrep")) for file in files)


def replay_traces(files: Sequence[str], given: ReplayOptions) -> None:
    """Replay traces and print the answer; write the graph where one is wanted."""
    from cdmpp.predict.rendering import render
    from cdmpp.simulate.traces import replay_trace

    wanted: dict[str, Any] = {name: getattr(given, name) for name in ("iteration", "mark", "ranks", "link")}
    wanted |= {name: _device(getattr(given, name)) for name in ("device", "from_device")}
    wanted |= {"search": given.search, "all_reduce_latency_s": given.all_reduce_us and given.all_reduce_us * 1e-6}
    wanted |= {"speed_up": [_factor(text) for text in given.speed_up or ()], "remove": list(given.remove or ())}
    if given.url is not None:
        from cdmpp.client import PredictorClient

        with PredictorClient(given.url) as client:
            answer = replay_trace(*files, predictor=client, **wanted)
    else:
        from cdmpp.predict.predictor import LatencyPredictor

        needed = any(wanted[name] is not None for name in ("device", "ranks", "link"))
        answer = replay_trace(*files, predictor=LatencyPredictor.load(given.model) if needed else None, **wanted)
    if given.save_graph is not None:
        save(given.save_graph, answer.to_request())
    if given.json:
        print_json(answer.to_dict())
    else:
        print(render(answer.tables()))


def save(path: Path, request: dict[str, Any]) -> None:
    """Write a replay request as JSON or Parquet.

    Raises DataError: the file cannot be written.
    """
    if path.suffix.lower() != ".parquet":
        write(path, request)
        return
    from cdmpp.plan.registry import PLANNERS
    from cdmpp.simulate.replay.parquet import write_parquet

    nodes = PLANNERS["replay"].read(request).nodes  # type: ignore[attr-defined]
    write_parquet(path, {**request, "nodes": nodes}, nodes)


def write(path: Path, value: Any) -> None:
    """Write JSON; a previous file is kept until the new one is whole.

    Raises DataError: the file cannot be written.
    """
    from cdmpp.utils.writing import replacing

    with replacing(path) as aside:
        aside.write_text(json_text.dumps(value, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _device(text: str | None) -> Any:
    """A specification for a file or this machine, else the name."""
    from cdmpp.devices import local_device

    return None if text is None else local_device(text)


def _factor(text: str) -> tuple[str, float]:
    pattern, equals, number = text.rpartition("=")
    try:
        factor = float(number)
    except ValueError:
        factor = 0.0
    if not equals or not pattern or not 0 < factor < float("inf"):
        raise typer.BadParameter(f"{text!r} is not like gemm=1.5", param_hint="--speed-up")
    return pattern, factor
