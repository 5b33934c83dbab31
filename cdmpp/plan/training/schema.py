"""Request and plan of a training step: a language model on a number of devices."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PrivateAttr

from cdmpp.errors import FieldError
from cdmpp.llm import defaults
from cdmpp.llm.forms import (
    EngineForm,
    LayoutForm,
    LayoutRow,
    MemoryRow,
    ModelConfig,
    TrainingDegree,
    TrainingNetwork,
    training_requests,
)
from cdmpp.llm.options import MAX_GLOBAL_BATCH, MAX_SEQUENCE, Overlap
from cdmpp.llm.training.gradients import GradientPlan
from cdmpp.llm.training.layouts import PricedLayouts
from cdmpp.llm.training.result import TrainingStep, parts_table
from cdmpp.plan.compress.schema import CompressorForm
from cdmpp.plan.data_parallel.schema import Transfer
from cdmpp.predict.prediction import Prediction
from cdmpp.predict.rendering import Table, percent
from cdmpp.predict.requests.memory import memory_limit
from cdmpp.predict.requests.request import (
    Budget,
    Bytes,
    DeviceForm,
    Interval,
    Plan,
    PositiveBytes,
    PriceRequest,
    Request,
    Row,
    WholeNumber,
)
from cdmpp.utils.units import format_latency, format_si


class StepRow(Row):
    """A step with one layout."""

    layout: LayoutRow
    step_s: float
    memory: MemoryRow
    breakdown: dict[str, float] = Field(description="Seconds of the slowest rank; they add up to step_s.")


class Alternative(StepRow):
    """Another layout."""

    binds: str = Field(description="Largest share of the step besides computation.")


class TrainingStepPlan(StepRow, Plan):
    """The fastest step of the layouts that fit the memory."""

    objective_field, bounded = "step_s", "priced layouts"

    interval: Interval
    step_domain: Literal["in", "near", "out"] = Field(
        description="Of the step among those that the profile was fitted to."
    )
    domain_reason: str
    tokens_per_s_per_gpu: float
    model_flops_utilization: float | None
    buckets: list[Transfer] = Field(
        description="Exchanges of gradients; seconds from the start of the last backward pass of a stage."
    )
    exposed_comm_s: float = Field(description="Communication that computation does not hide.")
    fitting: int = Field(description="Layouts that fit the memory.")
    priced: int = Field(description="Those of the lowest rough cost, which were priced.")
    alternatives: list[Alternative] = Field(description="The next best with another tp, pp, cp, ep or sharding.")
    lower_bound_s: float = Field(description="Lower bound of all priced layouts: no exchange of gradients is exposed.")
    remarks: list[str] = Field(description="What is assumed, and what has no price.")

    def headline(self) -> str:
        """The step and its layout."""
        return f"a step takes {format_latency(self.step_s)} ({self.interval}) with {self.layout}"

    def trust(self) -> str:
        """The interval and the domain of the step, which count kernels by their share of it."""
        where = {"in": "in", "near": "near", "out": "outside of"}[self.step_domain]
        return (
            f"80 % interval {self.interval}, of the kernels or of measured steps, whichever is wider; {where} the "
            f"range of measured steps: {self.domain_reason.partition(': ')[0]}"
        )

    def tables(self) -> list[Table]:
        """Throughput, memory, buckets, parts of the step, other layouts, baselines."""
        peak, memory = self.model_flops_utilization, self.memory
        parts = (f"{name} {getattr(memory, name) / 1e9:.1f}" for name in ("weights", "gradients", "optimizer"))
        limit = "" if memory.limit is None else f" of {memory.limit / 1e9:.1f}"
        compressed = sum(bucket.compressor is not None for bucket in self.buckets)
        exchanges = ""
        if sizes := [bucket.bytes for bucket in self.buckets]:
            exchanges = (
                f"{len(sizes)} exchanges of gradients of {format_si(min(sizes), 'B')} to {format_si(max(sizes), 'B')}, "
                f"{compressed} of them compressed"
            )
        rows = [
            (str(row.layout), format_latency(row.step_s), f"{row.memory.total / 1e9:.0f}", row.binds)
            for row in self.alternatives
        ]
        return [
            Table.lines(
                f"{self.tokens_per_s_per_gpu:,.0f} tokens/s for each GPU"
                + ("" if peak is None else f", {percent(peak)} of the peak"),
                f"memory {memory.total / 1e9:.1f}{limit} GB: {', '.join(parts)}, "
                f"activations {memory.activations / 1e9:.1f}",
                exchanges,
            ),
            parts_table(self.breakdown, self.step_s),
            *([Table(("next layouts", "step", "memory GB", "binds"), rows, (1, 2))] if rows else []),
            self.baseline_table(),
            Table.lines(*self.explanation[1:], *(f"note: {remark}" for remark in self.remarks)),
        ]


class TrainingRequest(Request[TrainingStepPlan]):
    """A language model to be trained on a number of devices: layout, buckets of gradients and compression."""

    model: ModelConfig
    device: DeviceForm
    gpus: TrainingDegree
    global_batch: Annotated[int, Field(ge=1, le=MAX_GLOBAL_BATCH, description="Sequences of the step."), WholeNumber]
    sequence: Annotated[int, Field(ge=1, le=MAX_SEQUENCE, description="Tokens of a sequence."), WholeNumber]
    layout: LayoutForm = LayoutForm()
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    products: Literal["float8_e4m3", "mxfp8", "nvfp4"] | None = None
    overlap: Overlap | None = Field(None, description="Communication beside computation; null: the engine's.")
    ranks_per_node: Annotated[int | None, Field(ge=1, le=1024), WholeNumber] = None
    network: TrainingNetwork = None
    engine: EngineForm = defaults.TRAINING_ENGINE
    compressors: list[CompressorForm] = Field(
        max_length=4, default_factory=list, description="Ways to compress a bucket that all copies exchange."
    )
    bucket_bytes: list[Bytes] | None = Field(
        None, min_length=1, max_length=64, description="Sizes beside the engine's and PyTorch's. null: any buckets."
    )
    memory_bytes: PositiveBytes | None = Field(
        None, description="Memory limit of a device; null: its published capacity."
    )
    budget_s: Budget = 1.0

    _prices: Sequence[Prediction] = PrivateAttr(())

    @cached_property
    def layouts(self) -> PricedLayouts:
        """Layouts that fit the memory, with their queries."""
        limit = memory_limit(self.memory_bytes, [self.device], self.ignore_memory)
        fields: dict[str, Any] = {
            "sizes": self.model_dump(include={"gpus", "global_batch", "sequence", "overlap"}),
            "types": self.model_dump(include={"dtype", "products", "ranks_per_node", "network"}),
            "given": self.layout.model_dump(),
            "compressed": {compressor.collective for compressor in self.compressors},
        }
        try:
            return PricedLayouts.of(self.model, self.device, memory_bytes=limit, engine=self.engine, **fields)
        except FieldError as error:
            if error.path not in LayoutForm.model_fields:
                raise
            raise FieldError(f"layout.{error.message}", path=f"layout.{error.path}", hint=error.hint) from None

    def check(self) -> None:
        """Raise FieldError or InfeasibleError where the model is not known or no layout fits."""
        if self.compressors and self.bucket_bytes is not None:
            raise FieldError.at(
                "bucket_bytes", "compressed buckets may have any size", hint="leave bucket_bytes or compressors out"
            )
        _ = self.layouts

    def price_requests(self) -> list[PriceRequest]:
        """Programs of all layouts."""
        self.check()
        return training_requests(self.layouts.plans.queries, "model", self.device)

    def with_prices(self, prices: Sequence[Prediction]) -> Self:
        """A copy with the predictions."""
        filled = self.model_copy()
        filled._prices = prices
        return filled

    def used_prices(self, answer: TrainingStepPlan, prices: Sequence[Prediction]) -> Sequence[Prediction]:
        """Those of the chosen layout."""
        plans = self.layouts.plans
        chosen = next(plan for plan in plans.plans if answer.layout.is_of(plan.layout))
        return chosen.of_step(plans.of_plan(chosen, prices))

    def steps(self) -> list[tuple[GradientPlan, TrainingStep]]:
        """The step of each layout; only after :meth:`with_prices`."""
        plans, prices = self.layouts.plans, self._prices
        return [(plan, plan.result(prices[0].model_id or "", plans.of_plan(plan, prices))) for plan in plans.plans]

    def sizes(self) -> dict[str, int]:
        """Devices and compressors."""
        return {"gpus": self.gpus, "compressors": len(self.compressors)}
