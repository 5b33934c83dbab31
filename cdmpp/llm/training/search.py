"""The fastest layouts of a training step for a number of devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, Self

from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import FieldError, InfeasibleError
from cdmpp.llm import defaults
from cdmpp.llm.config import LLMConfig
from cdmpp.llm.engines.profile import Engine, EngineProfile, load_training_engine
from cdmpp.llm.estimate_plan import resolved_device, shipped_predictor
from cdmpp.llm.options import MAX_GLOBAL_BATCH, check_whole
from cdmpp.llm.read import read_config
from cdmpp.llm.training.fitting import candidates, rough_cost
from cdmpp.llm.training.layout import Overlap, Sharding, TrainingLayout, training_types
from cdmpp.llm.training.links import Links
from cdmpp.llm.training.memory import training_memory
from cdmpp.llm.training.result import LayoutSearch, TrainingStep
from cdmpp.llm.training.step import TrainingPlan
from cdmpp.predict.interface import Predictor
from cdmpp.predict.prediction import Prediction, Query

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
    plans = LayoutPlans.of(
        read_config(config),
        resolved_device(device, predictor),
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


@dataclass(frozen=True)
class LayoutPlans:
    """Plans of the layouts that fit the memory: of many, those of the lowest rough cost."""

    plans: Sequence[TrainingPlan]
    fitting: int  # layouts that fit
    queries: list[Query] = field(default_factory=list)  # of all plans, each once; filled where it is empty

    def __post_init__(self) -> None:
        if not self.queries:
            queries = {query.program.operator: query for plan in self.plans for query in plan.queries}
            self.queries.extend(queries.values())

    @classmethod
    def of(
        cls,
        model: LLMConfig,
        spec: DeviceSpec,
        profile: EngineProfile,
        options: Mapping[str, Any],
        *,
        gpus: int,
        global_batch: int,
        sequence: int,
        overlap: Overlap | None = None,
        **given: Any,
    ) -> Self:
        """The plans of :func:`search_layouts`; ``options``: dtype, products, ranks_per_node and network."""
        loop = profile.training
        assert loop is not None
        overlap = overlap or loop.overlap
        if unknown := sorted(given.keys() - {*KEPT, "sharding"}):
            raise FieldError(f"{unknown[0]}: not known", path=unknown[0], hint="kept values: " + ", ".join(KEPT))
        given = {name: value for name, value in given.items() if value is not None}
        check_whole("global_batch", global_batch, MAX_GLOBAL_BATCH)
        alone = {"micro_batch": 1, **given, **({} if "pp" in given else {"virtual_pp": 1})}
        TrainingLayout(gpus=gpus, global_batch=global_batch, sequence=sequence, overlap=overlap, **alone).check(
            model, batch=False
        )
        types = training_types(options["dtype"], options["products"], spec)
        fitting = candidates(
            model,
            lambda layout: training_memory(model, layout, types, loop, spec.memory_bytes).fits_with_margin,
            Links.of(spec, options["ranks_per_node"], options["network"]).domain_ranks,
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
        plans = [
            TrainingPlan(model, spec, layout, engine=profile, check_memory=False, shared=shared, **options)
            for layout in chosen
        ]
        return cls(plans, len(fitting))

    def steps(self, model_id: str, predictions: Sequence[Prediction]) -> list[TrainingStep]:
        """The steps made of the predictions of :attr:`queries`, the fastest first."""
        of = {query.program.operator: price for query, price in zip(self.queries, predictions, strict=True)}
        steps = [plan.result(model_id, [of[query.program.operator] for query in plan.queries]) for plan in self.plans]
        return sorted(steps, key=lambda step: step.step_s)
