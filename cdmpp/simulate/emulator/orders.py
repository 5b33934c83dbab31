"""Orders of published pipeline schedules: the passes of each rank.

A pass is (kind, stage, micro-batch). Stage s lives on rank s modulo ranks: with as many stages as ranks, one
each; with more, each rank has every ranks-th one ("virtual stages").
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from cdmpp.errors import FieldError

PassKind = Literal["F", "B", "W"]
ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]


class Pass(NamedTuple):
    """One pass of one micro-batch through one stage."""

    # Forward; backward (with a W of the same micro-batch: for the inputs alone); backward for the weights.
    kind: PassKind
    stage: int
    micro_batch: int


Orders = list[list[Pass]]


def gpipe(ranks: int, stages: int, micro_batches: int) -> Orders:
    """All forward passes, then all backward ones.

    GPipe (NeurIPS '19), section 2.3; with virtual stages breadth first, as Lamy-Poirier, "Breadth-First
    Pipeline Parallelism" (MLSys '23).
    """
    return [
        [Pass("F", stage, m) for stage in range(rank, stages, ranks) for m in range(micro_batches)]
        + [Pass("B", stage, m) for stage in reversed(range(rank, stages, ranks)) for m in range(micro_batches)]
        for rank in range(ranks)
    ]


def one_f_one_b(ranks: int, stages: int, micro_batches: int) -> Orders:
    """As many forward passes as it takes until the first gradient is back, then one backward, one forward.

    PipeDream-Flush (Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", ICML '21).
    """
    return _one_stage_each(ranks, stages, micro_batches, "1f1b")


def interleaved(ranks: int, stages: int, micro_batches: int) -> Orders:
    """1F1B over virtual stages, a group of micro-batches at a time.

    Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM"
    (SC '21), section 2.2. Groups have ``ranks`` micro-batches, or somewhat more where these do not divide
    their number, as in PyTorch.

    Raises FieldError: the micro-batches do not fall into equal groups.
    """
    local = stages // ranks
    rounds = max(1, micro_batches // ranks)
    if micro_batches % rounds:
        raise FieldError.at(
            "micro_batches",
            f"{micro_batches} do not fall into {rounds} equal groups, as interleaving over {ranks} ranks needs",
            hint=f"take a multiple of the number of ranks, such as {(rounds + 1) * ranks}",
        )
    group = micro_batches // rounds
    total = local * micro_batches

    def which(step: int, backward: bool) -> tuple[int, int]:
        """Virtual stage and micro-batch of the step-th pass in one direction."""
        at = step // group % local
        return (local - 1 - at if backward else at), step // (group * local) * group + step % group

    order = []
    for rank in range(ranks):
        forward, backward = (
            [Pass(k, virtual * ranks + rank, m) for virtual, m in (which(step, k == "B") for step in range(total))]
            for k in ("F", "B")
        )
        ahead = min(total, (local - 1) * group + 2 * (ranks - 1 - rank))
        passes = forward[:ahead]
        for f, b in zip(forward[ahead:], backward, strict=False):
            passes += [f, b]
        order.append(passes + backward[total - ahead :])
    return order


def zero_bubble(ranks: int, stages: int, micro_batches: int) -> Orders:
    """ZB-H1: 1F1B with delayed weight gradients, which fill the end of the step.

    With passes of f (forward), b (gradients of the inputs alone) and w (gradients of the weights) the bubble is
    (P - 1)(f + b - w) where w is at most f and at most b, and longer otherwise.

    Qi et al., "Zero Bubble Pipeline Parallelism" (ICLR '24), section 2.3: rank r lags r weight passes behind,
    and so every rank holds the activations of at most ``ranks`` micro-batches, as rank 0 does under 1F1B.
    """
    return _one_stage_each(ranks, stages, micro_batches, "zero_bubble", delayed=True)


#: Makers of orders: (ranks, stages, micro-batches) -> passes of each rank.
SCHEDULES: dict[ScheduleName, Callable[[int, int, int], Orders]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zero_bubble": zero_bubble,
}


def _one_stage_each(ranks: int, stages: int, micro_batches: int, name: str, delayed: bool = False) -> Orders:
    """1F1B; ``delayed``: rank r runs weight gradients r micro-batches behind, and the others at the end."""
    if stages != ranks:
        raise FieldError.at(
            "schedule",
            f"{name} has one stage on each rank; there are {stages} stages and {ranks} ranks",
            hint='"interleaved" and "gpipe" take several stages per rank',
        )
    order = []
    for rank in range(ranks):
        ahead = min(micro_batches, ranks - rank)
        passes = [Pass("F", rank, m) for m in range(ahead)]
        for m in range(micro_batches):
            passes.append(Pass("B", rank, m))
            if delayed and m >= rank:
                passes.append(Pass("W", rank, m - rank))
            if ahead + m < micro_batches:
                passes.append(Pass("F", rank, ahead + m))
        late = range(max(micro_batches - rank, 0), micro_batches) if delayed else ()
        order.append(passes + [Pass("W", rank, m) for m in late])
    return order
