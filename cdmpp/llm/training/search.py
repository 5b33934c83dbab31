"""The fastest layouts of a training step for a number of devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import FieldError, InfeasibleError
from cdmpp.llm import defaults
from cdmpp.llm.config import ConfigLike, LLMConfig
from cdmpp.llm.engines.profile import Engine, EngineProfile, load_training_engine
from cdmpp.llm.estimate_plan import resolved
from cdmpp.llm.options import MAX_GLOBAL_BATCH, Overlap, Sharding, check_whole
from cdmpp.llm.training.fitting import candidates, rough_cost, smallest_layouts
from cdmpp.llm.training.layout import TrainingLayout, training_types
from cdmpp.llm.training.links import Links
from cdmpp.llm.training.memory import training_memory
from cdmpp.llm.training.result import LayoutSearch, TrainingStep
from cdmpp.llm.training.step import TrainingPlan
from cdmpp.predict.interface import Predictor
from cdmpp.predict.prediction import Device, Prediction, Query

#: Layouts that are priced.
MAX_PRICED = 1000
#: Fields of a layout that are searched unless they are given.
KEPT = ("tp", "pp", "virtual_pp", "cp", "ep", "micro_batch", "recompute")


P = TypeVar("P", bound=TrainingPlan)


class PlanGroup(Generic[P]):
    """Plans of several layouts, whose equal queries are predicted once; ``fitting``: layouts that fit the memory."""

    def __init__(self, plans: Sequence[P], fitting: int = 0, queries: Sequence[Query] = ()) -> None:
        self.plans, self.fitting = plans, fitting
        every = queries or [query for plan in plans for query in plan.queries]
        self.queries = list({query.program.operator: query for query in every}.values())
        self._places = {query.program.operator: place for place, query in enumerate(self.queries)}

    def of_plan(self, plan: P, predictions: Sequence[Prediction]) -> list[Prediction]:
        """The predictions of a plan's queries among those of :attr:`queries`."""
        return [predictions[self._places[query.program.operator]] for query in plan.queries]

    def steps(self, model_id: str, predictions: Sequence[Prediction]) -> list[TrainingStep]:
        """The steps made of the predictions of :attr:`queries`, the fastest first."""
        steps = [plan.result(model_id, self.of_plan(plan, predictions)) for plan in self.plans]
        return sorted(steps, key=lambda step: step.step_s)


def fitting_layouts(
    model: LLMConfig,
    spec: DeviceSpec,
    profile: EngineProfile,
    given: Mapping[str, Any],
    *,
    gpus: int,
    global_batch: int,
    sequence: int,
    dtype: str,
    products: str | None,
    overlap: Overlap | None,
    ranks_per_node: int | None,
    network: float | str | None,
) -> list[TrainingLayout]:
    """Layouts that need at most 94 % of the memory; ``given``: values that all have, None for those of any value.

    Raises FieldError: a given value does not divide the model, or is not known; InfeasibleError: no layout fits, and
    the hint has the smallest ones that do.
    """
    assert profile.training is not None
    loop, overlap = profile.training, overlap or profile.training.overlap
    if unknown := sorted(given.keys() - {*KEPT, "sharding"}):
        raise FieldError(f"{unknown[0]}: not known", path=unknown[0], hint="kept values: " + ", ".join(KEPT))
    given = {name: value for name, value in given.items() if value is not None}
    check_whole("global_batch", global_batch, MAX_GLOBAL_BATCH)
    alone = {"micro_batch": 1, **given, **({} if "pp" in given else {"virtual_pp": 1})}
    wanted = TrainingLayout(gpus=gpus, global_batch=global_batch, sequence=sequence, overlap=overlap, **alone)
    wanted.check(model, batch=False)
    types, links = training_types(dtype, products, spec), Links.of(spec, ranks_per_node, network)

    def fits(layout: TrainingLayout) -> bool:
        return training_memory(model, layout, types, loop, spec.memory_bytes).fits_with_margin

    sizes: dict[str, Any] = {"gpus": gpus, "global_batch": global_batch, "sequence": sequence, "overlap": overlap}
    if fitting := candidates(model, fits, links.domain_ranks, given=given, **sizes):
        return fitting
    hint = "use more devices, a batch that the copies divide" + (", or fewer given values" if given else "")
    smallest = smallest_layouts(model, replace(wanted, sharding="optimizer"), fits, links.domain_ranks)
    if smallest and not given:
        hint += "; the smallest layouts that fit: " + "; ".join(f"{x.gpus} GPUs: {x.named()}" for x in smallest)
    raise InfeasibleError(
        f"no layout of {gpus} {spec.name} with a batch of {global_batch} holds the model"
        + ("" if not given else " with " + ", ".join(f"{name}={value}" for name, value in given.items())),
        path="gpus",
        hint=hint,
    )


def layout_plans(
    model: LLMConfig, spec: DeviceSpec, profile: EngineProfile, options: Mapping[str, Any], **given: Any
) -> PlanGroup[TrainingPlan]:
    """The plans of :func:`search_layouts`; ``options``: dtype, products, ranks_per_node and network."""
    sizes = {name: given.pop(name, None) for name in ("gpus", "global_batch", "sequence", "overlap")}
    fitting = fitting_layouts(model, spec, profile, given, **sizes, **options)
    shared: dict[Any, Any] = {}
    plans = [
        TrainingPlan(model, spec, layout, engine=profile, check_memory=False, shared=shared, **options)
        for layout in sorted(fitting, key=rough_cost)[:MAX_PRICED]
    ]
    return PlanGroup(plans, len(fitting))


def search_layouts(
    config: ConfigLike,
    device: Device,
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
    predictor, model, spec = resolved(predictor, config, device)
    plans = layout_plans(
        model,
        spec,
        load_training_engine(engine),
        {"dtype": dtype, "products": products, "ranks_per_node": ranks_per_node, "network": network},
        gpus=gpus,
        global_batch=global_batch,
        sequence=sequence,
        overlap=overlap,
        **given,
        sharding=sharding,
    )
    steps = plans.steps(predictor.model_id, predictor.predict_queries(plans.queries))
    return LayoutSearch(steps[:most], plans.fitting, len(plans.plans))
