"""Elastic jobs that train a language model: the fastest layout that fits the memory, for each number of workers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from typing import Annotated, Literal, Self

from pydantic import Field, PrivateAttr

from cdmpp.errors import DataError, FieldError, InfeasibleError
from cdmpp.llm import defaults, read_config
from cdmpp.llm.engines.profile import load_training_engine
from cdmpp.llm.forms import EngineForm, ModelConfig, TrainingDegree, TrainingNetwork, known_device, training_requests
from cdmpp.llm.options import MAX_GLOBAL_BATCH, MAX_SEQUENCE
from cdmpp.llm.training.result import TrainingStep
from cdmpp.llm.training.search import KEPT, PlanGroup, layout_plans
from cdmpp.llm.training.step import TrainingPlan
from cdmpp.predict.prediction import Prediction
from cdmpp.predict.requests.fields import Count, DeviceForm, PriceRequest, WholeNumber
from cdmpp.predict.requests.pricing import Priced

#: Layouts of each count that are compared again with all prices at an end of their intervals.
KEPT_AT_ENDS = 10
_Degree = Annotated[TrainingDegree | None, Field(description="null: searched.")]


class TrainingJobForm(Priced):
    """A language model, whose step is that of the fastest layout (docs/training-steps.md); a sample is a sequence."""

    config: ModelConfig
    device: DeviceForm
    global_batch: Annotated[int, Field(ge=1, le=MAX_GLOBAL_BATCH, description="Sequences of a step."), WholeNumber]
    sequence: Annotated[int, Field(ge=1, le=MAX_SEQUENCE, description="Tokens of a sequence."), WholeNumber]
    engine: EngineForm = defaults.TRAINING_ENGINE
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    products: Literal["float8_e4m3", "mxfp8", "nvfp4"] | None = None
    overlap: Literal["none", "gradients", "all"] | None = None
    ranks_per_node: Count | None = None
    network: TrainingNetwork = None
    sharding: Literal["none", "optimizer", "fsdp"] | None = None
    recompute: Literal["none", "selective", "full"] | None = None
    tp: _Degree = None
    pp: _Degree = None
    virtual_pp: _Degree = None
    cp: _Degree = None
    ep: _Degree = None
    micro_batch: _Degree = None

    #: Counts of workers of the job and ``ignore_memory`` (set by the request), and prices of all layouts' programs.
    _counts: tuple[int, ...] = PrivateAttr(())
    _ignore_memory: bool = PrivateAttr(False)
    _prices: tuple[Prediction, ...] = PrivateAttr(())
    #: The fastest layouts of each count, of which alone are compared where all prices are at an end of their interval.
    _fastest: dict[int, list[str]] = PrivateAttr(default_factory=dict)

    def price_requests(self, path: str) -> list[PriceRequest]:
        """Programs of the layouts of all counts, each once."""
        try:
            return training_requests(self._layouts().queries, path, self.device)
        except DataError as error:
            raise FieldError.at(f"{path}.engine", error.message, hint=error.hint) from None
        except (FieldError, InfeasibleError) as error:
            where = f"{path.rpartition('.')[0]}.workers" if error.path == "gpus" else f"{path}.{error.path}"
            raise type(error)(f"{where}: {error.message}", path=where, hint=error.hint) from None

    def with_prices(self, prices: Iterator[Prediction]) -> Self:
        """A copy with its prices."""
        filled = self.model_copy()
        filled._prices = tuple(islice(prices, len(self._layouts().queries)))
        return filled

    def steps(self, layout: str | None = None) -> dict[int, TrainingStep]:
        """The fastest step of each count that has a layout, or only those of layouts of this name."""
        group = self._layouts()
        at_end = self._fastest and all(price.lower_s == price.upper_s for price in self._prices)
        plans = [
            plan
            for plan in group.plans
            if layout in (None, name := plan.layout.named()) and (not at_end or name in self._fastest[plan.layout.gpus])
        ]
        steps = PlanGroup(plans, 0, group.queries).steps("", self._prices)
        if layout is None and not at_end:
            self._fastest.clear()
            for step in steps:
                self._fastest.setdefault(step.layout.gpus, []).append(step.layout.named())
            self._fastest.update({gpus: names[:KEPT_AT_ENDS] for gpus, names in self._fastest.items()})
        return {step.layout.gpus: step for step in reversed(steps)}

    def used(self, workers: int, layout: str) -> list[Prediction]:
        """Prices of the programs of one layout."""
        plans = self._layouts()
        of = {query.program.operator: price for query, price in zip(plans.queries, self._prices, strict=True)}
        same = (plan for plan in plans.plans if plan.layout.gpus == workers and plan.layout.named() == layout)
        return [of[query.program.operator] for query in next(same).queries]

    def _layouts(self) -> PlanGroup[TrainingPlan]:
        return _layouts(self.model_dump_json(), self._counts, self._ignore_memory)


@lru_cache(maxsize=64)
def _layouts(form: str, counts: tuple[int, ...], ignore_memory: bool) -> PlanGroup[TrainingPlan]:
    """Layouts of all counts, shared by equal jobs; a count without one is left out unless no count has one."""
    read, found = TrainingJobForm.model_validate_json(form), []
    options = {name: getattr(read, name) for name in ("dtype", "products", "ranks_per_node", "network")}
    given = {name: getattr(read, name) for name in (*KEPT, "sharding", "overlap", "global_batch", "sequence")}
    spec, profile = known_device(read.device), load_training_engine(read.engine, files=False)
    spec = spec.model_copy(update={"memory_bytes": None}) if ignore_memory else spec
    for gpus in counts:
        try:
            found.append(layout_plans(read_config(read.config), spec, profile, options, gpus=gpus, **given))
        except (FieldError, InfeasibleError):
            if gpus == counts[-1] and not found:
                raise
    return PlanGroup([plan for plans in found for plan in plans.plans], sum(plans.fitting for plans in found))
