"""Errors on sources that took no part in the choice of a profile's figures.

Sources of one kind share a profile: Megatron-Bridge on either device, and the PyTorch frameworks (TorchTitan, fms-fsdp,
llm-foundry). For each source the figures of :data:`GRID` are chosen on the others of its kind, by the mean of their
errors, and so are the ranges in which the profile calls a step ``in``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, Protocol

import numpy as np

from cdmpp.llm import TrainingPlan
from cdmpp.llm.engines.profile import EngineProfile, MeasuredSteps, load_training_engine

#: Profiles by kind of source, and choices: factors on kernels, sustained shares of products and attention (H100),
#: factor on experts.
ENGINES = {"megatron-bridge": "megatron"}
GRID: dict[str, tuple[tuple[float, ...], ...]] = {
    "megatron": ((0.95, 1.05, 1.15), (1.0,), (1.0,), (1.2, 1.5, 1.8, 2.1)),
    "torchtitan": ((0.95, 1.05, 1.15), (0.5, 0.55, 0.6, 0.65, 0.7), (0.25, 0.3, 0.35, 0.4, 0.5), (1.8,)),
}


class _Step(Protocol):
    @property
    def rows(self) -> list[Any]: ...
    @property
    def plan(self) -> TrainingPlan: ...
    @property
    def seconds(self) -> float: ...
    @property
    def predictions(self) -> Any: ...


def choices(engine: EngineProfile, kind: str) -> Iterator[EngineProfile]:
    """The profile with each choice of its figures."""
    assert engine.training is not None
    for kernel, linear, attention, expert in product(*GRID[kind]):
        update: dict[str, Any] = {"expert_factor": expert}
        if kind == "torchtitan":
            update["sustained"] = {**engine.training.sustained, "sm_90": linear}
            update["sustained_attention"] = {**engine.training.sustained_attention, "sm_90": attention}
        loop = engine.training.model_copy(update=update)
        yield engine.model_copy(update={"kernel_factor": kernel, "training": loop})


def chosen(engine: EngineProfile, kind: str, others: Sequence[Sequence[_Step]]) -> EngineProfile:
    """The choice with the least mean error of other sources, which ``measured`` covers."""

    def error(profile: EngineProfile) -> float:
        return float(np.mean([np.mean([_error(step, profile) for step in steps]) for steps in others]))

    best = min(choices(engine, kind), key=error)
    measured = MeasuredSteps()
    for steps in others:
        for step in steps:
            measured = measured.widened(*step.plan.place)
    assert best.training is not None
    return best.model_copy(update={"training": best.training.model_copy(update={"measured": measured})})


def _error(step: _Step, profile: EngineProfile) -> float:
    return abs(step.plan.result("", step.predictions, profile).step_s / step.seconds - 1)


def kind_of(source: str) -> str:
    """The profile of a source's kind."""
    return ENGINES.get(source, "torchtitan")


def left_out_profiles(groups: Mapping[tuple[str, str], Sequence[_Step]]) -> dict[tuple[str, str], EngineProfile]:
    """A profile for each source and device, chosen on the others of its kind; steps have the profile of their kind."""
    return {
        key: chosen(
            load_training_engine(kind_of(key[0])),
            kind_of(key[0]),
            [steps for other, steps in groups.items() if other != key and kind_of(other[0]) == kind_of(key[0])],
        )
        for key in groups
    }
