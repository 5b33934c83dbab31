"""The fastest layouts of a training step for a number of devices."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any

from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import FieldError, InfeasibleError
from cdmpp.llm import defaults
from cdmpp.llm.config import LLMConfig
from cdmpp.llm.engines.profile import Engine, load_training_engine
from cdmpp.llm.estimate_plan import resolved_device, shipped_predictor
from cdmpp.llm.options import MAX_GLOBAL_BATCH, check_whole
from cdmpp.llm.read import read_config
from cdmpp.llm.training.fitting import candidates, rough_cost
from cdmpp.llm.training.layout import Overlap, Sharding, TrainingLayout, training_types
from cdmpp.llm.training.links import Links
from cdmpp.llm.training.memory import training_memory
from cdmpp.llm.training.result import LayoutSearch
from cdmpp.llm.training.step import TrainingPlan
from cdmpp.predict.interface import Predictor
from cdmpp.predict.prediction import Query

#: Layouts that are priced.
MAX_PRICED = 1000
#: Fields of a layout that are searched unless they are given.
KEPT = ("tp", "pp", "virtual_pp", "cp", "ep", "micro_batch", "recompute")


def search_layouts(
    config: LLMConfig | Mapping[str, Any] | str | PathLike[str],
    device: DeviceSpec | Mapping[str, Any] | str,
    *,
    gpus: int,
    global_batch: int,
    sequence: int,
    dtype: str = defaults.DTYPE,
    products: str | None = None,
    sharding: Sharding | None = None,
    overlap: Overlap | None = None,
    ranks_per_node: int | None = None,
    network: float | str | None = None,
    engine: Engine = defaults.TRAINING_ENGINE,
    predictor: Predictor | None = None,
    most: int = 10,
    **given: Any,
) -> LayoutSearch:
    """Find the fastest layouts of a training step.

    Layouts that need more than 94 % of the memory are left out. Of many, those of the lowest rough cost are priced.

    Parameters
    ----------
    sharding : {"none", "optimizer", "fsdp"}, optional
        Default: optimizer, and fsdp without stages.
    most : int
        Layouts of the result.
    **given
        Values of tp, pp, virtual_pp, cp, ep, micro_batch and recompute that all layouts have; the others are searched.

    Other parameters and errors are those of :func:`cdmpp.llm.training_step`.
    """
    predictor = shipped_predictor() if predictor is None else predictor
    model, spec = read_config(config), resolved_device(device, predictor)
    profile = load_training_engine(engine)
    assert profile.training is not None
    overlap = overlap or profile.training.overlap
    if unknown := sorted(given.keys() - set(KEPT)):
        raise FieldError(f"{unknown[0]}: not known", path=unknown[0], hint="kept values: " + ", ".join(KEPT))
    given = {name: value for name, value in {**given, "sharding": sharding}.items() if value is not None}
    check_whole("global_batch", global_batch, MAX_GLOBAL_BATCH)
    alone = {"micro_batch": 1, **given, **({} if "pp" in given else {"virtual_pp": 1})}
    TrainingLayout(gpus=gpus, global_batch=global_batch, sequence=sequence, overlap=overlap, **alone).check(
        model, batch=False
    )
    types, links = training_types(dtype, products, spec), Links.of(spec, ranks_per_node, network)
    loop = profile.training
    fitting = candidates(
        model,
        lambda layout: training_memory(model, layout, types, loop, spec.memory_bytes).fits_with_margin,
        links.domain_ranks,
        gpus=gpus,
        global_batch=global_batch,
        sequence=sequence,
        overlap=overlap,
        given=given,
    )
    if not fitting:
        raise InfeasibleError(
            f"no layout of {gpus} {spec.name} with a batch of {global_batch} holds the model"
            + ("" if not given else " with " + ", ".join(f"{name}={value}" for name, value in given.items())),
            path="gpus",
            hint="use more devices, a batch that the copies divide" + (", or fewer given values" if given else ""),
        )
    chosen = sorted(fitting, key=rough_cost)[:MAX_PRICED]
    shared: dict[Any, Any] = {}
    options: dict[str, Any] = {"dtype": dtype, "products": products, "ranks_per_node": ranks_per_node}
    plans = [
        TrainingPlan(model, spec, layout, network=network, engine=profile, check_memory=False, shared=shared, **options)
        for layout in chosen
    ]
    places: dict[Any, int] = {}
    queries: list[Query] = []
    for plan in plans:
        for query in plan.queries:
            if query.program.operator not in places:
                places[query.program.operator] = len(queries)
                queries.append(query)
    predictions = predictor.predict_queries(queries)
    steps = [
        plan.result(predictor.model_id, [predictions[places[query.program.operator]] for query in plan.queries])
        for plan in plans
    ]
    steps.sort(key=lambda step: step.step_s)
    return LayoutSearch(steps[:most], len(fitting), len(plans))
