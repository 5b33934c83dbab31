"""Lower bound of the makespan of a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cdmpp.simulate.emulator.arrays import durations
from cdmpp.simulate.emulator.stages import OUT, Table
from cdmpp.simulate.emulator.structure import Structure


def lower_bound(
    structure: Structure, costs: Table, classes: Sequence[int], transfer_s: float | Sequence[float]
) -> float:
    """Lower bound of all orders of the same passes on the same ranks.

    Each rank has to wait for its first micro-batch, do all its passes, and then the last gradient still
    goes down to stage 0; a micro-batch has to go up and down once.

    Notes
    -----
    Where the weight gradients are passes of their own, a rank may end with them, and nothing need follow:
    then the passes without them are counted, with what follows, and all passes, without.
    """
    duration, lag, _ = durations(structure, costs, classes, transfer_s)
    stages, count, ranks = structure.stages, structure.micro_batches, structure.ranks
    time = duration[: OUT * stages * count].reshape(OUT, stages, count)
    size = stages * count
    up, down = lag[:size, 0].reshape(stages, count), lag[size : 2 * size, 1].reshape(stages, count)
    forward, backward, weight = time
    # Before a stage's first forward pass, and after its last backward one.
    head = np.zeros((stages, count))
    head[1:] = np.cumsum(forward[:-1] + up[1:], axis=0)
    tail = np.zeros((stages, count))
    tail[1:] = np.cumsum(backward[:-1] + down[:-1], axis=0)
    bound_s = float((head[-1] + forward[-1] + backward[-1] + tail[-1]).max())
    for rank in range(ranks):
        stages_here = np.flatnonzero(structure.rank_of == rank)
        if len(stages_here):
            before, after = float(head[stages_here].min()), float(tail[stages_here].min())
            passes = float((forward + backward)[stages_here].sum())
            bound_s = max(bound_s, before + passes + after, before + passes + float(weight[stages_here].sum()))
    return bound_s
