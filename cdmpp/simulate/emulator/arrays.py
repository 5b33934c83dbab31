"""Durations, transfer times and memory of the tasks of a step, as arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cdmpp.simulate.emulator.evaluate import Floats
from cdmpp.simulate.emulator.stages import BACKWARD, WEIGHT, Table, grid, on_grid
from cdmpp.simulate.emulator.structure import Structure


def durations(
    structure: Structure, costs: Table, classes: Sequence[int], transfer_s: float | Sequence[float]
) -> tuple[Floats, Floats, float]:
    """Seconds of every task and of every transfer before it, rounded to a common :func:`grid`; and the grid."""
    rows = structure.tasks // (structure.stages * structure.micro_batches)
    whole = _by_class(costs.whole_s[:rows], classes)
    if structure.any_split:
        whole = np.where(structure.split, _by_class(costs.split_s[:rows], classes), whole)
    duration = whole.reshape(-1)
    if isinstance(transfer_s, int | float):
        lag = structure.crosses * float(transfer_s)
    else:
        cuts = np.array([*transfer_s, 0.0])  # -1, no cut, is the last
        lag = cuts[structure.cut]
    step = grid(float(duration.sum() + lag.sum()))
    return on_grid(duration, step), on_grid(lag, step), step


def holdings(structure: Structure, costs: Table, classes: Sequence[int]) -> tuple[Floats, Floats]:
    """Bytes that every task allocates at its start and frees at its end."""
    rows = structure.tasks // (structure.stages * structure.micro_batches)
    at_start = _by_class(costs.at_start[:rows], classes)
    at_end = _by_class(costs.at_end[:rows], classes)
    if structure.any_split:
        at_end[WEIGHT] = np.where(structure.split, at_end[BACKWARD], 0.0)
        at_end[BACKWARD] = np.where(structure.split, 0.0, at_end[BACKWARD])
    return at_start.reshape(-1), at_end.reshape(-1)


def _by_class(values: Floats, classes: Sequence[int]) -> Floats:
    """Shape (kinds, stages, classes) to (kinds, stages, micro_batches)."""
    if values.shape[2] == 1:
        return np.repeat(values, len(classes), axis=2)
    return values[:, :, np.asarray(classes)]


def peaks_over_time(
    structure: Structure, start: Floats, end: Floats, at_start: Floats, at_end: Floats, resident: Floats, peak: Floats
) -> None:
    """As :func:`cdmpp.simulate.emulator.evaluate.peaks`, where copies to the host free memory, too."""
    for rank in range(structure.ranks):
        both = np.concatenate(
            [structure.order[structure.begin[r] : structure.begin[r + 1]] for r in (rank, rank + structure.ranks)]
        )
        when = np.concatenate((start[both], end[both]))
        change = np.concatenate((at_start[both], at_end[both]))
        # Memory of ending tasks is free for tasks that start at the same time.
        held = resident[rank] + np.cumsum(change[np.lexsort((change, when))])
        peak[rank] = max(resident[rank], held.max(initial=0.0))
