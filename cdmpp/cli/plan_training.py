"""``cdmpp plan training``: a request from a file, or from a model's configuration."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from cdmpp.cli.options import RayCommand, with_fields
from cdmpp.cli.output import NetworkOption
from cdmpp.cli.plan import run_request
from cdmpp.cli.plan_files import PlanFiles, PlanOptions
from cdmpp.cli.plan_rl import plan
from cdmpp.errors import DataError
from cdmpp.llm.options import TRAINING
from cdmpp.plan.registry import PLANNERS

__all__ = ["plan", "training"]

_NEEDED = ("gpus", "global_batch", "sequence")
_SEARCHED = ("tp", "pp", "virtual_pp", "cp", "ep", "micro_batch", "recompute", "sharding")
_OPTIONS = {
    name: replace(option, default=None, unset="searched" if name in _SEARCHED else option.unset)
    for name, option in TRAINING.items()
}


@with_fields(PlanOptions, options=_OPTIONS)
def training(
    file: Annotated[Path | None, typer.Argument(metavar="FILE.json", help="The request; - for stdin.")] = None,
    config: Annotated[
        Path | None,
        typer.Option(metavar="CONFIG.json", help="In place of FILE: a language model, with the next options."),
    ] = None,
    device: Annotated[str | None, typer.Option("--device", "-d", help="A known device.")] = None,
    network: NetworkOption = None,
    engine: Annotated[str | None, typer.Option(metavar="NAME|FILE", help="Profile of training.")] = None,
    budget_s: Annotated[float | None, typer.Option("--budget", min=0.01, help="Seconds of the search.")] = None,
    **options: Any,
) -> None:
    """Layout, gradient buckets and compression of a training step of a language model.

    With --config, options that are not given are searched under the memory of the device.
    """
    stated = {name: options.pop(name) for name in _OPTIONS}
    stated |= {"device": device, "network": network, "engine": engine, "budget_s": budget_s}
    chosen = PlanOptions(**options)
    files = PlanFiles("training", chosen)
    given = {name: value for name, value in stated.items() if value is not None}
    if (file is None) == (config is None):
        raise DataError("give either a request or --config", hint="cdmpp plan training --help shows both")
    if file is not None and given:
        raise DataError(f"--{next(iter(given)).replace('_', '-')} is for --config", hint="write it into the request")
    if config is not None and (missing := [name for name in ("device", *_NEEDED) if name not in given]):
        raise DataError(f"--config needs --{missing[0].replace('_', '-')}", hint="cdmpp plan training --help")

    def value() -> Any:
        if config is None:
            request = files.request(file or Path("-"))
            if isinstance(request, dict) and "model" not in request and "hidden_size" in request:
                raise DataError(f"{file}: a config.json is no request", hint="give it by --config")
            return request
        layout = {name: given.pop(name) for name in _SEARCHED if name in given}
        from cdmpp.llm.read import config_fields

        fields = config_fields(config)
        if "model" in fields and "global_batch" in fields:
            raise DataError(f"{config}: a request is no config.json", hint="give it without --config")
        return {"model": fields, **given, "layout": layout}

    run_request(PLANNERS["training"], file or config or Path("-"), value, files, chosen)


plan.command(
    "training",
    cls=RayCommand,
    epilog="example: cdmpp plan training --config examples/llm/llama-3.1-8b.json -d h100-sxm --gpus 64 "
    "--global-batch 256 --sequence 8192",
)(training)
