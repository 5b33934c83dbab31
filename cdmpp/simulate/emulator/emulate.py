"""Emulation of a pipeline-parallel training step: makespan, its lower bound, memory, and times of each pass."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np

from cdmpp.errors import FieldError
from cdmpp.simulate.emulator.evaluate import Frames, evaluate, peaks
from cdmpp.simulate.emulator.orders import SCHEDULES, Orders, ScheduleName
from cdmpp.simulate.emulator.stages import (
    BACKWARD,
    OUT,
    WEIGHT,
    Floats,
    Ints,
    Stage,
    StageTable,
    column,
    grid,
    on_grid,
    table,
)
from cdmpp.simulate.emulator.structure import Structure, build, deadlock

_NOTHING = object()


@dataclass
class Reuse:
    """Cache of results by key. It is emptied when it is full."""

    # Most results, and the most memory of results that have ``nbytes``.
    most: int = 4096
    most_bytes: int = 1 << 28
    hits: int = 0
    misses: int = 0
    _held: dict[Hashable, Any] = field(default_factory=dict, repr=False)
    _bytes: int = 0

    def find(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The result of a key; computed where it is not cached."""
        cached = self._held.get(key, _NOTHING)
        if cached is not _NOTHING:
            self.hits += 1
            return cached
        self.misses += 1
        made = make()
        size = getattr(made, "nbytes", 0)
        if len(self._held) >= self.most or self._bytes + size > self.most_bytes:
            self._held.clear()
            self._bytes = 0
        self._held[key] = made
        self._bytes += size
        return made


def anew(key: Hashable, make: Callable[[], Any]) -> Any:
    """As :meth:`Reuse.find`, without a cache."""
    return make()


def durations(
    structure: Structure, costs: StageTable, classes: Sequence[int], transfer_s: float | Sequence[float]
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
        lag = np.array([*transfer_s, 0.0])[structure.cut]  # -1, no cut, is the last
    step = grid(float(duration.sum() + lag.sum()))
    return on_grid(duration, step), on_grid(lag, step), step


def holdings(structure: Structure, costs: StageTable, classes: Sequence[int]) -> tuple[Floats, Floats]:
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


@dataclass(frozen=True)
class EmulatedStep:
    """A simulated training step."""

    structure: Structure
    # (tasks,): by task number; -1 for tasks that the step does not have.
    start_s: Floats
    end_s: Floats
    peak_bytes: Floats  # (ranks,): peak memory of each rank

    @property
    def nbytes(self) -> int:
        """Memory of its own arrays."""
        return self.start_s.nbytes + self.end_s.nbytes + self.peak_bytes.nbytes

    @cached_property
    def makespan_s(self) -> float:
        """Seconds from the first forward pass to the end of the last backward pass."""
        size = self.structure.stages * self.structure.micro_batches
        return float(self.end_s[: OUT * size].max())

    @cached_property
    def busy_s(self) -> Floats:
        """Seconds that each rank computes, shape (ranks,)."""
        rows = [self.row(rank) for rank in range(self.structure.ranks)]
        return np.array([float((self.end_s[row] - self.start_s[row]).sum()) for row in rows])

    @property
    def bubble(self) -> float:
        """Share of the time of all ranks in which they wait."""
        whole = self.makespan_s * self.structure.ranks
        return 1.0 - float(self.busy_s.sum()) / whole if whole > 0 else 0.0

    def row(self, rank: int) -> Ints:
        """The tasks of a rank in their order; from ``structure.ranks`` on, those of its host link."""
        return self.structure.order[self.structure.begin[rank] : self.structure.begin[rank + 1]]


@dataclass
class Emulator:
    """Simulates steps and caches their parts. Without ``reuse`` nothing is cached; results are equal to the last bit.

    After SEMU, the step emulator of PipeWeaver: equal parts in space (stages) and in time (micro-batches,
    steps, candidates of a search) are simulated once. Not thread-safe.
    """

    reuse: bool = True
    # Caches of costs of equal stages, numbering of equal orders, and whole steps.
    stages: Reuse = field(default_factory=Reuse)
    structures: Reuse = field(default_factory=Reuse)
    steps: Reuse = field(default_factory=Reuse)
    # Cache of stretches that repeat, from micro-batch to micro-batch and from step to step.
    frames: Frames = field(default_factory=Frames)

    def simulate(
        self,
        stages: Sequence[Stage],
        micro_batches: int | Sequence[int],
        schedule: ScheduleName | Orders = "1f1b",
        *,
        ranks: int | None = None,
        transfer_s: float | Sequence[float] = 0.0,
        host_bandwidth_bytes_per_s: float = float("inf"),
    ) -> EmulatedStep:
        """Simulate one step.

        ``stages``: in the order of the forward pass. ``micro_batches``: their number; or the class of each
        (:attr:`Stage.classes`). ``schedule``: a published schedule, or the passes of every rank in order. ``ranks``:
        default: one per stage; stage s is on rank s modulo ``ranks``, and explicit orders may place it elsewhere.
        ``transfer_s``: from one stage to the next (and of the gradient back) where they are on different ranks, one or
        (stages - 1,); a transfer delays only the pass that waits for it. ``host_bandwidth_bytes_per_s``: each rank's
        link to the host, for stages whose activations are offloaded.
        Raises FieldError: the schedule does not fit the stages, or its orders wait for each other.

        >>> Emulator().simulate([Stage(1.0, 2.0)] * 4, 8, "1f1b").makespan_s
        33.0
        """
        classes = (0,) * micro_batches if isinstance(micro_batches, int) else tuple(micro_batches)
        if not stages or not classes:
            raise FieldError("a step has at least one stage and one micro-batch")
        ranks = ranks or len(stages)

        def make() -> EmulatedStep:
            costs = self.table(stages, host_bandwidth_bytes_per_s)
            structure = self.structure(schedule, ranks, len(stages), len(classes), costs.offloaded)
            return self.run(structure, costs, classes, transfer_s)

        if not self.reuse:
            return make()
        orders = schedule if isinstance(schedule, str) else tuple(map(tuple, schedule))
        transfers = transfer_s if isinstance(transfer_s, int | float) else tuple(transfer_s)
        key = (tuple(stages), classes, orders, ranks, transfers, host_bandwidth_bytes_per_s)
        step: EmulatedStep = self.steps.find(key, make)
        return step

    def table(self, stages: Sequence[Stage], host_bandwidth_bytes_per_s: float = float("inf")) -> StageTable:
        """Costs of the stages; those of equal stages are computed once."""
        find, bandwidth = self.stages.find if self.reuse else anew, host_bandwidth_bytes_per_s
        return table(stages, [find((stage, bandwidth), partial(column, stage, bandwidth)) for stage in stages])

    def structure(
        self,
        schedule: ScheduleName | Orders,
        ranks: int,
        stages: int,
        micro_batches: int,
        offloaded: Sequence[bool] = (),
    ) -> Structure:
        """The numbered passes of a schedule. Raises FieldError: the schedule does not fit the stages."""
        offloaded = tuple(offloaded) if any(offloaded) else ()
        if not isinstance(schedule, str):
            return build(schedule, stages, micro_batches, offloaded, "schedule.order")
        if stages % ranks:
            raise FieldError.at(
                "ranks",
                f"{stages} stages do not fall onto {ranks} ranks evenly",
                hint="give a number of ranks that divides the number of stages",
            )
        find = self.structures.find if self.reuse else anew
        reused: Structure = find(
            (schedule, ranks, stages, micro_batches, offloaded),
            lambda: build(SCHEDULES[schedule](ranks, stages, micro_batches), stages, micro_batches, offloaded),
        )
        return reused

    def run(
        self, structure: Structure, costs: StageTable, classes: Sequence[int], transfer_s: float | Sequence[float] = 0.0
    ) -> EmulatedStep:
        """Simulate a structure with given costs; whole steps are not cached here.

        Raises FieldError: the orders wait for each other.
        """
        duration, lag, step = durations(structure, costs, classes, transfer_s)
        at_start, at_end = holdings(structure, costs, classes)
        start, end = np.empty_like(duration), np.empty_like(duration)
        if self.reuse:
            ran = self.frames.run(structure, duration, lag, step, start, end)
        else:
            ran = evaluate(structure.order, structure.begin, duration, structure.deps, lag, start, end)
        if ran < len(structure.order):
            raise deadlock(structure, end, "schedule.order")
        resident, peak = np.zeros(structure.ranks), np.empty(structure.ranks)
        np.add.at(resident, structure.rank_of, costs.resident)
        if len(structure.begin) == structure.ranks + 1:
            peaks(structure.order, structure.begin, at_start, at_end, resident, peak)
        else:
            peaks_over_time(structure, start, end, at_start, at_end, resident, peak)
        return EmulatedStep(structure, start, end, peak)

    def lookups(self) -> tuple[int, int]:
        """Numbers of cache hits and of misses."""
        caches = (self.stages, self.structures, self.steps, self.frames)
        return int(sum(cache.hits for cache in caches)), int(sum(cache.misses for cache in caches))


def lower_bound(
    structure: Structure, costs: StageTable, classes: Sequence[int], transfer_s: float | Sequence[float]
) -> float:
    """Lower bound of all orders of the same passes on the same ranks.

    Each rank has to wait for its first micro-batch, do all its passes, and then the last gradient still
    goes down to stage 0; a micro-batch has to go up and down once.
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
