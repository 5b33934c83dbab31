"""Layouts that fit a device's memory: the smallest for a model, and all for a number of devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from cdmpp.errors import FieldError
from cdmpp.llm.config import LLMConfig
from cdmpp.llm.options import Overlap, Recompute
from cdmpp.llm.training.layout import TrainingLayout

#: Layouts of more devices are not proposed.
MAX_PROPOSED_GPUS = 1024
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")


def _powers(maximum: int) -> list[int]:
    return [1 << i for i in range(max(1, maximum).bit_length()) if 1 << i <= maximum]


def _valid(layout: TrainingLayout, config: LLMConfig) -> bool:
    try:
        layout.check(config)
    except FieldError:
        return False
    return True


def smallest_layouts(
    config: LLMConfig, wanted: TrainingLayout, fits: Callable[[TrainingLayout], bool], domain_ranks: int, count: int = 3
) -> list[TrainingLayout]:
    """Layouts of fewest devices that hold the model, each with the least recomputation that fits.

    The micro-batch is one sequence, and the copies divide the batch of ``wanted``, the layout that does not fit; its
    sharding and overlap are kept. ``fits``: whether a layout fits the device. ``domain_ranks``: most tensor-parallel
    ranks.
    """
    experts = 1 if config.experts is None else config.experts.count
    for gpus in _powers(MAX_PROPOSED_GPUS):
        layouts = []
        for tp in _powers(min(gpus, domain_ranks, 16)):
            for pp in [1] if wanted.sharding == "fsdp" else _powers(min(gpus // tp, config.layers)):
                for ep in _powers(min(gpus // pp, experts)):
                    for recompute in RECOMPUTE:
                        layout = replace(
                            wanted,
                            gpus=gpus,
                            tp=tp,
                            pp=pp,
                            virtual_pp=1,
                            cp=1,
                            ep=ep,
                            micro_batch=1,
                            recompute=recompute,
                        )
                        if _valid(layout, config) and fits(layout):
                            layouts.append(layout)
                            break
        if layouts:
            layouts.sort(key=lambda layout: (RECOMPUTE.index(layout.recompute), layout.pp, layout.tp, layout.ep))
            return layouts[:count]
    return []


def _divisors(value: int, maximum: int) -> list[int]:
    return [n for n in range(1, maximum + 1) if value % n == 0]


def candidates(
    config: LLMConfig,
    fits: Callable[[TrainingLayout], bool],
    domain_ranks: int,
    *,
    gpus: int,
    global_batch: int,
    sequence: int,
    overlap: Overlap,
    given: Mapping[str, Any],
) -> list[TrainingLayout]:
    """Layouts that fit the memory, each with the least recomputation that does.

    ``given``: values of fields of :class:`TrainingLayout` that all layouts have.
    """
    layouts = []

    def choice(name: str, values: Sequence[Any]) -> Sequence[Any]:
        return (given[name],) if name in given else values

    choices = product(
        choice("tp", _powers(min(gpus, domain_ranks, 16))),
        choice("pp", _divisors(gpus, min(gpus, config.layers, 64))),
        choice("cp", _powers(min(gpus, max(1, sequence // 4096), 16))),
        choice("ep", _powers(min(gpus, 1 if config.experts is None else config.experts.count))),
        choice("micro_batch", (1, 2, 4, 8)),
        choice("sharding", ("optimizer", "fsdp")),
    )
    for tp, pp, cp, ep, micro, kind in choices:
        if gpus % (tp * pp * cp) or (kind == "fsdp" and pp > 1 and not {"pp", "sharding"} <= given.keys()):
            continue
        layout = TrainingLayout(gpus, micro, global_batch, sequence, tp, pp, 1, cp, ep, kind, "none", overlap)
        if not _valid(layout, config):
            continue
        for virtual_pp in choice("virtual_pp", _parts(config.layers, pp, layout.micro_batches)):
            for recompute in choice("recompute", RECOMPUTE):
                candidate = replace(layout, virtual_pp=virtual_pp, recompute=recompute)
                if _valid(candidate, config) and fits(candidate):
                    layouts.append(candidate)
                    break
    return layouts


def _parts(layers: int, pp: int, micro_batches: int) -> list[int]:
    """Parts of the model on a stage: embedding and output layer count as layers where only that divides."""
    counted = layers if layers % pp == 0 else layers + 2
    if pp == 1 or counted % pp or micro_batches < pp:
        return [1]
    return [n for n in (1, 2, 3, 4, 5, 8) if counted // pp % n == 0]


def rough_cost(layout: TrainingLayout) -> float:
    """Relative duration by the bubble, recomputation and the ranks that communicate in each layer."""
    bubble = 1 + (layout.pp - 1) / (layout.virtual_pp * layout.micro_batches)
    again = {"none": 1.0, "selective": 1.04, "full": 1.28}[layout.recompute]
    shared = 1 + 0.05 * (layout.tp.bit_length() - 1) + 0.03 * (layout.cp.bit_length() - 1)
    exchanged = 1 + 0.05 * (layout.ep.bit_length() - 1)
    gathered = 1 + (0.1 / layout.micro_batch if layout.sharding == "fsdp" else 0.0)
    return bubble * again * shared * exchanged * gathered
