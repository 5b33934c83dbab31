"""``cdmpp training-step``."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from cdmpp.cli.options import with_options
from cdmpp.cli.output import JsonOption, ModelOption, NetworkOption, device_of, only_device, percent, print_json
from cdmpp.errors import DataError
from cdmpp.llm import defaults
from cdmpp.llm.options import TRAINING

_SHARDING = replace(TRAINING["sharding"], default=None, unset="none; with --search: optimizer, and fsdp without stages")


@with_options(TRAINING | {"sharding": _SHARDING})
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
    network: NetworkOption = None,
    engine: Annotated[
        str,
        typer.Option(
            metavar="NAME|FILE", help="megatron, megatron-26.06, torchtitan, llm-foundry, or a calibrated profile."
        ),
    ] = defaults.TRAINING_ENGINE,
    measured: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Measured steps (CSV or JSON) that calibrate the engine first: columns as these options, which count "
            "where a row has none, and step_s or tokens_per_s_per_gpu.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE.toml", help="Write the calibrated profile.")] = None,
    search: Annotated[bool, typer.Option("--search", help="Rank layouts that fit; given options are kept.")] = False,
    most: Annotated[int, typer.Option(min=1, max=100, help="Layouts of --search.")] = 10,
    export: Annotated[
        Literal["megatron", "torchtitan"] | None,
        typer.Option(help="Print the layout, or the best one, for this framework."),
    ] = None,
    model: ModelOption = None,
    json: JsonOption = False,
    **options: Any,
) -> None:
    """Predict how long one training step of a language model takes on a cluster.

    Prints duration, throughput, memory and a breakdown that adds up to the step. --search ranks layouts.
    """
    from cdmpp.llm import read_config, search_layouts
    from cdmpp.llm import training_step as predict_step
    from cdmpp.llm.engines.profile import load_training_engine
    from cdmpp.llm.training.calibrate import fit_training, read_training_measurements
    from cdmpp.llm.training.export import export_layout
    from cdmpp.llm.training.search import KEPT
    from cdmpp.predict.predictor import LatencyPredictor

    if out is not None and measured is None:
        raise DataError("--out needs measured steps", hint="give --measured FILE")
    dimensions, predictor = read_config(config), LatencyPredictor.load(model)
    spec, profile = device_of(predictor.artifact, only_device(device)), load_training_engine(engine)
    layout = {name: options.pop(name) for name in KEPT}
    sharding = options.pop("sharding")
    options["network"] = network
    if measured is not None:
        common = options | layout | {"sharding": sharding}
        rows = [
            common | {name: value for name, value in row.items() if value not in (None, "")}
            for row in read_training_measurements(measured)
        ]
        fit = fit_training(dimensions, spec, rows, profile, predictor)
        profile = fit.profile
        left_out = "" if fit.left_out is None else f", {percent(fit.left_out)} for steps left out of the fit"
        print(
            f"measured steps: {fit.rows}; error {percent(fit.before)} before calibration, "
            f"{percent(fit.after)} after{left_out}",
            file=sys.stderr,
        )
        if out is not None:
            profile.write(out)
    options |= {"engine": profile, "predictor": predictor}
    if search:
        sources = {name: ctx.get_parameter_source(name) for name in KEPT}
        chosen = {name: layout[name] for name, source in sources.items() if source and source.name != "DEFAULT"}
        result = search_layouts(dimensions, spec, sharding=sharding, most=most, **options, **chosen)
        if export is not None:
            print(export_layout(result.steps[0], export), end="")
        elif json:
            print_json(result.to_dict())
        else:
            print(result)
        return
    step = predict_step(dimensions, spec, sharding=sharding or defaults.SHARDING, **options, **layout)
    if export is not None:
        print(export_layout(step, export), end="")
    elif json:
        print_json(step.to_dict())
    else:
        print(step)
