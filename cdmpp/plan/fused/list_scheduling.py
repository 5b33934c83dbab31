"""Compiled list scheduling from priorities, its improvement, baseline schedules, and lower bounds.

Compiled functions that call each other share this file: numba does not recompile a caller when a callee in another file
changes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cdmpp.plan.base.task_graph import jackson_bound_s
from cdmpp.plan.fused.problem import FusedProblem, GroupArrays, Model
from cdmpp.utils.jit import jit

#: Relative difference below which two makespans are equal: sums of the same terms in another order.
EQUAL = 1e-9
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@jit
def can_finish(groups: GroupArrays, firsts: np.ndarray, done: np.ndarray, free: np.ndarray, ended: np.ndarray) -> bool:
    """Whether all micro-batches in flight can still finish, one after the other (Dijkstra's banker's algorithm).

    A micro-batch that finds memory on all ranks ahead of it runs to its end and frees what it holds; then the next
    one is tried. Within a replica the earlier micro-batch goes first.

    ``firsts`` (replicas,): group of each replica's first stage that allocates memory. ``done`` (groups,): tasks that
    were scheduled. ``free`` (ranks,): free memory. ``free`` and ``ended`` (replicas,) are overwritten.
    """
    if free.min() >= groups.activation.max():
        return True  # a micro-batch holds at most one activation on a rank: any of them can finish
    for replica in range(len(firsts)):
        ended[replica] = done[groups.partner[firsts[replica]]]
    progress = True
    while progress:
        progress = False
        waiting = False
        for replica in range(len(firsts)):
            first = firsts[replica]
            while ended[replica] < done[first]:
                job = ended[replica]
                fits = True
                g = first
                while g >= 0 and groups.opens[g] and fits:
                    fits = done[g] > job or free[groups.rank[g]] >= groups.activation[g]
                    g = groups.after[g]
                if not fits:
                    waiting = True
                    break
                g = first
                while g >= 0 and groups.opens[g]:
                    if done[groups.partner[g]] <= job < done[g]:
                        free[groups.rank[g]] += groups.activation[g]
                    g = groups.after[g]
                ended[replica] += 1
                progress = True
        if not waiting:
            return True
    return False


@jit
def fits(in_turn: bool, opens: bool, in_flight: int, window: int, held: float, activation: float, limit: float) -> bool:
    """Whether a group's next task may run: it is its turn, and its group's window and its rank's memory have room.

    Takes numbers alone: passing arrays to an inner function costs numba reference counts, 15 times the whole loop.
    """
    return in_turn and (not opens or (in_flight < window and held + activation <= limit))


@jit
def list_schedule(
    groups: GroupArrays,
    window: np.ndarray,
    limit: np.ndarray,
    guarded: bool,
    priority: np.ndarray,
    patience: float,
    start: np.ndarray,
    peak: np.ndarray,
    stop: np.ndarray,
) -> float:
    """Schedule all tasks by priority: Giffler and Thompson's construction (1960).

    The rank whose next task can end first is served. It takes its task of least priority value among those that
    can start soon enough. ``patience`` (0 to 1) is the share of the time until that first end for which the rank
    may idle to wait for a more urgent task. With a negative ``patience`` every rank takes its tasks in priority
    order and waits for each as long as needed: only so are schedules reached in which a rank idles to keep memory
    free.

    ``groups``: ``TaskArrays.mirrored`` schedules backwards in time. ``window`` (groups,): most micro-batches in flight,
    for groups that allocate memory. ``limit`` (ranks,): memory. ``guarded``: never start a task that would leave
    micro-batches waiting for each other's memory (:func:`can_finish`): needed where the limits are tight, takes a few
    times as long. ``priority`` (tasks,): the least value is most urgent. ``start`` (tasks,) and ``peak`` (ranks,) are
    filled with seconds and peak memory. ``stop`` (1,): not 0, also while this runs: end without a schedule.

    Returns the makespan in seconds; -1 on a deadlock: unguarded, or with less memory than one activation; -2: stopped.
    """
    rank_groups, rank_start, rank, count, offset, duration, lag, before, after, opens, partner, activation, turn = (
        groups
    )
    ranks = len(rank_start) - 1
    now = np.zeros(ranks, np.int64)  # turn of each rank, and the tasks that it has left in each
    left = np.zeros((ranks, turn.max() + 2), np.int64)
    for g in range(len(rank)):
        left[rank[g], turn[g]] += count[g]
    left[:, -1] = 1
    done = np.zeros(len(rank), np.int64)
    rank_free_s = np.zeros(ranks)
    held = np.zeros(ranks)
    soonest_end_s = np.zeros(ranks)
    changed = np.ones(ranks, np.bool_)
    earliest_s = np.full(len(rank), np.inf)
    blocked = np.zeros(len(rank), np.bool_)
    firsts = np.flatnonzero(opens & (before < 0))
    ended = np.zeros(len(firsts), np.int64)
    peak[:] = 0.0
    makespan = 0.0
    remaining = count.sum()
    while remaining > 0:
        if stop[0] != 0:
            return -2.0
        chosen_rank = -1
        end_s = np.inf
        for r in range(ranks):
            if changed[r]:
                changed[r] = False
                soonest_end_s[r] = np.inf
                wanted = -1
                if patience < 0.0:
                    urgency = np.inf
                    for k in range(rank_start[r], rank_start[r + 1]):
                        g = rank_groups[k]
                        if done[g] < count[g] and turn[g] == now[r] and priority[offset[g] + done[g]] < urgency:
                            urgency = priority[offset[g] + done[g]]
                            wanted = g
                for k in range(rank_start[r], rank_start[r + 1]):
                    g = rank_groups[k]
                    i, p = done[g], before[g]
                    earliest_s[g] = np.inf
                    if i >= count[g] or blocked[g] or (wanted >= 0 and g != wanted) or (p >= 0 and done[p] <= i):
                        continue
                    if fits(
                        turn[g] == now[r], opens[g], i - done[partner[g]], window[g], held[r], activation[g], limit[r]
                    ):
                        ready_s = start[offset[p] + i] + duration[p] + lag[g] if p >= 0 else 0.0
                        earliest_s[g] = max(rank_free_s[r], ready_s)
                        soonest_end_s[r] = min(soonest_end_s[r], earliest_s[g] + duration[g])
            if soonest_end_s[r] < end_s:
                end_s = soonest_end_s[r]
                chosen_rank = r
        chosen = -1
        urgency = np.inf
        if chosen_rank >= 0:
            first_s = np.inf
            for k in range(rank_start[chosen_rank], rank_start[chosen_rank + 1]):
                first_s = min(first_s, earliest_s[rank_groups[k]])
            latest_s = first_s + max(patience, 0.0) * (end_s - first_s)
            for k in range(rank_start[chosen_rank], rank_start[chosen_rank + 1]):
                g = rank_groups[k]
                if earliest_s[g] <= latest_s and priority[offset[g] + done[g]] < urgency:
                    urgency = priority[offset[g] + done[g]]
                    chosen = g
        elif patience < 0.0:
            # The ranks wait for each other: the most urgent task that can start goes out of turn.
            for g in range(len(rank)):
                i, p, r = done[g], before[g], rank[g]
                if i >= count[g] or blocked[g] or priority[offset[g] + i] >= urgency or (p >= 0 and done[p] <= i):
                    continue
                if fits(turn[g] == now[r], opens[g], i - done[partner[g]], window[g], held[r], activation[g], limit[r]):
                    urgency = priority[offset[g] + i]
                    chosen = g
                    ready_s = start[offset[p] + i] + duration[p] + lag[g] if p >= 0 else 0.0
                    earliest_s[g] = max(rank_free_s[r], ready_s)
        if chosen < 0:
            return -1.0
        g = chosen
        r = rank[g]
        if guarded and opens[g]:
            done[g] += 1
            held[r] += activation[g]
            safe = can_finish(groups, firsts, done, limit - held, ended)
            done[g] -= 1
            held[r] -= activation[g]
            if not safe:
                blocked[g] = True
                changed[r] = True
                continue
        if guarded:
            for k in range(len(rank)):
                if blocked[k]:
                    blocked[k] = False
                    changed[rank[k]] = True
        remaining -= 1
        left[r, turn[g]] -= 1
        while left[r, now[r]] == 0:
            now[r] += 1
        start[offset[g] + done[g]] = earliest_s[g]
        done[g] += 1
        rank_free_s[r] = earliest_s[g] + duration[g]
        makespan = max(makespan, rank_free_s[r])
        if opens[g]:
            held[r] += activation[g]
            peak[r] = max(peak[r], held[r])
        else:
            held[r] -= activation[g]
        changed[r] = True
        if after[g] >= 0:
            changed[rank[after[g]]] = True
    return makespan


@jit
def improve(
    groups: GroupArrays,
    mirrored: GroupArrays,
    group: np.ndarray,
    mirror: np.ndarray,
    windows: np.ndarray,
    limits: np.ndarray,
    guarded: bool,
    priorities: np.ndarray,
    patiences: np.ndarray,
    rounds: int,
    starts: np.ndarray,
    figures: np.ndarray,
    stop: np.ndarray,
) -> None:
    """Schedule each row of priorities and improve it: forward-backward improvement (Li and Willis 1992).

    A schedule's ends are priorities for the problem with time reversed; its starts are priorities for the plain
    one. The best schedule of all rounds is kept: the least makespan, then the least peak.

    ``mirrored``: the groups with time reversed. ``group``, ``mirror``: of :class:`cdmpp.plan.fused.problem.TaskArrays`.
    Other arguments are those of :func:`list_schedule`, with one row per schedule. ``rounds``: most schedules for each
    row. ``starts`` (rows, tasks) is filled with start times, ``figures`` (rows, 3) with the makespan in seconds (-1: no
    schedule; -2: stopped before there was one), the largest peak of the ranks, and the sum of the peaks.
    """
    tasks = len(group)
    start = np.empty(tasks)
    mirrored_start = np.empty(tasks)
    priority = np.empty(tasks)
    peak = np.empty(len(groups.rank_start) - 1)
    for row in range(len(priorities)):
        window, limit, patience = windows[row], limits[row], patiences[row]
        figures[row, 0] = -1.0
        priority[:] = priorities[row]
        best_makespan = np.inf
        for turn in range(rounds):
            backwards = turn % 2 == 1
            direction = mirrored if backwards else groups
            target = mirrored_start if backwards else start
            makespan = list_schedule(direction, window, limit, guarded, priority, patience, target, peak, stop)
            if backwards:
                for t in range(tasks):
                    start[t] = makespan - (mirrored_start[mirror[t]] + groups.duration[group[t]])
            if makespan < 0.0:
                figures[row, 0] = max(figures[row, 0], makespan) if turn > 0 else makespan
                break
            largest, total = peak.max(), peak.sum()
            kept = figures[row, 0]
            equal = makespan <= kept * (1 + 1e-12)
            leaner = largest < figures[row, 1] or (largest == figures[row, 1] and total < figures[row, 2])
            if kept < 0.0 or makespan < kept * (1 - 1e-12) or (equal and leaner):
                figures[row, 0] = makespan
                figures[row, 1] = largest
                figures[row, 2] = total
                starts[row, :] = start
            if turn >= 2 and makespan >= best_makespan:
                break
            best_makespan = min(best_makespan, makespan)
            if backwards:
                priority[:] = start
            else:
                for t in range(tasks):
                    priority[mirror[t]] = -(start[t] + groups.duration[group[t]])


@dataclass(frozen=True)
class FusedSchedule:
    """Start times of all tasks, with makespan and memory."""

    start_s: Floats  # (tasks,)
    makespan_s: float
    # Largest peak memory of the ranks, in the unit of ``Model.activation``, and the sum of the peaks.
    peak: float
    peaks_sum: float

    @property
    def key(self) -> tuple[float, float, float]:
        """Sort key: the makespan, then memory."""
        return (self.makespan_s, self.peak, self.peaks_sum)


def schedule_from(problem: FusedProblem, start_s: Floats) -> FusedSchedule:
    """The schedule with these start times in seconds, shape (tasks,)."""
    tasks = problem.tasks
    peaks = [float(held.max()) for held in tasks.held(tasks.orders(start_s))]
    makespan = float((start_s + tasks.duration[tasks.group]).max())
    return FusedSchedule(start_s, makespan, max(peaks), sum(peaks))


def greedy(problem: FusedProblem, limit: float) -> FusedSchedule | None:
    """Greedy schedule: no rank idles while it can run a pass. None where the memory limit leads to a deadlock.

    Backward passes go first, then the earlier micro-batch, then the model of smaller index. ``limit``: memory of each
    rank; may be infinite.
    """
    tasks = problem.tasks
    largest_count = float(tasks.count.max()) + 1
    order = tasks.index * (float(tasks.replica.max()) + 1) + tasks.replica[tasks.group]
    forward_last = np.where(tasks.forward, largest_count * len(tasks.count), 0.0)[tasks.group]
    return _schedule_once(problem, forward_last + order, limit)


def serial_1f1b(problem: FusedProblem) -> tuple[Floats, float]:
    """Serial schedule: one model after the other, each by 1F1B, its replicas at the same time.

    Returns start times (tasks,) and makespan: the sum of (M + P - 1) (f + b) where no limit holds micro-batches back.
    """
    starts, begin_s = {}, 0.0
    for m in problem.sequence or range(len(problem.models)):
        model = problem.models[m]
        # The replicas share no rank: one schedule holds for all.
        single = FusedProblem(model.stages, (Model(**{**vars(model), "direction": "down"}),))
        tasks = single.tasks
        window = model.stages - tasks.stage
        if problem.max_activations is not None:
            in_flight = int(problem.max_activations * (1 + EQUAL) // model.activation)
            window = np.minimum(window, max(in_flight, 1))
        priority = np.where(tasks.forward, 1.0, 0.0)[tasks.group]
        schedule = _schedule_once(single, priority, np.inf, window)
        assert schedule is not None, "the windows of a single model cannot deadlock"
        starts[m] = np.tile(schedule.start_s + begin_s, problem.ranks // model.stages)
        begin_s += schedule.makespan_s
    return np.concatenate([starts[m] for m in sorted(starts)]), begin_s


def _schedule_once(
    problem: FusedProblem, priority: Floats, limit: float, window: Ints | None = None
) -> FusedSchedule | None:
    """One list schedule without improvement; None on a deadlock."""
    tasks = problem.tasks
    if window is None:
        window = np.full(len(tasks.count), np.iinfo(np.int64).max)
    start, peak = np.empty(tasks.size), np.empty(problem.ranks)
    limits, guarded = np.full(problem.ranks, limit), bool(np.isfinite(limit))
    makespan = list_schedule(tasks.arrays, window, limits, guarded, priority, 0.0, start, peak, np.zeros(1, np.int64))
    return None if makespan < 0 else FusedSchedule(start, makespan, float(peak.max()), float(peak.sum()))


def lower_bound_s(problem: FusedProblem) -> float:
    """Lower bound of the makespan of every schedule, in seconds.

    Each rank is relaxed to one machine with preemption. A task is released when its micro-batch and those before it
    can have reached the stage at the earliest; its tail is what its micro-batch and those after it still need
    afterwards. Jackson's rule (largest tail first) solves this relaxation exactly. The result is at least each of
    the usual bounds: a model's own (M + P - 1) (f + b) and its transfers, the work of a rank between the earliest
    first task and the shortest tail, and the total work over the ranks. With a memory limit, :func:`memory_bound_s`
    holds as well.

    A task's release assumes no order of passes. Micro-batch ``i`` (counted from 0) of a stage cannot start its
    forward pass before ``i`` others have run theirs there. Its backward pass cannot end on the last stage before
    ``i + 1`` micro-batches have run both passes there. Tails follow the same argument in reversed time.
    """
    tasks = problem.tasks
    head, tail = heads_and_tails(problem)
    duration = tasks.duration[tasks.group]
    work_s = jackson_bound_s(tasks.rank[tasks.group], problem.ranks, duration, head, tail)
    return max(work_s, memory_bound_s(problem))


def memory_bound_s(problem: FusedProblem) -> float:
    """Lower bound of the makespan from the memory limit, in seconds; 0 without a limit.

    A rank needs the total time for which it must hold its micro-batches, divided by how many it may hold.
    """
    if problem.max_activations is None:
        return 0.0
    limit = problem.max_activations
    sizes = {model.activation for model in problem.models}
    if len(sizes) == 1:
        size = sizes.pop()
        limit = size * max(np.floor(limit / size * (1 + 1e-9)), 1.0)
    tasks = problem.tasks
    bound = 0.0
    for r in range(problem.ranks):
        groups = np.flatnonzero((tasks.rank == r) & tasks.forward)
        # A micro-batch is held at least until it has been to the last stage and back.
        held_s = tasks.tail[groups] - tasks.tail[tasks.partner[groups]] + tasks.duration[groups]
        total = float((tasks.count[groups] * tasks.activation[groups] * held_s).sum())
        bound = max(bound, float(tasks.head[groups].min() + total / limit + tasks.tail[tasks.partner[groups]].min()))
    return bound


def heads_and_tails(problem: FusedProblem) -> tuple[np.ndarray, np.ndarray]:
    """Seconds that must pass before each task starts, and after it ends; both of shape (tasks,)."""
    tasks = problem.tasks
    head, tail = np.empty(tasks.size), np.empty(tasks.size)
    for g in range(len(tasks.count)):
        model = problem.models[tasks.model[g]]
        f, b, m, sent = model.forward_s, model.backward_s, model.micro_batches, model.transfer_s
        stage, last = int(tasks.stage[g]), model.stages - 1
        earlier = np.arange(m)
        later = m - 1 - earlier
        numbers = slice(tasks.offset[g], tasks.offset[g] + m)
        if tasks.forward[g]:
            head[numbers] = (stage + earlier) * f + stage * sent
            # At the last stage, both passes of this micro-batch and of the later ones follow.
            on_last = b + later * b + later * f if stage == last else (later + 1) * (f + b)
            tail[numbers] = on_last + max(last - 1 - stage, 0) * f + last * b + (2 * last - stage) * sent
        else:
            on_last = (earlier + 1) * f + earlier * b if stage == last else (earlier + 1) * (f + b)
            head[numbers] = last * f + on_last + max(last - 1 - stage, 0) * b + (2 * last - stage) * sent
            tail[numbers] = (stage + later) * b + stage * sent
    return head, tail
