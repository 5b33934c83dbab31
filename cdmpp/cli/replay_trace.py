"""``cdmpp replay`` on profiler traces."""

from __future__ import annotations

import json as json_text
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from cdmpp.cli.output import print_json

FromOption = Annotated[
    str | None,
    typer.Option("--from", help="For a trace: the device that it was recorded on, where the trace does not name it."),
]
RanksOption = Annotated[
    int | None, typer.Option("--ranks", min=2, help="For a trace: what if its collectives had this many ranks.")
]
LinkOption = Annotated[
    str | None, typer.Option("--link", help="For a trace: what if its collectives used this link (nvlink4, 64GB/s).")
]
SpeedUpOption = Annotated[
    list[str] | None,
    typer.Option(
        "--speed-up", metavar="REGEX=X", help="For a trace: what if these kernels were X times faster; repeatable."
    ),
]
RemoveOption = Annotated[
    list[str] | None,
    typer.Option("--remove", metavar="REGEX", help="For a trace: what if these operators were not there; repeatable."),
]
IterationOption = Annotated[
    int | None, typer.Option("--iteration", help="For a trace: replay ProfilerStep#N alone. Default: all iterations.")
]
MarkOption = Annotated[
    str | None,
    typer.Option(
        "--mark", metavar="REGEX", help="For a trace: annotations that mark iterations. Default: ProfilerStep#N."
    ),
]


def are_traces(files: Sequence[str]) -> bool:
    """Whether the arguments are traces: the first file decides."""
    from cdmpp.simulate.traces.load import is_trace

    return is_trace(files[0]) or any(file.lower().endswith((".nsys-rep", ".qdrep")) for file in files)


def replay_traces(
    files: Sequence[str],
    *,
    iteration: int | None,
    mark: str | None,
    device: str | None,
    from_device: str | None,
    ranks: int | None,
    link: str | None,
    speed_up: Sequence[str],
    remove: Sequence[str],
    save_graph: Path | None,
    model: Path | None,
    url: str | None,
    json: bool,
) -> None:
    """Replay traces and print the answer; write the graph where one is wanted."""
    from cdmpp.predict.rendering import render
    from cdmpp.simulate.traces import replay_trace

    factors = [_factor(text) for text in speed_up]
    wanted: dict[str, Any] = {
        "iteration": iteration,
        "mark": mark,
        "device": _device(device),
        "from_device": _device(from_device),
        "ranks": ranks,
        "link": link,
        "speed_up": factors,
        "remove": list(remove),
    }
    if url is not None:
        from cdmpp.client import PredictorClient

        with PredictorClient(url) as client:
            answer = replay_trace(*files, predictor=client, **wanted)
    else:
        from cdmpp.predict.predictor import LatencyPredictor

        needed = device is not None or ranks is not None or link is not None
        answer = replay_trace(*files, predictor=LatencyPredictor.load(model) if needed else None, **wanted)
    if save_graph is not None:
        save(save_graph, answer.to_request())
    if json:
        print_json(answer.to_dict())
    else:
        print(render(answer.tables()))


def save(path: Path, request: dict[str, Any]) -> None:
    """Write a replay request as JSON or Parquet.

    Raises
    ------
    DataError
        The file cannot be written.
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

    Raises
    ------
    DataError
        The file cannot be written.
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
