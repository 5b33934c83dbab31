"""One schedule from priorities: compiled list scheduling, and its improvement to and fro in time."""

from __future__ import annotations

import numpy as np

from cdmpp.compose.jit import jit


@jit
def completes(
    rank: np.ndarray,
    after: np.ndarray,
    opens: np.ndarray,
    partner: np.ndarray,
    activation: np.ndarray,
    firsts: np.ndarray,
    done: np.ndarray,
    room: np.ndarray,
    finished: np.ndarray,
) -> bool:
    """Whether all micro-batches in flight can still come to their ends, one after the other.

    Dijkstra's banker: one that finds room on all ranks still before it runs to its end and gives back what it
    holds; then the next one. Within a copy the earlier micro-batch goes first.

    Parameters
    ----------
    firsts : ndarray of int64, shape (lanes,)
        Group of each copy's first stage that opens.
    done : ndarray of int64, shape (groups,)
        Tasks of each group that ran.
    room : ndarray of float64, shape (ranks,)
        Memory that is free; overwritten.
    finished : ndarray of int64, shape (lanes,)
        Overwritten.
    """
    if room.min() >= activation.max():
        return True  # a micro-batch holds at most once on a rank: any can run to its end
    for lane in range(len(firsts)):
        finished[lane] = done[partner[firsts[lane]]]
    going = True
    while going:
        going = False
        left = False
        for lane in range(len(firsts)):
            first = firsts[lane]
            while finished[lane] < done[first]:
                job = finished[lane]
                fits = True
                g = first
                while g >= 0 and opens[g] and fits:
                    fits = done[g] > job or room[rank[g]] >= activation[g]
                    g = after[g]
                if not fits:
                    left = True
                    break
                g = first
                while g >= 0 and opens[g]:
                    if done[partner[g]] <= job < done[g]:
                        room[rank[g]] += activation[g]
                    g = after[g]
                finished[lane] += 1
                going = True
        if not left:
            return True
    return False


@jit
def construct(
    rank_groups: np.ndarray,
    rank_start: np.ndarray,
    rank: np.ndarray,
    duration: np.ndarray,
    count: np.ndarray,
    offset: np.ndarray,
    before: np.ndarray,
    after: np.ndarray,
    opens: np.ndarray,
    partner: np.ndarray,
    activation: np.ndarray,
    window: np.ndarray,
    limit: np.ndarray,
    guarded: bool,
    priority: np.ndarray,
    patience: float,
    start: np.ndarray,
    peak: np.ndarray,
) -> float:
    """Schedule all tasks; of those that a rank can start soonest, the one of the least priority value first.

    Giffler and Thompson's construction: the rank whose next task can end first decides; ``patience`` (0 to 1)
    is the share of the time until that end for which it may wait for a more urgent task. With a negative
    ``patience`` every rank takes its tasks by priority and waits for them as long as it takes: only so are
    schedules reached in which a rank idles to keep memory free.

    Parameters
    ----------
    rank_groups ... activation
        As in :class:`cdmpp.planning.fused.problem.Tasks`. With ``before`` and ``after`` exchanged and
        ``opens`` inverted, time runs backwards.
    opens : ndarray of bool, shape (groups,)
        Which pass takes the memory; the partner gives it back.
    window : ndarray of int64, shape (groups,)
        Most micro-batches in flight, for groups that open.
    limit : ndarray of float64, shape (ranks,)
        Most memory of a rank.
    guarded : bool
        No pass starts that would leave micro-batches waiting for each other's memory (:func:`completes`).
        Needed where the limits are tight; takes a few times as long.
    priority : ndarray of float64, shape (tasks,)
    start, peak : ndarray of float64
        Filled: start of each task, most memory of each rank.

    Returns
    -------
    float
        The makespan; -1 where no task can start: unguarded, or with less memory than an activation.
    """
    ranks = len(rank_start) - 1
    groups = len(rank)
    done = np.zeros(groups, np.int64)
    free = np.zeros(ranks)
    held = np.zeros(ranks)
    soonest = np.zeros(ranks)
    changed = np.ones(ranks, np.bool_)
    earliest = np.full(groups, np.inf)
    blocked = np.zeros(groups, np.bool_)
    firsts = np.flatnonzero(opens & (before < 0))
    finished = np.zeros(len(firsts), np.int64)
    peak[:] = 0.0
    makespan = 0.0
    left = 0
    for g in range(groups):
        left += count[g]
    while left > 0:
        chosen_rank = -1
        end = np.inf
        for r in range(ranks):
            if changed[r]:
                changed[r] = False
                soonest[r] = np.inf
                wanted = -1
                if patience < 0.0:
                    urgency = np.inf
                    for k in range(rank_start[r], rank_start[r + 1]):
                        g = rank_groups[k]
                        if done[g] < count[g] and priority[offset[g] + done[g]] < urgency:
                            urgency = priority[offset[g] + done[g]]
                            wanted = g
                for k in range(rank_start[r], rank_start[r + 1]):
                    g = rank_groups[k]
                    i = done[g]
                    earliest[g] = np.inf
                    if i >= count[g] or blocked[g] or (wanted >= 0 and g != wanted):
                        continue
                    if opens[g] and (i - done[partner[g]] >= window[g] or held[r] + activation[g] > limit[r]):
                        continue
                    at = free[r]
                    p = before[g]
                    if p >= 0:
                        if done[p] <= i:
                            continue
                        ready = start[offset[p] + i] + duration[p]
                        if ready > at:
                            at = ready
                    earliest[g] = at
                    if at + duration[g] < soonest[r]:
                        soonest[r] = at + duration[g]
            if soonest[r] < end:
                end = soonest[r]
                chosen_rank = r
        chosen = -1
        urgency = np.inf
        if chosen_rank >= 0:
            r = chosen_rank
            first = np.inf
            for k in range(rank_start[r], rank_start[r + 1]):
                if earliest[rank_groups[k]] < first:
                    first = earliest[rank_groups[k]]
            latest = first + max(patience, 0.0) * (end - first)
            for k in range(rank_start[r], rank_start[r + 1]):
                g = rank_groups[k]
                if earliest[g] <= latest and priority[offset[g] + done[g]] < urgency:
                    urgency = priority[offset[g] + done[g]]
                    chosen = g
        elif patience < 0.0:
            # What the ranks wait for waits for them: the most urgent of what can run goes out of turn.
            for g in range(groups):
                i = done[g]
                if i >= count[g] or blocked[g] or priority[offset[g] + i] >= urgency:
                    continue
                r = rank[g]
                if opens[g] and (i - done[partner[g]] >= window[g] or held[r] + activation[g] > limit[r]):
                    continue
                p = before[g]
                if p >= 0 and done[p] <= i:
                    continue
                urgency = priority[offset[g] + i]
                chosen = g
                earliest[g] = free[r] if p < 0 else max(free[r], start[offset[p] + i] + duration[p])
        if chosen < 0:
            return -1.0
        g = chosen
        r = rank[g]
        if guarded and opens[g]:
            done[g] += 1
            held[r] += activation[g]
            safe = completes(rank, after, opens, partner, activation, firsts, done, limit - held, finished)
            done[g] -= 1
            held[r] -= activation[g]
            if not safe:
                blocked[g] = True
                changed[r] = True
                continue
        if guarded:
            for k in range(groups):
                if blocked[k]:
                    blocked[k] = False
                    changed[rank[k]] = True
        left -= 1
        start[offset[g] + done[g]] = earliest[g]
        done[g] += 1
        free[r] = earliest[g] + duration[g]
        if free[r] > makespan:
            makespan = free[r]
        if opens[g]:
            held[r] += activation[g]
            if held[r] > peak[r]:
                peak[r] = held[r]
        else:
            held[r] -= activation[g]
        changed[r] = True
        if after[g] >= 0:
            changed[rank[after[g]]] = True
    return makespan


@jit
def improve(
    rank_groups: np.ndarray,
    rank_start: np.ndarray,
    rank: np.ndarray,
    duration: np.ndarray,
    count: np.ndarray,
    offset: np.ndarray,
    before: np.ndarray,
    after: np.ndarray,
    opens: np.ndarray,
    closes: np.ndarray,
    partner: np.ndarray,
    activation: np.ndarray,
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
) -> None:
    """From each row of priorities a schedule, and from it better ones, by turns backwards and forwards.

    A schedule's ends, read backwards, are priorities for the mirrored problem; its starts are priorities for
    the plain one (forward-backward improvement, Li and Willis 1992). Of all schedules on the way the best is
    kept: the least makespan, then the least peak.

    Parameters
    ----------
    windows, limits, guarded, priorities, patiences
        As for :func:`construct`; one row a schedule.
    rounds : int
        Most turns.
    starts : ndarray of float64, shape (rows, tasks)
        Filled: start times.
    figures : ndarray of float64, shape (rows, 3)
        Filled: makespan (-1: none found), largest peak of the ranks, sum of the peaks.
    """
    ranks = len(rank_start) - 1
    tasks = len(group)
    start = np.empty(tasks)
    turned = np.empty(tasks)
    priority = np.empty(tasks)
    peak = np.empty(ranks)
    for row in range(len(priorities)):
        figures[row, 0] = -1.0
        priority[:] = priorities[row]
        last = np.inf
        for turn in range(rounds):
            backwards = turn % 2 == 1
            if backwards:
                makespan = construct(
                    rank_groups,
                    rank_start,
                    rank,
                    duration,
                    count,
                    offset,
                    after,
                    before,
                    closes,
                    partner,
                    activation,
                    windows[row],
                    limits[row],
                    guarded,
                    priority,
                    patiences[row],
                    turned,
                    peak,
                )
                for t in range(tasks):
                    start[t] = makespan - (turned[mirror[t]] + duration[group[t]])
            else:
                makespan = construct(
                    rank_groups,
                    rank_start,
                    rank,
                    duration,
                    count,
                    offset,
                    before,
                    after,
                    opens,
                    partner,
                    activation,
                    windows[row],
                    limits[row],
                    guarded,
                    priority,
                    patiences[row],
                    start,
                    peak,
                )
            if makespan < 0.0:
                break
            most = peak.max()
            whole = peak.sum()
            old = figures[row, 0]
            if (
                old < 0.0
                or makespan < old * (1 - 1e-12)
                or (
                    makespan <= old * (1 + 1e-12)
                    and (most < figures[row, 1] or (most == figures[row, 1] and whole < figures[row, 2]))
                )
            ):
                figures[row, 0] = makespan
                figures[row, 1] = most
                figures[row, 2] = whole
                starts[row, :] = start
            if turn >= 2 and makespan >= last:
                break
            if makespan < last:
                last = makespan
            if backwards:
                priority[:] = start
            else:
                for t in range(tasks):
                    priority[mirror[t]] = -(start[t] + duration[group[t]])
