"""``cdmpp training-step``."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from cdmpp.cli.options import option, taken, with_fields
from cdmpp.cli.output import JsonOption, ModelOption, NetworkOption, device_of, only_device, percent, print_json
from cdmpp.errors import DataError
from cdmpp.llm import defaults
from cdmpp.llm.options import TRAINING

_SHARDING = replace(TRAINING["sharding"], default=None, unset="none; with --search: optimizer, and fsdp without stages")


@dataclass(frozen=True)
class StepOptions:
    """Options beside those of a training step."""

    network: NetworkOption = None
    engine: str = option(
        defaults.TRAINING_ENGINE,
        "megatron, megatron-26.06, torchtitan, llm-foundry, or a calibrated profile.",
        metavar="NAME|FILE",
    )
    measured: Path | None = option(
        None,
        "Measured steps (CSV or JSON) that calibrate the engine first: columns as these options, which count "
        "where a row has none, and step_s or tokens_per_s_per_gpu.",
        metavar="FILE",
    )
    out: Path | None = option(None, "Write the calibrated profile.", metavar="FILE.toml")
    search: bool = option(False, "Rank layouts that fit; given options are kept.", "--search")
    most: int = option(10, "Layouts of --search.", min=1, max=100)
    export: Literal["megatron", "torchtitan"] | None = option(
        None, "Print the layout, or the best one, for this framework."
    )
    model: ModelOption = None
    json: JsonOption = False


@with_fields(StepOptions, options=TRAINING | {"sharding": _SHARDING})
def training_step(
    ctx: typer.Context,
    config: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG.json", help="config.json of a language model on Hugging Face; examples/llm has eight."
        ),
    ],
    device: Annotated[
        list[str], typer.Option("--device", "-d", help="A known device, or a .json/.toml specification.")
    ],
    **options: Any,
) -> None:
    """Predict how long one training step of a language model takes on a cluster.

    Prints duration, throughput, memory and a breakdown that adds up to the step. --search ranks layouts.
    """
    given = taken(StepOptions, options)
    from cdmpp.llm import read_config, search_layouts
    from cdmpp.llm import training_step as predict_step
    from cdmpp.llm.engines.profile import load_training_engine
    from cdmpp.llm.training.calibrate import fit_training, read_training_measurements
    from cdmpp.llm.training.export import export_layout
    from cdmpp.llm.training.search import KEPT
    from cdmpp.predict.predictor import LatencyPredictor

    if given.out is not None and given.measured is None:
        raise DataError("--out needs measured steps", hint="give --measured FILE")
    dimensions, predictor = read_config(config), LatencyPredictor.load(given.model)
    spec, profile = device_of(predictor.artifact, only_device(device)), load_training_engine(given.engine)
    layout = {name: options.pop(name) for name in KEPT}
    sharding = options.pop("sharding")
    options["network"] = given.network
    if given.measured is not None:
        common = options | layout | {"sharding": sharding}
        rows = [
            common | {name: value for name, value in row.items() if value not in (None, "")}
            for row in read_training_measurements(given.measured)
        ]
        fit = fit_training(dimensions, spec, rows, profile, predictor)
        profile = fit.profile
        left_out = "" if fit.left_out is None else f", {percent(fit.left_out)} for steps left out of the fit"
        print(
            f"measured steps: {fit.rows}; error {percent(fit.before)} before calibration, "
            f"{percent(fit.after)} after{left_out}",
            file=sys.stderr,
        )
        if given.out is not None:
            profile.write(given.out)
    options |= {"engine": profile, "predictor": predictor}
    if given.search:
        sources = {name: ctx.get_parameter_source(name) for name in KEPT}
        chosen = {name: layout[name] for name, source in sources.items() if source and source.name != "DEFAULT"}
        result = search_layouts(dimensions, spec, sharding=sharding, most=given.most, **options, **chosen)
        if given.export is not None:
            print(export_layout(result.steps[0], given.export), end="")
        elif given.json:
            print_json(result.to_dict())
        else:
            print(result)
        return
    step = predict_step(dimensions, spec, sharding=sharding or defaults.SHARDING, **options, **layout)
    if given.export is not None:
        print(export_layout(step, given.export), end="")
    elif given.json:
        print_json(step.to_dict())
    else:
        print(step)
