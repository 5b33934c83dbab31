"""Request and plan of a multimodal pipeline: ``{"modules": [...]}`` of ``cdmpp plan pipeline``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from cdmpp.errors import FieldError
from cdmpp.plan.base.batch_curve import BatchCurve
from cdmpp.plan.base.passes import Executable, Execution
from cdmpp.plan.base.solve import check_unique
from cdmpp.plan.multimodal.modules import EFFICIENCY, MOST_SEGMENTS, Knob, MemoryOptions, Module, order_modules
from cdmpp.predict.rendering import Table
from cdmpp.predict.requests.fields import MAX_BYTES, Bytes, PositiveBytes
from cdmpp.predict.requests.memory import UNLIMITED_BYTES, memory_limit
from cdmpp.predict.requests.pricing import Cost, Figure
from cdmpp.predict.requests.request import (
    MAX_COUNT,
    MAX_SECONDS,
    Budget,
    Closed,
    Count,
    Interval,
    MaxSteps,
    Name,
    Plan,
    Request,
    Row,
    Seconds,
    Seed,
    WholeNumber,
    exactly_one,
    instead_of,
)
from cdmpp.utils.units import format_latency, format_si

Pass = Literal["F", "B"]
#: Least seconds of a layer: sums and squares of these are far from the limits of floating point.
LEAST_SECONDS = 1e-12
LayerSeconds = Annotated[float, Field(ge=LEAST_SECONDS, le=MAX_SECONDS)]
RelativeTime = Annotated[float, Field(ge=1e-6, le=1e6)]
Items = Annotated[int, Field(ge=0, le=MAX_COUNT), WholeNumber]


class SubBatches(Row):
    """Sub-micro-batches of a module."""

    rule_size: int = Field(description="Smallest size with the efficiency of the request.")
    size: int = Field(description="Largest sub-micro-batch of the plan.")
    count: int
    items: list[int] = Field(description="Items of each sub-micro-batch.")
    efficiency: float = Field(description="Items per second, as a share of the best size's.")


class LayoutEntry(Row):
    """Layers of a module on a rank; the entries of a module are in the order of its layers."""

    module: str
    segment: int
    rank: int
    first_layer: int
    layers: int


class RankMemory(Row):
    """Peak memory of a rank, and what is done with its activations."""

    rank: int
    peak_bytes: float
    knobs: dict[str, list[Knob]] = Field(description="By module, for each of its layout entries on this rank.")


class ScheduledPass(Row):
    """One pass of a sub-micro-batch through a segment's layers on a rank."""

    module: str
    segment: int
    pass_: Pass = Field(alias="pass")
    micro_batch: int
    start_s: float
    end_s: float


class StepPlan(Row):
    """Plan of one step."""

    batch: dict[str, int]
    makespan_s: float
    lower_bound_s: float
    searched_lower_bound_s: float
    gap: float
    baselines: dict[str, float]
    interval: Interval | None = Field(description="Makespan of the same order at the bounds of all predictions.")
    sub_batches: dict[str, SubBatches]
    layout: list[LayoutEntry]
    memory: list[RankMemory]
    order: list[list[ScheduledPass]] = Field(description="Passes of each rank, in order.")
    bubble: float = Field(description="Share of the ranks' time without work.")

    def tables(self) -> list[Table]:
        """Sub-micro-batches, and the memory of each rank."""
        cuts = [
            (name, str(self.batch[name]), str(cut.count), str(cut.size), str(cut.rule_size), f"{cut.efficiency:.0%}")
            for name, cut in self.sub_batches.items()
        ]
        header = ("module", "items", "sub-micro-batches", "largest", "rule's size", "of peak efficiency")
        tables = [Table(header, cuts, right=(1, 2, 3, 4, 5))]
        if any(rank.peak_bytes for rank in self.memory):
            ranks = []
            for rank in self.memory:
                changed = [f"{name}: {' '.join(knobs)}" for name, knobs in rank.knobs.items() if set(knobs) != {"keep"}]
                ranks.append((str(rank.rank), format_si(rank.peak_bytes, "B"), ", ".join(changed)))
            tables.append(Table(("rank", "peak memory", "knobs other than keep"), ranks, right=(0, 1)))
        return tables


class CacheSummary(Row):
    """Schedules that the search computed (misses) and looked up (hits)."""

    hits: int
    misses: int
    hit_rate: float


class MultimodalPlan(Plan):
    """Plan of the step, or with "batches" of each step; figures in seconds and bytes."""

    makespan_s: float = Field(description="Sum of all steps.")
    lower_bound_s: float = Field(
        description="Lower bound of every plan that the request allows: all cuts, counts and orders."
    )
    searched_lower_bound_s: float = Field(
        description="Lower bound of all orders on the placements and sub-micro-batches that were tried."
    )
    interval: Interval | None = Field(description="null where all costs are given.")
    batch: dict[str, int] | None
    sub_batches: dict[str, SubBatches] | None
    layout: list[LayoutEntry]
    memory: list[RankMemory] | None
    order: list[list[ScheduledPass]] | None
    bubble: float = Field(description="Share of the ranks' time without work.")
    plans: list[StepPlan] | None = Field(description="With batches: one for each step, on the same layout.")
    cache: CacheSummary
    steps: int = Field(description="Orders that the search evaluated.")
    complete: bool = Field(
        description="No plan that the request allows is shorter: the bound is met, or all were tried."
    )
    execution: Execution | None = Field(
        None, description="With executable.", exclude_if=lambda execution: execution is None
    )

    def step_plans(self) -> list[StepPlan]:
        """Plans of the steps; the plan itself where there is one step.

        Raises ValidationError: a plan without ``plans`` lacks batch, sub_batches, memory or order.
        """
        if self.plans is not None:
            return self.plans
        return [StepPlan.model_validate({name: getattr(self, name) for name in StepPlan.model_fields})]

    def headline(self) -> str:
        """Makespan and bubble."""
        return f"makespan {format_latency(self.makespan_s)}, bubble {100 * self.bubble:.1f} %"

    def tables(self) -> list[Table]:
        """Baselines, sub-micro-batches and memory of each step, and the layout."""
        rows = self.baselines.items()
        baselines = [(name, format_latency(s), f"{s / self.makespan_s:.3f} x") for name, s in rows]
        tables = [Table(("baseline", "makespan", "ratio"), baselines, right=(1, 2))]
        for number, step in enumerate(self.step_plans()):
            if self.plans is not None:
                gap = f"gap {100 * step.gap:.2f} %"
                tables.append(Table.lines(f"step {number}: {format_latency(step.makespan_s)}, {gap}"))
            tables += step.tables()
        searched = (
            f"lower bound of the variants searched {format_latency(self.searched_lower_bound_s)}; "
            f"{self.steps:,} orders evaluated, {100 * self.cache.hit_rate:.0f} % of them from the cache"
        )
        done = "; no plan of this request is shorter" if self.complete else ""
        return [*tables, self._layout_table(), Table.lines(searched + done, *self.explanation[1:])]

    def _layout_table(self) -> Table:
        rows = []
        for rank in range(1 + max(entry.rank for entry in self.layout)):
            layers = [
                f"{entry.module}.{entry.segment} {entry.first_layer}-{entry.first_layer + entry.layers - 1}"
                for entry in self.layout
                if entry.rank == rank and entry.layers
            ]
            rows.append((str(rank), "; ".join(layers)))
        return Table(("rank", "layers by module.segment"), rows, right=(0,))


class GivenCurves(Closed):
    """Seconds of one layer by size of the sub-micro-batch."""

    sizes: list[Count] = Field(min_length=1, description="Sub-micro-batch sizes in items, growing.")
    forward_s: list[LayerSeconds] = Field(min_length=1)
    backward_s: list[LayerSeconds] = Field(min_length=1)

    def check(self, path: str) -> None:
        """Raise FieldError where the curves contradict each other."""
        for name, seconds in (("forward_s", self.forward_s), ("backward_s", self.backward_s)):
            if len(seconds) != len(self.sizes):
                raise FieldError.at(f"{path}.{name}", f"{len(seconds)} values for {len(self.sizes)} sizes")
        if any(b <= a for a, b in zip(self.sizes, self.sizes[1:], strict=False)):
            raise FieldError.at(f"{path}.sizes", "sizes must grow")

    @property
    def all_sizes(self) -> list[int]:
        """Sizes of the curves."""
        return self.sizes

    def points(self) -> tuple[list[int], list[Cost], list[Cost]]:
        """Sizes, and the forward and backward cost at each."""
        return self.sizes, [Cost.given(s) for s in self.forward_s], [Cost.given(s) for s in self.backward_s]


class Curves(Closed):
    """Two curves over "batch", each given in seconds or predicted from programs."""

    forward: BatchCurve
    backward: BatchCurve

    def check(self, path: str) -> None:
        """Raise FieldError where the curves contradict each other."""
        for name, curve in (("forward", self.forward), ("backward", self.backward)):
            curve.check(f"{path}.{name}")
            if min(curve.seconds or [1.0]) < LEAST_SECONDS:
                raise FieldError.at(f"{path}.{name}.seconds", f"less than {LEAST_SECONDS:g} s")
        if self.forward.batch != self.backward.batch:
            path = f"{path}.backward.batch"
            raise FieldError.at(path, "sizes differ from those of forward")

    @property
    def all_sizes(self) -> list[int]:
        """Sizes of the curves."""
        return self.forward.batch

    def points(self) -> tuple[list[int], list[Cost], list[Cost]]:
        """Sizes, and the forward and backward cost at each; the request must be resolved."""
        return self.forward.batch, self.forward.points()[1], self.backward.points()[1]


class ModuleForm(Closed):
    """One module: its layers, the cost of one, and what it keeps in memory."""

    name: Name
    layers: Count | Annotated[list[RelativeTime], Field(min_length=1)] = Field(
        description="Number of equal layers, or the time of each relative to the curves."
    )
    cost: GivenCurves | Curves
    transfer_s: Seconds | list[Seconds] = Field(
        0.0,
        description="Seconds of sending the output of a sub-micro-batch to another rank, and of its gradient back: "
        "one figure, or one for each of the sizes of `cost`.",
    )
    transfer: BatchCurve | None = Field(
        None, description="Predicted, instead of transfer_s: such as a collective over `batch`."
    )
    after: list[Name] = Field(description="Modules whose output it takes.", default_factory=list)
    segments: Annotated[int, Field(ge=1, le=MOST_SEGMENTS), WholeNumber] | None = Field(
        None, description="Most passes over all ranks; default: as many as have a layer on each rank, up to 16."
    )
    activation_bytes: Bytes = Field(0.0, description="Bytes that a layer keeps for an item.")
    boundary_bytes: Bytes = Field(
        0.0, description="Bytes that recomputation keeps for an item at the input of a rank's layers."
    )
    weight_bytes: Bytes = Field(0.0, description="Bytes of a layer's weights, gradients and optimizer states.")

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        return instead_of(self, "transfer", "transfer_s")

    def transfer_points(self) -> tuple[Sequence[float] | np.ndarray, list[Cost]] | None:
        """Sizes, and the cost of sending an output at each; None where it takes no time. The request is resolved."""
        if self.transfer is not None:
            return self.transfer.points()
        sizes = self.cost.all_sizes
        given = self.transfer_s if isinstance(self.transfer_s, list) else [self.transfer_s] * len(sizes)
        return (sizes, [Cost.given(seconds) for seconds in given]) if any(given) else None

    @property
    def layer_times(self) -> tuple[float, ...]:
        """Time of each layer relative to the curves."""
        return (1.0,) * self.layers if isinstance(self.layers, int) else tuple(self.layers)

    @property
    def layer_count(self) -> int:
        """Number of layers."""
        return self.layers if isinstance(self.layers, int) else len(self.layers)

    def check(self, names: Sequence[str], ranks: int, path: str) -> None:
        """Raise FieldError where parts of the module contradict each other or the modules' ``names``."""
        for j, name in enumerate(self.after):
            if name not in names:
                raise FieldError.at(
                    f"{path}.after.{j}", f"no module is called {name!r}", hint="one of: " + ", ".join(names)
                )
        self.cost.check(f"{path}.cost")
        if self.transfer is not None:
            self.transfer.check(f"{path}.transfer")
        if isinstance(self.transfer_s, list) and len(self.transfer_s) != (sizes := len(self.cost.all_sizes)):
            raise FieldError.at(f"{path}.transfer_s", f"{len(self.transfer_s)} values for {sizes} sizes of cost")
        layers = self.layer_count
        if self.segments is not None and self.segments > max(1, layers // ranks):
            raise FieldError.at(
                f"{path}.segments",
                f"{self.segments} segments on {ranks} ranks need {self.segments * ranks} layers, not {layers}",
            )


class MultimodalRequest(Request[MultimodalPlan]):
    """A training step of a multimodal model on a pipeline of ranks."""

    modules: list[ModuleForm] = Field(min_length=1)
    batch: dict[str, Items] | None = Field(None, description="The mix: number of items of each module in the step.")
    batches: list[dict[str, Items]] | None = Field(
        None, min_length=1, description="Instead of batch: the mixes of several steps, planned on one placement."
    )
    ranks: Count
    samples: Name | None = Field(
        None,
        description="Module whose items are the samples: an item of another module belongs to one of them. "
        "Default: the module that exchanges data with most others, the last of these.",
    )
    efficiency: float = Field(
        EFFICIENCY,
        gt=0,
        le=1,
        description="Share of the peak items per second that sub-micro-batches of PipeWeaver's rule reach. "
        "The rule is a baseline; the plan tries every size.",
    )
    memory_bytes: PositiveBytes | None = Field(
        None, description="Memory limit of each rank; null: that of the device of the modules."
    )
    knobs: list[Knob] = Field(
        min_length=1,
        max_length=3,
        description='What may be done with activations; default: ["keep"].',
        default_factory=lambda: list[Knob](["keep"]),
    )
    host_bandwidth_bytes_per_s: Annotated[float, Field(ge=1, le=MAX_BYTES)] | None = Field(
        None, description="Bandwidth of a rank's link to the host in each direction; for the knob offload."
    )
    executable: Executable = False
    budget_s: Budget = 1.0
    max_steps: MaxSteps = None
    seed: Seed = 0

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        return exactly_one(self, "batch", "batches")

    def sizes(self) -> dict[str, int]:
        """Modules, layers of one, ranks, steps, items of a step, and its tasks in the largest sub-micro-batches."""
        largest = {module.name: module.cost.all_sizes[-1] for module in self.modules}
        batches = [batch for _, batch in self.named_batches()]
        tasks = [2 * self.ranks * sum(-(-n // largest.get(name, n or 1)) for name, n in b.items()) for b in batches]
        return {
            "modules": len(self.modules),
            "layers": max(module.layer_count for module in self.modules),
            "ranks": self.ranks,
            "steps": len(batches),
            "items": max(sum(batch.values()) for batch in batches),
            "tasks": max(tasks),
        }

    def check(self) -> None:
        """Raise FieldError where parts of the request contradict each other; ``path`` names the field."""
        names = [module.name for module in self.modules]
        check_unique(names, "modules")
        for i, module in enumerate(self.modules):
            module.check(names, self.ranks, f"modules.{i}")
        for path, batch in self.named_batches():
            _check_batch(batch, names, path)
        if self.samples is not None and self.samples not in names:
            raise FieldError.at("samples", f"no module is called {self.samples!r}", hint="one of: " + ", ".join(names))
        if "offload" in self.knobs and self.host_bandwidth_bytes_per_s is None:
            path = "host_bandwidth_bytes_per_s"
            raise FieldError.at(path, "the knob offload needs it")
        has_bytes = any(module.activation_bytes or module.weight_bytes for module in self.modules)
        if self.memory_bytes is not None and not has_bytes:
            raise FieldError.at(
                "memory_bytes",
                "a limit needs the memory of the modules",
                hint="give activation_bytes or weight_bytes of the modules",
            )
        order_modules(names, [[names.index(name) for name in module.after] for module in self.modules])

    def named_batches(self) -> list[tuple[str, dict[str, int]]]:
        """Field and mix of each step."""
        if self.batches is not None:
            return [(f"batches.{number}", batch) for number, batch in enumerate(self.batches)]
        assert self.batch is not None
        return [("batch", self.batch)]

    def costs(self) -> list[tuple[list[Cost], list[Cost]]]:
        """Forward and backward cost of a layer of each module, by size; the request must be resolved."""
        return [module.cost.points()[1:] for module in self.modules]

    def resolved_modules(self, figure: Figure = "latency_s") -> list[Module]:
        """The modules with their costs; the request must be resolved.

        ``figure``: which figure of the costs to use: the prediction or one of its bounds.
        """
        names = [module.name for module in self.modules]
        modules = []
        for form in self.modules:
            sizes, forward, backward = form.cost.points()
            transfer = form.transfer_points()
            modules.append(
                Module(
                    name=form.name,
                    layers=form.layer_times,
                    sizes=np.array(sizes, dtype=np.float64),
                    forward_s=np.array([getattr(cost, figure) for cost in forward]),
                    backward_s=np.array([getattr(cost, figure) for cost in backward]),
                    after=tuple(sorted({names.index(name) for name in form.after})),
                    activation_bytes=form.activation_bytes,
                    boundary_bytes=form.boundary_bytes,
                    weight_bytes=form.weight_bytes,
                    segments=form.segments,
                    transfer=transfer and (np.array(transfer[0]), np.array([getattr(c, figure) for c in transfer[1]])),
                )
            )
        return modules

    @property
    def samples_index(self) -> int | None:
        """Index of the module of samples; None where the request names none."""
        return None if self.samples is None else [module.name for module in self.modules].index(self.samples)

    @property
    def memory(self) -> MemoryOptions:
        """Memory limit and knobs."""
        return MemoryOptions(
            self._memory_limit(),
            tuple(dict.fromkeys(self.knobs)),
            float("inf") if self.host_bandwidth_bytes_per_s is None else self.host_bandwidth_bytes_per_s,
        )

    def _memory_limit(self) -> float:
        """Memory limit of a rank in bytes; a device that holds the whole step has no limit."""
        curves = [module.cost for module in self.modules if isinstance(module.cost, Curves)]
        devices = [device for cost in curves for device in (cost.forward.device, cost.backward.device)]
        limit = memory_limit(self.memory_bytes, devices, self.ignore_memory)
        if self.memory_bytes is not None:
            return limit
        largest = max(
            sum(
                module.layer_count * (module.weight_bytes + module.activation_bytes * batch[module.name])
                for module in self.modules
            )
            for _, batch in self.named_batches()
        )
        return limit if largest > limit else UNLIMITED_BYTES


def _check_batch(batch: dict[str, int], names: list[str], path: str) -> None:
    unknown = [name for name in batch if name not in names]
    missing = [name for name in names if name not in batch]
    if unknown or missing:
        problem = "names no module" if unknown else "is missing"
        raise FieldError.at(
            path, f"{(unknown or missing)[0]!r} {problem}", hint="give the items of each module: " + ", ".join(names)
        )
    if not any(batch.values()):
        raise FieldError.at(path, "the step has no items", hint="at least one item of one module")
