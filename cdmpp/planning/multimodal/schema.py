"""The request and answer of a multimodal pipeline: ``{"modules": [...]}`` of ``cdmpp plan pipeline``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from cdmpp.compose.budget import SearchControl
from cdmpp.compose.pricing import BatchCurve, Cost
from cdmpp.compose.request import (
    MAX_COUNT,
    MAX_SECONDS,
    Budget,
    Closed,
    Explained,
    MaxSteps,
    Name,
    PriceRequest,
    Seed,
    WholeNumber,
)
from cdmpp.compose.request import OldRequest as Request
from cdmpp.errors import FieldError
from cdmpp.planning.multimodal.answer import plan_answer, summed
from cdmpp.planning.multimodal.modules import Module, ordered
from cdmpp.planning.multimodal.plan import MAX_TASKS, SHARE, Plan, plan_steps
from cdmpp.planning.multimodal.search import Counter
from cdmpp.planning.multimodal.tasks import Memory
from cdmpp.prediction import Prediction

MAX_MODULES, MAX_LAYERS, MAX_RANKS, MAX_ITEMS, MAX_STEPS_OF_BATCHES = 8, 128, 64, 1024, 8
MAX_BYTES = 1e18
Bytes = Annotated[float, Field(ge=0, le=MAX_BYTES)]
PositiveBytes = Annotated[float, Field(gt=0, le=MAX_BYTES)]
#: A layer: sums and squares of these stay far from where numbers end.
LEAST_SECONDS = 1e-12
LayerSeconds = Annotated[float, Field(ge=LEAST_SECONDS, le=MAX_SECONDS)]
RelativeTime = Annotated[float, Field(ge=1e-6, le=1e6)]
Items = Annotated[int, Field(ge=0, le=MAX_ITEMS), WholeNumber]
KnobName = Literal["keep", "recompute", "offload"]
Pass = Literal["F", "B"]


class GivenCurves(Closed):
    """Seconds of one layer by the size of the sub-micro-batch."""

    sizes: Annotated[
        list[Annotated[int, Field(ge=1, le=MAX_COUNT), WholeNumber]],
        Field(min_length=1, max_length=64, description="Items, growing."),
    ]
    forward_s: Annotated[list[LayerSeconds], Field(min_length=1, max_length=64)]
    backward_s: Annotated[list[LayerSeconds], Field(min_length=1, max_length=64)]


class Curves(Closed):
    """The same as two curves over "batch", each given in seconds or predicted from programs."""

    forward: BatchCurve
    backward: BatchCurve


class ModuleForm(Closed):
    """One module: its layers, what one costs, and what it keeps in memory."""

    name: Name
    layers: Annotated[
        Annotated[int, Field(ge=1, le=MAX_LAYERS), WholeNumber]
        | Annotated[list[RelativeTime], Field(min_length=1, max_length=MAX_LAYERS)],
        Field(description="How many, where all are alike; or the time of each, relative to the curves."),
    ]
    cost: GivenCurves | Curves
    after: Annotated[
        list[Name], Field(max_length=MAX_MODULES, description="Modules whose output it takes.", default_factory=list)
    ]
    segments: Annotated[
        Annotated[int, Field(ge=1, le=16), WholeNumber] | None,
        Field(description="Passes over all ranks; default: in proportion to its latency."),
    ] = None
    activation_bytes: Annotated[Bytes, Field(description="That a layer keeps of an item.")] = 0.0
    boundary_bytes: Annotated[
        Bytes, Field(description="That recomputing keeps of an item, at the input of a rank's layers.")
    ] = 0.0
    weight_bytes: Annotated[Bytes, Field(description="Of a layer: weights, gradients, optimizer.")] = 0.0


class MultimodalRequest(Request):
    """A training step of a multimodal model on a pipeline of ranks."""

    modules: Annotated[list[ModuleForm], Field(min_length=1, max_length=MAX_MODULES)]
    batch: Annotated[
        dict[str, Items] | None, Field(max_length=MAX_MODULES, description="Items of each module in the step: the mix.")
    ] = None
    batches: Annotated[
        list[Annotated[dict[str, Items], Field(max_length=MAX_MODULES)]] | None,
        Field(
            min_length=1,
            max_length=MAX_STEPS_OF_BATCHES,
            description="Instead of batch: the mixes of several steps, planned on one placement.",
        ),
    ] = None
    ranks: Annotated[int, Field(ge=1, le=MAX_RANKS), WholeNumber]
    samples: Annotated[
        Name | None,
        Field(
            description="Module whose items are the samples: an item of another belongs to one of them. "
            "Default: the one that exchanges data with most others, the last of these."
        ),
    ] = None
    efficiency: Annotated[
        float, Field(gt=0, le=1, description="Share of the peak items a second that sub-micro-batches keep.")
    ] = SHARE
    memory_bytes: Annotated[PositiveBytes | None, Field(description="Of each rank.")] = None
    knobs: Annotated[
        list[KnobName],
        Field(
            min_length=1,
            max_length=3,
            description='What may be done with activations; default: ["keep"].',
            default_factory=lambda: ["keep"],
        ),
    ]
    host_bandwidth_bytes_per_s: Annotated[
        Annotated[float, Field(ge=1, le=MAX_BYTES)] | None,
        Field(description="Of a rank's link to the host, each way; for the knob offload."),
    ] = None
    budget_s: Budget = 1.0
    max_steps: MaxSteps = None
    seed: Seed = 0

    answer_model: ClassVar[type[BaseModel]]

    @model_validator(mode="after")
    def _one_of(self) -> MultimodalRequest:
        if (self.batch is None) == (self.batches is None):
            raise ValueError("give either batch or batches")
        return self

    def price_requests(self) -> list[PriceRequest]:
        """The programs of the modules' curves, forward before backward."""
        self._check()
        return [
            one
            for i, module in enumerate(self.modules)
            if isinstance(module.cost, Curves)
            for which in ("forward", "backward")
            for one in getattr(module.cost, which).price_requests(f"modules.{i}.cost.{which}")
        ]

    def _check(self) -> None:
        names = [module.name for module in self.modules]
        for i, module in enumerate(self.modules):
            at = f"modules.{i}"
            if names.index(module.name) != i:
                raise FieldError(f"{at}.name: {module.name!r} is there twice", path=f"{at}.name")
            for j, name in enumerate(module.after):
                if name not in names:
                    raise FieldError(
                        f"{at}.after.{j}: no module is called {name!r}",
                        path=f"{at}.after.{j}",
                        hint="one of: " + ", ".join(names),
                    )
            _check_curves(module.cost, f"{at}.cost")
            layers = module.layers if isinstance(module.layers, int) else len(module.layers)
            if module.segments is not None and module.segments > max(1, layers // self.ranks):
                raise FieldError(
                    f"{at}.segments: {module.segments} segments on {self.ranks} ranks need "
                    f"{module.segments * self.ranks} layers, not {layers}",
                    path=f"{at}.segments",
                )
        for path, batch in self.named_batches():
            strange = [name for name in batch if name not in names]
            missing = [name for name in names if name not in batch]
            if strange or missing:
                word = "names no module" if strange else "is missing"
                raise FieldError(
                    f"{path}: {(strange or missing)[0]!r} {word}",
                    path=path,
                    hint="give the items of each module: " + ", ".join(names),
                )
            if not any(batch.values()):
                raise FieldError(f"{path}: a step without items", path=path)
        if self.samples is not None and self.samples not in names:
            raise FieldError(
                f"samples: no module is called {self.samples!r}", path="samples", hint="one of: " + ", ".join(names)
            )
        if "offload" in self.knobs and self.host_bandwidth_bytes_per_s is None:
            raise FieldError("host_bandwidth_bytes_per_s: the knob offload needs it", path="host_bandwidth_bytes_per_s")
        if self.memory_bytes is not None and not any(
            module.activation_bytes or module.weight_bytes for module in self.modules
        ):
            raise FieldError(
                "memory_bytes: no module says what it needs",
                path="memory_bytes",
                hint="give activation_bytes or weight_bytes of the modules",
            )
        ordered(self._modules(iter(()), priced=False)[0])

    def named_batches(self) -> list[tuple[str, dict[str, int]]]:
        """The steps' mixes with the fields that hold them."""
        if self.batches is not None:
            return [(f"batches.{at}", batch) for at, batch in enumerate(self.batches)]
        assert self.batch is not None
        return [("batch", self.batch)]

    def _modules(
        self, prices: Iterator[Prediction], priced: bool = True
    ) -> tuple[list[Module], list[tuple[list[Cost], list[Cost]]]]:
        """The modules, and the costs of a layer forward and backward by size; without prices, of no cost."""
        costs: list[tuple[list[Cost], list[Cost]]] = []
        for form in self.modules:
            if not priced:
                costs.append(([Cost.given(1.0)], [Cost.given(1.0)]))
            elif isinstance(form.cost, GivenCurves):
                forward, backward = form.cost.forward_s, form.cost.backward_s
                costs.append(([Cost.given(s) for s in forward], [Cost.given(s) for s in backward]))
            else:
                _, ahead = form.cost.forward.with_prices(prices).points()
                _, back = form.cost.backward.with_prices(prices).points()
                costs.append((ahead, back))
        return self._at(costs, "latency_s"), costs

    def _at(self, costs: Sequence[tuple[list[Cost], list[Cost]]], figure: str) -> list[Module]:
        """The modules with one figure of their costs."""
        names = [module.name for module in self.modules]
        out = []
        for form, (forward, backward) in zip(self.modules, costs, strict=True):
            given = form.cost.sizes if isinstance(form.cost, GivenCurves) else form.cost.forward.batch
            out.append(
                Module(
                    form.name,
                    (1.0,) * form.layers if isinstance(form.layers, int) else tuple(form.layers),
                    np.array(given[: len(forward)], dtype=np.float64),
                    np.array([getattr(cost, figure) for cost in forward]),
                    np.array([getattr(cost, figure) for cost in backward]),
                    tuple(sorted({names.index(name) for name in form.after})),
                    form.activation_bytes,
                    form.boundary_bytes,
                    form.weight_bytes,
                    form.segments,
                )
            )
        return out

    def priced(self, prices: Sequence[Prediction]) -> list[Module]:
        """The modules with their costs."""
        return self._modules(iter(prices))[0]

    @property
    def samples_at(self) -> int | None:
        """Index of the module of samples, where the request names it."""
        names = [module.name for module in self.modules]
        return None if self.samples is None else names.index(self.samples)

    @property
    def memory(self) -> Memory:
        """The limit and the knobs."""
        return Memory(
            float("inf") if self.memory_bytes is None else self.memory_bytes,
            tuple(dict.fromkeys(self.knobs)),
            float("inf") if self.host_bandwidth_bytes_per_s is None else self.host_bandwidth_bytes_per_s,
        )

    def solve(self, prices: Sequence[Prediction], watch: SearchControl) -> dict[str, Any]:
        """A plan for each step; see :func:`cdmpp.planning.multimodal.plan_steps`."""
        self._check()
        modules, costs = self._modules(iter(prices))
        named = self.named_batches()
        counter = Counter()
        bounds = (self._at(costs, "lower_s"), self._at(costs, "upper_s")) if prices else None

        def answer(plans: Sequence[Plan]) -> dict[str, Any]:
            answers = [plan_answer(plan, self.efficiency, bounds) for plan in plans]
            return summed(answers, plans, costs, counter, several=self.batches is not None)

        def tell(so_far: Callable[[], list[Plan]]) -> None:
            plans = so_far()
            watch.report(
                best=sum(plan.schedule.makespan_s for plan in plans),
                bound=sum(plan.bound_s for plan in plans),
                answer=lambda: answer(plans),
            )

        plans = plan_steps(
            modules,
            [[batch[module.name] for module in modules] for _, batch in named],
            self.ranks,
            memory=self.memory,
            share=self.efficiency,
            samples=self.samples_at,
            watch=watch,
            seed=self.seed,
            max_steps=self.max_steps,
            most_tasks=min(MAX_TASKS, 2 * MAX_TASKS // len(named)),
            counter=counter,
            report=tell,
        )
        return answer(plans)


def _check_curves(cost: GivenCurves | Curves, path: str) -> None:
    if isinstance(cost, Curves):
        cost.forward.check(f"{path}.forward")
        cost.backward.check(f"{path}.backward")
        for name in ("forward", "backward"):
            if min(getattr(cost, name).seconds or [1.0]) < LEAST_SECONDS:
                raise FieldError(f"{path}.{name}.seconds: less than {LEAST_SECONDS:g} s", path=f"{path}.{name}.seconds")
        if cost.forward.batch != cost.backward.batch:
            raise FieldError(f"{path}.backward.batch: not the sizes of forward", path=f"{path}.backward.batch")
        return
    for name in ("forward_s", "backward_s"):
        if len(getattr(cost, name)) != len(cost.sizes):
            raise FieldError(
                f"{path}.{name}: {len(getattr(cost, name))} values for {len(cost.sizes)} sizes", path=f"{path}.{name}"
            )
    if any(b <= a for a, b in zip(cost.sizes, cost.sizes[1:], strict=False)):
        raise FieldError(f"{path}.sizes: sizes must grow", path=f"{path}.sizes")


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class SubBatches(_Part):
    """How a module's items are cut."""

    rule_size: Annotated[int, Field(description="Smallest size that keeps the efficiency asked for.")]
    size: Annotated[int, Field(description="Largest sub-micro-batch of the plan.")]
    count: int
    items: Annotated[list[int], Field(description="Of each sub-micro-batch.")]
    efficiency: Annotated[float, Field(description="Items a second, as a share of the best size's.")]


class LayoutEntry(_Part):
    """Layers of a module on a rank; the entries of a module are in the order of its layers."""

    module: str
    segment: int
    rank: int
    first_layer: int
    layers: int


class RankMemory(_Part):
    """What a rank holds at most."""

    rank: int
    peak_bytes: float
    knobs: Annotated[
        dict[str, list[KnobName]], Field(description="By module, for each of its layout entries on this rank.")
    ]


class Entry(_Part):
    """One pass of a sub-micro-batch through a segment's layers on a rank."""

    module: str
    segment: int
    pass_: Annotated[Pass, Field(alias="pass")]
    micro_batch: int
    start_s: float
    end_s: float


class Interval(_Part):
    """The same order with every prediction at its bound: errors are taken to be shared."""

    lower_s: float
    upper_s: float


class StepPlan(_Part):
    """The plan of one step."""

    batch: dict[str, int]
    makespan_s: float
    lower_bound_s: float
    gap: float
    baselines: dict[str, float]
    interval: Interval | None
    sub_batches: dict[str, SubBatches]
    layout: list[LayoutEntry]
    memory: list[RankMemory]
    order: Annotated[list[list[Entry]], Field(description="By rank.")]
    bubble: Annotated[float, Field(description="Share of the ranks' time without work.")]


class Cache(_Part):
    """Schedules that the search made, and those that it had made before."""

    hits: int
    misses: int
    hit_rate: float


class MultimodalAnswer(Explained):
    """The plan of the step, or with "batches" of each step; figures in seconds and bytes."""

    makespan_s: Annotated[float, Field(description="Of all steps.")]
    lower_bound_s: Annotated[
        float, Field(description="Of every order on the placements and sub-micro-batches that were considered.")
    ]
    interval: Annotated[Interval | None, Field(description="Where costs are predicted.")]
    batch: dict[str, int] | None
    sub_batches: dict[str, SubBatches] | None
    layout: list[LayoutEntry]
    memory: list[RankMemory] | None
    order: list[list[Entry]] | None
    bubble: float
    plans: Annotated[list[StepPlan] | None, Field(description="With batches: one for each step, on the same layout.")]
    cache: Cache
    steps: Annotated[int, Field(description="Orders that the search tried.")]
    complete: Annotated[bool, Field(description="Every order was tried or ruled out, rather than the budget spent.")]


MultimodalRequest.answer_model = MultimodalAnswer
