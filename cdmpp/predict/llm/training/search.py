"""Layouts of a training step: the smallest that fit a device, and the fastest for a number of devices."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from cdmpp.errors import FieldError
from cdmpp.predict.llm.config import LLMConfig
from cdmpp.predict.llm.training.layout import Recompute, TrainingLayout
from cdmpp.predict.llm.training.memory import training_memory

if TYPE_CHECKING:
    from cdmpp.predict.llm.training.step import TrainingPlan

#: Layouts of more devices are not proposed.
MAX_PROPOSED_GPUS = 1024
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")


def _powers(most: int) -> list[int]:
    return [1 << i for i in range(max(1, most).bit_length()) if 1 << i <= most]


def _valid(layout: TrainingLayout, config: LLMConfig) -> bool:
    try:
        layout.check(config)
    except FieldError:
        return False
    return True


def smallest_layouts(plan: TrainingPlan, most: int = 3) -> list[TrainingLayout]:
    """Layouts of fewest devices that hold the model of a plan, each with the least recomputation that fits.

    The micro-batch is one sequence, and the batch is rounded to a multiple of the copies.
    """
    config, device, own = plan.config, plan.device, plan.layout
    assert device.memory_bytes is not None
    experts = 1 if config.experts is None else config.experts.count
    for gpus in _powers(MAX_PROPOSED_GPUS):
        found = []
        for tp in _powers(min(gpus, plan.links.together, 16)):
            for pp in _powers(min(gpus // tp, config.layers)):
                for ep in _powers(min(gpus // pp, experts)):
                    copies = max(1, gpus // (tp * pp))
                    batch = -(-own.global_batch // copies) * copies
                    for recompute in RECOMPUTE:
                        layout = replace(
                            own,
                            gpus=gpus,
                            tp=tp,
                            pp=pp,
                            virtual_pp=1,
                            cp=1,
                            ep=ep,
                            micro_batch=1,
                            global_batch=batch,
                            recompute=recompute,
                        )
                        if _valid(layout, config) and _fits(plan, layout):
                            found.append(layout)
                            break
        if found:
            found.sort(key=lambda one: (RECOMPUTE.index(one.recompute), one.pp, one.tp, one.ep))
            return found[:most]
    return []


def _fits(plan: TrainingPlan, layout: TrainingLayout) -> bool:
    config = plan.config
    layers = [-(-config.layers // layout.pp)] * layout.pp
    memory = training_memory(config, layout, plan.types, layers, plan.loop.gradient_bytes)
    return memory.total <= (plan.device.memory_bytes or float("inf"))
