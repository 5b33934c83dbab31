"""The fastest layouts of training by number of devices, for packed samples of different lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from cdmpp.devices.spec import DeviceSpec
from cdmpp.llm.config import LLMConfig
from cdmpp.llm.engines.profile import load_training_engine
from cdmpp.llm.training.fitting import candidates, rough_cost
from cdmpp.llm.training.layout import TrainingLayout, training_types
from cdmpp.llm.training.links import Links
from cdmpp.llm.training.memory import TrainingMemory, training_memory
from cdmpp.llm.training.search import PlanGroup
from cdmpp.llm.training.step import TrainingPlan
from cdmpp.predict.interface import Predictor

#: Layouts of each size that are priced, those of the lowest rough cost.
MAX_PRICED = 16


@dataclass(frozen=True)
class TrainingQuestion:
    """What trains: a model on devices, and the samples of an update."""

    model: LLMConfig
    device: DeviceSpec
    engine: str
    products: str | None
    samples: int  # samples of an update
    lengths: tuple[int, ...]  # tokens of samples with their prompts
    forwards: int  # forward passes of models of the same size over each sample, in the layout of training
    given: tuple[tuple[str, int | str], ...] = ()  # degrees that all layouts have

    @cached_property
    def mean(self) -> int:
        """Tokens of a sample on average."""
        return round(sum(self.lengths) / len(self.lengths))

    def capacity(self, layout: TrainingLayout) -> int:
        """Tokens of a micro-batch of packed samples, which holds the longest one."""
        return max(*self.lengths, layout.micro_batch * self.mean)

    def padding(self, layout: TrainingLayout) -> float:
        """Tokens of an update that are computed, as a factor of those of its samples.

        Samples are packed into micro-batches, first fit, longest first. All copies have as many micro-batches, and
        stages pass micro-batches of one size, so that these are padded.
        """
        capacity = self.capacity(layout)
        key = (capacity, layout.dp, layout.pp > 1)
        if key not in self._padding:
            order = sorted(self.lengths)
            drawn = [order[(2 * i + 1) * len(order) // (2 * self.samples)] for i in range(self.samples)]
            bins = -(-_bins(drawn, capacity) // layout.dp) * layout.dp
            padded = bins * capacity if layout.pp > 1 else max(sum(drawn), bins * sum(drawn) / _bins(drawn, capacity))
            self._padding[key] = padded / sum(drawn)
        return self._padding[key]

    @cached_property
    def _padding(self) -> dict[tuple[int, int, bool], float]:
        return {}

    def memory(self, layout: TrainingLayout) -> TrainingMemory:
        """Memory of a layout with micro-batches of packed samples, which hold the longest one."""
        packed = replace(layout, sequence=self.capacity(layout), micro_batch=1)
        loop = load_training_engine(self.engine).training
        assert loop is not None
        types = training_types("bfloat16", self.products, self.device)
        return training_memory(self.model, packed, types, loop, self.device.memory_bytes)

    def layouts(self, gpus: int) -> list[TrainingLayout]:
        """Layouts of some devices that fit their memory, in order of growing rough cost."""
        loop = load_training_engine(self.engine).training
        assert loop is not None
        layouts = candidates(
            self.model,
            lambda layout: self.memory(layout).fits_with_margin,
            Links.of(self.device, None, None).domain_ranks,
            gpus=gpus,
            global_batch=self.samples,
            sequence=max(self.lengths),
            overlap=loop.overlap,
            given=dict(self.given),
        )
        return [
            replace(layout, sequence=self.mean) for layout in sorted(layouts, key=rough_cost) if layout.cp <= self.mean
        ]


def _bins(lengths: Sequence[int], capacity: int) -> int:
    """Bins of a packing: first fit, longest first."""
    room: list[int] = []
    for length in sorted(lengths, reverse=True):
        place = next((i for i, left in enumerate(room) if left >= length), None)
        if place is None:
            room.append(capacity - length)
        else:
            room[place] -= length
    return len(room)


_known: dict[tuple[Any, ...], dict[int, dict[str, Any]]] = {}


def training_sizes(
    question: TrainingQuestion, gpus: Sequence[int], host_bytes_per_s: float, predictor: Predictor
) -> dict[int, dict[str, Any]]:
    """The fastest layout for each number of devices: fields of a row of ``training.sizes`` of the RL planner.

    Numbers of devices without a layout are left out. Results of equal questions are kept.

    ``host_bytes_per_s``: rate of a device to the host's memory.
    """
    key = (repr(question), tuple(gpus), host_bytes_per_s, predictor.model_id)
    if key not in _known:
        if len(_known) >= 64:
            _known.clear()
        _known[key] = _training_sizes(question, gpus, host_bytes_per_s, predictor)
    return _known[key]


def _training_sizes(
    question: TrainingQuestion, gpus: Sequence[int], host_bytes_per_s: float, predictor: Predictor
) -> dict[int, dict[str, Any]]:
    profile = load_training_engine(question.engine)
    shared: dict[Any, Any] = {}
    options: dict[str, Any] = {"products": question.products, "engine": profile, "check_memory": False}
    plans = PlanGroup(
        [
            TrainingPlan(question.model, question.device, layout, shared=shared, **options)
            for count in gpus
            for layout in question.layouts(count)[:MAX_PRICED]
        ]
    )
    predictions = predictor.predict_queries(plans.queries)
    best: dict[int, dict[str, Any]] = {}
    for plan in plans.plans:
        plan_predictions = plans.of_plan(plan, predictions)
        step, layout = plan.result(predictor.model_id, plan_predictions), plan.layout
        seconds = step.breakdown
        update_s = seconds["bubble"] + seconds["optimizer"] + seconds["exposed"]["dp"]
        padding = question.padding(layout)
        if layout.gpus in best and best[layout.gpus]["step_s"] <= padding * step.step_s:
            continue
        passes = [float(plan.layer_pass(plan_predictions, backward=back)[0][0]) for back in (False, True)]
        forward_s = (step.step_s - seconds["optimizer"] - seconds["exposed"]["dp"]) * passes[0] / sum(passes)
        tokens, memory = layout.global_batch * question.mean / padding, question.memory(layout)
        names = ("gpus", "tp", "pp", "virtual_pp", "cp", "ep", "micro_batch", "sharding", "recompute")
        best[layout.gpus] = {
            "step_s": padding * step.step_s,
            "token_s": (step.step_s - update_s) / tokens,
            "update_s": update_s,
            "inference_s": question.forwards * forward_s / tokens,
            "swap_s": 2 * (memory.weights + memory.optimizer) / host_bytes_per_s,
            "lower": min(step.lower_s / step.step_s, 1.0),
            "upper": max(step.upper_s / step.step_s, 1.0),
            "memory_bytes": memory.total,
            "layout": {name: getattr(layout, name) for name in names},
            "domain": step.domain,
        }
    for row in best.values():
        del row["step_s"]
    return best
