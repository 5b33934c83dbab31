"""``cdmpp train``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import typer

from cdmpp.cli.errors import TERMINATED
from cdmpp.cli.options import option, with_fields
from cdmpp.cli.output import (
    ERROR_HEADER,
    RANKING_HEADER,
    JsonOption,
    error_cells,
    percent,
    print_json,
    print_table,
    ranking_cells,
)
from cdmpp.cli.progress import progress_display

Progress = Callable[[int, int, dict[str, float]], None]


@dataclass(frozen=True)
class TrainOptions:
    """Options of a run, and of its parts on other machines."""

    config: Path | None = option(None, "Configuration, as configs/base.toml.", metavar="TOML")
    out: Path | None = option(None, "Model folder to write.", metavar="DIR")
    public_data: Path | None = option(None, "Folder of the public tables; else CDMPP_PUBLIC_DATA.", metavar="DIR")
    records: list[Path] | None = option(None, "More tables; repeatable.", metavar="FILE|DIR")
    run: Path | None = option(
        None, "Folder of the checkpoint; an earlier run on the same data is resumed. Default: runs/NAME.", metavar="DIR"
    )
    on: Literal["cpu", "cuda"] | None = option(None, "Device that trains. Default: cuda where torch has it.")
    prepare: Path | None = option(
        None, "Train nothing; write what `python -m cdmpp.train.loop DIR` needs on another machine.", metavar="DIR"
    )
    finish: Path | None = option(
        None,
        "Train nothing; make the model of a prepared folder that was trained. Default of --out: DIR/model.",
        metavar="DIR",
    )
    json: JsonOption = False


@with_fields(TrainOptions)
def train(**options: Any) -> None:
    """Train a model, write its folder, and print its errors and those of the baselines.

    An interrupted run resumes from its last checkpoint with the same command. To train in several processes:
    torchrun --nproc-per-node N -m -- cdmpp train ...
    """
    given = TrainOptions(**options)
    _check_options(given)
    from cdmpp.train.config import load_config
    from cdmpp.train.loop import device_of
    from cdmpp.train.ranks import Stopped, process_group
    from cdmpp.train.run import prepare as prepare_job
    from cdmpp.train.run import prepared_config, train_model

    settings = load_config(given.config) if given.config is not None else prepared_config(cast(Path, given.finish))
    further = tuple(given.records or ())
    if settings.reference is not None and given.on == "cuda":
        raise typer.BadParameter("[reference] trains on processors: leave out --on")
    if given.prepare is not None:
        size = prepare_job(settings, given.prepare, public_data=given.public_data, records=further)
        there = f"python -m cdmpp.train.loop {given.prepare.name} --resume"
        print(f"wrote {given.prepare}: {size / 1e6:,.0f} MB. There: {there}")
        return
    with process_group() as ranks, _progress() if ranks.first else nullcontext() as progress:
        if ranks.size > 1 and given.on == "cuda":
            raise typer.BadParameter("torchrun trains on processors: leave out --on, or start one process")
        try:
            result = train_model(
                settings,
                out=given.out or cast(Path, given.finish) / "model",
                run=given.run,
                public_data=given.public_data,
                records=further,
                progress=progress,
                ranks=ranks,
                on="cpu" if ranks.size > 1 else device_of(given.on),
                trained=given.finish,
            )
        except Stopped as stopped:
            if ranks.first:
                print(f"stopped after step {stopped.step:,}; the same command resumes the run", file=sys.stderr)
            raise typer.Exit(TERMINATED) from None
    if not ranks.first:
        return
    if given.json:
        print_json(result)
        return
    metrics = result["metrics"]
    held_out = "programs of trained tasks" if result.get("split") == "program" else "shapes"
    print_errors(metrics, f"held-out {held_out}, devices seen in training")
    if "held_out_devices" in metrics:
        print()
        print_errors(metrics["held_out_devices"], "devices that were held out")
    print(f"wrote {result['out']}: {result['model_id']}")


def _check_options(given: TrainOptions) -> None:
    """Refuse options that do not go together."""
    stated = {"--config": given.config, "--run": given.run, "--on": given.on, "--prepare": given.prepare}
    if given.finish is not None:
        if wrong := [name for name, value in stated.items() if value is not None]:
            raise typer.BadParameter(f"--finish goes without {' and '.join(wrong)}: the folder has it")
        return
    if given.config is None:
        raise typer.BadParameter("name a configuration: --config configs/base.toml")
    if given.prepare is not None:
        stated = {"--out": given.out, "--run": given.run, "--on": given.on}
        if wrong := [name for name, value in stated.items() if value is not None]:
            raise typer.BadParameter(f"--prepare trains nothing: leave out {' and '.join(wrong)}")
    elif given.out is None:
        raise typer.BadParameter("name the model folder to write: --out DIR")


@contextmanager
def _progress() -> Iterator[Progress | None]:
    """A bar on a terminal, elsewhere a line on stderr every 30 s; ``metrics.jsonl`` of the run has the same figures."""
    with progress_display(lines=True, transient=False) as show:
        yield lambda step, steps, metrics: show("step", step, steps, f"loss {metrics['loss']:.4f}")


def print_errors(metrics: dict[str, Any], title: str) -> None:
    """The error table of :func:`cdmpp.train.finish.error_table`, groups first, totals last."""
    every = [*metrics["groups"], *metrics["by_source"].values(), metrics["overall"]]
    baselines = list(dict.fromkeys(name for figures in every for name in figures.get("baselines", {})))

    def cells(figures: dict[str, Any]) -> list[str]:
        beside = figures.get("baselines", {})
        return error_cells(figures) + [percent(beside.get(name, {}).get("mape")) for name in baselines]

    if "ranked_groups" in metrics["overall"]:
        _print_ranking(metrics, baselines)

    rows = [(g["source"], g["device"], g["op"], *cells(g)) for g in metrics["groups"]]
    rows += [(source, "all", "all", *cells(m)) for source, m in metrics["by_source"].items()]
    rows.append(("all", "all", "all", *cells(metrics["overall"])))
    print(f"errors: {title}")
    header = ("source", "device", "operator", *ERROR_HEADER, *(f"{name} MAPE" for name in baselines))
    print_table(header, rows, right=range(3, len(header)))


def _print_ranking(metrics: dict[str, Any], baselines: list[str]) -> None:
    """Schedules of tasks: who orders them how well, on the same rows."""
    overall = metrics["overall"]
    rows = [("model", percent(overall["mape"]), *ranking_cells(overall))]
    for name in baselines:
        figures = overall["baselines"][name]
        rows.append((name, percent(figures["mape"]), *ranking_cells(figures)))
    print("order among the schedules of a task (top-k: best latency over the best of the k picked)")
    print_table(("", "MAPE", *RANKING_HEADER), rows, right=range(1, 6))
    print()
