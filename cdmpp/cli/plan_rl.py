"""``cdmpp plan rl``: a request from a file, or from a model's configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from cdmpp.cli.options import RayCommand, with_fields
from cdmpp.cli.plan import plan, run_request
from cdmpp.cli.plan_files import PlanFiles, PlanOptions
from cdmpp.errors import DataError
from cdmpp.plan.registry import PLANNERS

__all__ = ["plan", "rl"]


@with_fields(PlanOptions)
def rl(
    file: Annotated[Path | None, typer.Argument(metavar="FILE.json", help="The request; - for stdin.")] = None,
    config: Annotated[
        Path | None,
        typer.Option(metavar="CONFIG.json", help="In place of FILE: a language model, with the next three."),
    ] = None,
    device: Annotated[str | None, typer.Option("--device", "-d", help="A known device.")] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="Devices for both stages.")] = None,
    lengths: Annotated[
        Path | None, typer.Option(metavar="LENGTHS.csv", help="Response lengths in tokens: the first column.")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="With --config: samples of a step.")] = 512,
    mini_batch: Annotated[
        int | None, typer.Option(min=1, help="With --config: samples of an update. Default: those of a step.")
    ] = None,
    prompt: Annotated[int, typer.Option(min=0, help="With --config: tokens of each prompt.")] = 512,
    forwards: Annotated[
        int, typer.Option(min=0, help="With --config: passes of reference and old policy over each sample.")
    ] = 2,
    products: Annotated[
        Literal["float8_e4m3", "mxfp8", "nvfp4"] | None,
        typer.Option(help="With --config: type of the training's products."),
    ] = None,
    engine: Annotated[str | None, typer.Option(help="With --config: profile of generation. Default: vllm.")] = None,
    train_engine: Annotated[str, typer.Option(help="With --config: profile of training.")] = "megatron",
    weights: Annotated[str | None, typer.Option(help="With --config: type of generation's weights.")] = None,
    layout: Annotated[
        Literal["any", "separate", "shared"],
        typer.Option(help="With --config: separate units for both stages, the same, or the better."),
    ] = "any",
    staleness: Annotated[
        int | None, typer.Option(min=0, help="With --config: steps by which weights may be behind.")
    ] = None,
    generation_tp: Annotated[
        int | None, typer.Option(min=1, help="With --config: ranks of an instance. Default: searched.")
    ] = None,
    degrees: Annotated[
        str | None, typer.Option(metavar="NAME=N,...", help="With --config: degrees of training, such as pp=1,ep=1.")
    ] = None,
    budget: Annotated[
        float | None, typer.Option(min=0.01, help="Seconds of the search. Default with --config: 10.")
    ] = None,
    measured: Annotated[
        Path | None,
        typer.Option(
            metavar="STEPS.csv",
            help="Measured steps: generation_s, inference_s, training_s, transfer_s or only step_s, and their layout.",
        ),
    ] = None,
    **options: Any,
) -> None:
    """Pools, dispatch and streaming of an RL post-training step (StreamRL, RLHFuse).

    With --config, costs, memory limits, weights and cache come from the model, and the training's layout is searched.
    """
    chosen = PlanOptions(**options)
    files = PlanFiles("rl", chosen)
    if (file is None) == (config is None):
        raise DataError("give either a request or --config", hint="cdmpp plan rl --help shows both")

    def value() -> Any:
        from cdmpp.plan.rl.from_config import read_lengths, read_measured, request_from_config

        steps = [] if measured is None else read_measured(measured)
        if file is not None:
            request = files.request(file)
            changes = {"budget_s": budget, "measured": steps or None}
            return request | {name: value for name, value in changes.items() if value is not None}
        if config is None or device is None or gpus is None or lengths is None:
            raise DataError("--config needs --device, --gpus and --lengths", hint="give all of them")
        from cdmpp.predict.predictor import LatencyPredictor

        return request_from_config(
            config,
            device,
            gpus=gpus,
            lengths=read_lengths(lengths),
            samples=samples,
            prompt=prompt,
            forwards=forwards,
            products=products,
            engine=engine,
            train_engine=train_engine,
            mini_batch=mini_batch,
            weights=weights,
            layout=layout,
            staleness=staleness,
            generation_tp=generation_tp,
            degrees=_degrees(degrees),
            budget_s=10.0 if budget is None else budget,
            measured=steps,
            predictor=LatencyPredictor.load(chosen.model),
        )

    run_request(PLANNERS["rl"], file or config or Path("-"), value, files, chosen)


def _degrees(text: str | None) -> dict[str, int]:
    """Degrees of ``tp=2,pp=1``."""
    from cdmpp.plan.rl.measured import DEGREES

    degrees: dict[str, int] = {}
    for part in filter(None, (text or "").split(",")):
        name, _, value = part.partition("=")
        if name.strip() not in DEGREES or not value.strip().isdecimal():
            raise DataError(f"--degrees: {part[:40]!r} is not allowed", hint=f"NAME=N with {', '.join(DEGREES)}")
        degrees[name.strip()] = int(value)
    return degrees


plan.command(
    "rl",
    cls=RayCommand,
    epilog="example: cdmpp plan rl --config examples/llm/llama-3.1-8b.json -d h100-sxm --gpus 32 --lengths lengths.csv",
)(rl)
