"""``cdmpp plan rl``: a request from a file, or from a model's configuration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from cdmpp.cli.options import RayCommand, option, taken, with_fields
from cdmpp.cli.plan import plan, run_request
from cdmpp.cli.plan_files import PlanFiles, PlanOptions
from cdmpp.errors import DataError
from cdmpp.plan.registry import PLANNERS

__all__ = ["plan", "rl"]


@dataclass(frozen=True)
class RlOptions:
    """Options beside those of every planner."""

    config: Path | None = option(
        None, "In place of FILE: a language model, with the next three.", metavar="CONFIG.json"
    )
    device: str | None = option(None, "A known device.", "--device", "-d")
    gpus: int | None = option(None, "Devices for both stages.", min=1)
    lengths: Path | None = option(None, "Response lengths in tokens: the first column.", metavar="LENGTHS.csv")
    samples: int = option(512, "With --config: samples of a step.", min=1)
    mini_batch: int | None = option(None, "With --config: samples of an update. Default: those of a step.", min=1)
    prompt: int = option(512, "With --config: tokens of each prompt.", min=0)
    forwards: int = option(2, "With --config: passes of reference and old policy over each sample.", min=0)
    products: Literal["float8_e4m3", "mxfp8", "nvfp4"] | None = option(
        None, "With --config: type of the training's products."
    )
    engine: str | None = option(None, "With --config: profile of generation. Default: vllm.")
    train_engine: str = option("megatron", "With --config: profile of training.")
    weights: str | None = option(None, "With --config: type of generation's weights.")
    layout: Literal["any", "separate", "shared"] = option(
        "any", "With --config: separate units for both stages, the same, or the better."
    )
    staleness: int | None = option(None, "With --config: steps by which weights may be behind.", min=0)
    generation_tp: int | None = option(None, "With --config: ranks of an instance. Default: searched.", min=1)
    degrees: str | None = option(None, "With --config: degrees of training, such as pp=1,ep=1.", metavar="NAME=N,...")
    budget: float | None = option(None, "Seconds of the search. Default with --config: 10.", min=0.01)
    measured: Path | None = option(
        None,
        "Measured steps: generation_s, inference_s, training_s, transfer_s or only step_s, and their layout.",
        metavar="STEPS.csv",
    )


@with_fields(RlOptions, PlanOptions)
def rl(
    file: Annotated[Path | None, typer.Argument(metavar="FILE.json", help="The request; - for stdin.")] = None,
    **options: Any,
) -> None:
    """Pools, dispatch and streaming of an RL post-training step (StreamRL, RLHFuse).

    With --config, costs, memory limits, weights and cache come from the model, and the training's layout is searched.
    """
    given = taken(RlOptions, options)
    chosen = PlanOptions(**options)
    files = PlanFiles("rl", chosen)
    if (file is None) == (given.config is None):
        raise DataError("give either a request or --config", hint="cdmpp plan rl --help shows both")

    def value() -> Any:
        from cdmpp.plan.rl.from_config import read_lengths, read_measured, request_from_config

        steps = [] if given.measured is None else read_measured(given.measured)
        if file is not None:
            request = files.request(file)
            changes = {"budget_s": given.budget, "measured": steps or None}
            return request | {name: value for name, value in changes.items() if value is not None}
        if given.config is None or given.device is None or given.gpus is None or given.lengths is None:
            raise DataError("--config needs --device, --gpus and --lengths", hint="give all of them")
        from cdmpp.predict.predictor import LatencyPredictor

        read: dict[str, Any] = {"lengths": read_lengths(given.lengths), "degrees": _degrees(given.degrees)}
        read |= {"budget_s": 10.0 if given.budget is None else given.budget, "measured": steps}
        settings = vars(given) | read | {"predictor": LatencyPredictor.load(chosen.model)}
        return request_from_config(**{name: value for name, value in settings.items() if name != "budget"})

    run_request(PLANNERS["rl"], file or given.config or Path("-"), value, files, chosen)


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
