"""Costs of the stages of a pipeline, for kept, recomputed and offloaded activations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Floats = NDArray[np.float64]
Memory = Literal["keep", "recompute", "offload"]

#: Rows of a cost table and of the numbering of tasks: forward, backward (for the inputs), backward for the
#: weights, copy to the host, copy back.
FORWARD, BACKWARD, WEIGHT, OUT, IN = range(5)
KINDS = ("F", "B", "W", "out", "in")

#: Share of the backward pass that is taken for weight gradients where a schedule splits it and no cost says
#: so. Both halves of a matrix product's backward pass are one product of the same size (Qi et al., ICLR '24).
WEIGHT_SHARE = 0.5


@dataclass(frozen=True)
class PassCost:
    """Costs of one micro-batch in a stage."""

    forward_s: float
    backward_s: float  # whole backward pass, weight gradients included
    # The part of ``backward_s`` that is weight gradients; default: half. Used where they are put off.
    weight_s: float | None = None
    activation_bytes: float = 0.0  # what the backward pass needs of the forward pass
    boundary_bytes: float = 0.0  # the stage's input: what stays where activations are recomputed


@dataclass(frozen=True)
class Stage(PassCost):
    """A stage: costs of a micro-batch, and properties that do not depend on micro-batches."""

    weight_bytes: float = 0.0  # weights, gradients and optimizer states: held all the time
    # Activations between forward and backward: kept; dropped but for the stage's input, and the forward pass run again;
    # or copied to the host and back.
    memory: Memory = "keep"
    # Costs of further classes of micro-batches (1, 2, ...); the stage's own are class 0.
    classes: tuple[PassCost, ...] = ()


@dataclass(frozen=True)
class StageTable:
    """Costs of all stages as arrays for the emulator."""

    # (5, stages, classes): seconds of forward, backward, weights, copy out and copy in, where the backward pass is
    # whole (weights 0) and where it is split.
    whole_s: Floats
    split_s: Floats
    # (5, stages, classes): bytes taken at the start and given back (negative) at the end, for a backward pass that is
    # whole; with a split one, what ``BACKWARD`` gives back ``WEIGHT`` does.
    at_start: Floats
    at_end: Floats
    resident: Floats  # (stages,): bytes held all the time
    offloaded: tuple[bool, ...]


def column(stage: Stage, host_bandwidth_bytes_per_s: float) -> Floats:
    """The part of one stage in a :class:`StageTable`: its four arrays, each (classes, 5)."""
    values = []
    for cost in (stage, *stage.classes):
        weight_s = WEIGHT_SHARE * cost.backward_s if cost.weight_s is None else cost.weight_s
        again = cost.forward_s if stage.memory == "recompute" else 0.0
        held = cost.activation_bytes
        # The first pass of a recomputed stage drops its activations at once.
        first = cost.boundary_bytes if stage.memory == "recompute" else held
        moved = held if stage.memory == "offload" else 0.0
        copy_s = moved / host_bandwidth_bytes_per_s
        whole = (cost.forward_s, cost.backward_s + again, 0.0, copy_s, copy_s)
        split = (cost.forward_s, cost.backward_s - weight_s + again, weight_s, copy_s, copy_s)
        values.append((whole, split, (first, held - first, 0.0, 0.0, moved), (0.0, -held, 0.0, -moved, 0.0)))
    return np.array(values, np.float64).swapaxes(0, 1)


def table(stages: Sequence[Stage], columns: Sequence[Floats]) -> StageTable:
    """Merge the columns of all stages."""
    whole, split, at_start, at_end = np.array(columns).transpose(1, 3, 0, 2)
    return StageTable(
        whole,
        split,
        at_start,
        at_end,
        np.array([stage.weight_bytes for stage in stages], np.float64),
        tuple(stage.memory == "offload" for stage in stages),
    )


def grid(horizon_s: float) -> float:
    """The step to which durations are rounded, so that sums up to a horizon are exact.

    It is a power of two, at most 2^-51 of the horizon; 0 for an empty horizon.

    Multiples of it are added and compared without rounding: a part of a schedule takes as long wherever
    it starts, and its result can be moved there from elsewhere without changing a bit.
    """
    return math.ldexp(1.0, math.frexp(horizon_s)[1] - 52) if horizon_s > 0 else 0.0


def on_grid(values: Floats, step: float) -> Floats:
    """The nearest multiples of a power of two."""
    return values if step == 0.0 else np.round(values / step) * step
