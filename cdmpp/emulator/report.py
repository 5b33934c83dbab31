"""The answer about one step: figures, baselines, and why it takes as long as it does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cdmpp.compose.pricing import Cost, Part
from cdmpp.emulator.bound import lower_bound
from cdmpp.emulator.emulate import Emulator, Step
from cdmpp.emulator.forms import Priced
from cdmpp.emulator.orders import SCHEDULES, Orders, ScheduleName
from cdmpp.emulator.stages import Stage
from cdmpp.errors import FieldError, InfeasibleError
from cdmpp.units import format_latency, format_si

SERIAL = "one_at_a_time"


def report(
    priced: Sequence[Priced],
    classes: Sequence[int],
    schedule: ScheduleName | Orders,
    ranks: int,
    transfer_s: float | Sequence[float],
    host_bandwidth_bytes_per_s: float,
    memory_bytes: float | None = None,
    *,
    replicas: Sequence[Sequence[int]] = (),
    gradient_sync_s: float = 0.0,
    reuse: bool = True,
    timeline: bool = True,
) -> dict[str, Any]:
    """Simulate a step and its baselines; JSON values, as in :class:`cdmpp.emulator.schema.SimulateAnswer`.

    Raises
    ------
    FieldError
        The schedule does not fit the stages, or its orders wait for each other.
    InfeasibleError
        A rank holds more than ``memory_bytes``.
    """
    emulator = Emulator(reuse)
    stages = [one.stage for one in priced]

    def simulate(stages: Sequence[Stage], schedule: ScheduleName | Orders, of: Sequence[int] = classes) -> Step:
        return emulator.simulate(
            stages,
            of,
            schedule,
            ranks=ranks,
            transfer_s=transfer_s,
            host_bandwidth_bytes_per_s=host_bandwidth_bytes_per_s,
        )

    step = simulate(stages, schedule)
    copies = [simulate(stages, schedule, of) for of in replicas]
    structure = step.structure
    costs = emulator.table(stages, host_bandwidth_bytes_per_s)
    same_passes_s = lower_bound(structure, costs, classes, transfer_s)
    # Weight gradients may be put off in any schedule.
    free = replace(structure, split=np.ones_like(structure.split))
    bound_s = lower_bound(free, costs, classes, transfer_s)
    others: dict[str, Step] = {}
    # An order of one's own may place stages as no published schedule does.
    if (structure.rank_of == np.arange(structure.stages) % ranks).all():
        for name in SCHEDULES:
            if name == "interleaved" and structure.stages == ranks:
                continue  # with one stage each it is 1F1B, holding more
            try:
                others[name] = simulate(stages, name)
            except FieldError:
                continue  # it is for another number of stages or micro-batches
    largest = max([step, *copies], key=lambda one: float(one.peak_bytes.max()))
    if memory_bytes is not None and largest.peak_bytes.max() > memory_bytes:
        recomputed = [replace(stage, memory="recompute") for stage in stages]
        if largest is not step:
            raise too_little(largest, memory_bytes, {"as it is": float(largest.peak_bytes.max())})
        least = {"as it is": float(step.peak_bytes.max())}
        least |= {f"with {name}": float(other.peak_bytes.max()) for name, other in others.items()}
        least["with all stages recomputed"] = float(simulate(recomputed, schedule).peak_bytes.max())
        raise too_little(step, memory_bytes, least)
    interval = None
    if any(one.forward.parts or one.backward.parts for one in priced):
        lower, upper = (simulate([getattr(one, which) for one in priced], schedule) for which in ("lower", "upper"))
        interval = {"lower_s": lower.makespan_s, "upper_s": upper.makespan_s}
    serial_s = sum(_alone(stages, c, transfer_s, structure.rank_of) for c in classes)
    own = schedule if isinstance(schedule, str) else "order"
    baselines = {name: other.makespan_s for name, other in others.items() if name != own}
    makespan_s, busy_s = step.makespan_s, step.busy_s
    slowest_s = max([makespan_s, *(one.makespan_s for one in copies)])
    explanation = explain(step, priced, same_passes_s, {name: others[name] for name in baselines})
    if slowest_s > makespan_s:
        late = [one.makespan_s for one in copies].index(slowest_s)
        explanation.append(
            f"the step waits for copy {late} of the replicas, {format_latency(slowest_s - makespan_s)} "
            "longer than for this pipeline"
        )
    hits, misses = emulator.hits, emulator.misses
    return {
        "schedule": own,
        "makespan_s": makespan_s,
        "replicas_s": [one.makespan_s for one in copies],
        "step_s": slowest_s + gradient_sync_s,
        "lower_bound_s": bound_s,
        "same_passes_bound_s": same_passes_s,
        "gap": makespan_s / bound_s - 1.0 if bound_s > 0 else 0.0,
        "interval": interval,
        "bubble": step.bubble,
        "peak_bytes": float(step.peak_bytes.max()),
        "ranks": [
            {
                "rank": rank,
                "stages": np.flatnonzero(structure.rank_of == rank).tolist(),
                "busy_s": float(busy_s[rank]),
                "bubble": 1.0 - float(busy_s[rank]) / makespan_s if makespan_s > 0 else 0.0,
                "peak_bytes": float(step.peak_bytes[rank]),
            }
            for rank in range(ranks)
        ],
        "baselines": baselines | {SERIAL: serial_s},
        "baseline_peak_bytes": {name: float(others[name].peak_bytes.max()) for name in baselines},
        "explanation": explanation,
        "timeline": passes(step, 0, ranks) if timeline else None,
        "copies": passes(step, ranks, len(structure.begin) - 1) if timeline else [],
        "cache": {"hits": hits, "misses": misses, "hit_rate": hits / (hits + misses) if hits else 0.0},
    }


def passes(step: Step, first: int, last: int) -> list[dict[str, Any]]:
    """The passes of some rows in their order; rows from the number of ranks on are host links."""
    structure = step.structure
    return [
        {
            "rank": row % structure.ranks,
            "stage": stage,
            "pass": kind,
            "micro_batch": micro_batch,
            "start_s": float(step.start_s[task]),
            "end_s": float(step.end_s[task]),
        }
        for row in range(first, last)
        for task in step.row(row).tolist()
        for kind, stage, micro_batch in (structure.name(task),)
    ]


def too_little(step: Step, memory_bytes: float, least: dict[str, float]) -> InfeasibleError:
    """What to say where a rank holds too much; ``least`` is the memory needed in several ways."""
    rank = int(step.peak_bytes.argmax())
    ways = sorted((needed, way) for way, needed in least.items() if way != "as it is")
    better = next(((needed, way) for needed, way in ways if needed < least["as it is"]), None)
    return InfeasibleError(
        f"memory_bytes: {memory_bytes:.12g}, but rank {rank} holds up to {least['as it is']:.12g} bytes: "
        f"the smallest limit for this schedule is {least['as it is']:.12g}",
        path="memory_bytes",
        hint=f"{better[1]} it would be {better[0]:.12g}" if better else "raise the limit",
    )


def _alone(stages: Sequence[Stage], c: int, transfer_s: float | Sequence[float], rank_of: Any) -> float:
    """Seconds of one micro-batch that has the ranks to itself."""
    total = 0.0
    for s, stage in enumerate(stages):
        cost = stage if c == 0 else stage.classes[c - 1]
        total += cost.forward_s * (2 if stage.memory == "recompute" else 1) + cost.backward_s
        if s and rank_of[s] != rank_of[s - 1]:
            total += 2 * (transfer_s if isinstance(transfer_s, int | float) else transfer_s[s - 1])
    return total


def explain(step: Step, priced: Sequence[Priced], same_passes_s: float, others: dict[str, Step]) -> list[str]:
    """Which rank decides, where it waits, which stage and program is long, and what else there is."""
    structure, whole = step.structure, step.makespan_s
    if whole <= 0:
        return ["nothing takes any time"]
    said = [
        f"{100 * step.bubble:.1f} % of the ranks' time is waiting; the step takes {format_latency(whole)}, "
        f"and no order of the same passes less than {format_latency(same_passes_s)}"
    ]
    busiest = int(step.busy_s.argmax())
    row = step.row(busiest)
    start, end = step.start_s[row], step.end_s[row]
    first_s, last_s = float(start[0]), whole - float(end[-1])
    between_s = whole - float(step.busy_s[busiest]) - first_s - last_s
    waits = [format_latency(max(wait_s, 0.0)) for wait_s in (first_s, between_s, last_s)]
    said.append(
        f"rank {busiest} has most to do: {100 * float(step.busy_s[busiest]) / whole:.1f} % of the step; it "
        f"waits {waits[0]} for its first pass, {waits[1]} between passes and {waits[2]} after the last"
    )
    by_stage = [one.forward.latency_s + one.backward.latency_s for one in priced]
    mean = sum(by_stage) / len(by_stage)
    slowest = max(range(len(priced)), key=by_stage.__getitem__)
    if by_stage[slowest] > 1.0001 * mean:
        shortest = min(range(len(priced)), key=by_stage.__getitem__)
        said.append(
            f"stage {slowest} is long: {format_latency(by_stage[slowest])} for a micro-batch there and back, "
            f"{by_stage[slowest] / mean:.2f} times the mean of the stages{programs(priced[slowest])}"
            f"{beyond(priced[slowest], priced[shortest], shortest)}"
        )
    else:
        said.append(
            f"the stages are equally long: {format_latency(mean)} for a micro-batch there and back"
            f"{programs(priced[slowest])}"
        )
    if structure.any_split and any(one.stage.weight_s is None for one in priced):
        said.append("weight gradients are taken for half of the backward pass where none are given")
    shorter = {name: other for name, other in others.items() if other.makespan_s < whole}
    if shorter:
        name = min(shorter, key=lambda name: shorter[name].makespan_s)
        needed, now = (format_si(float(one.peak_bytes.max()), "B") for one in (shorter[name], step))
        said.append(
            f"{name} would take {100 * (1 - shorter[name].makespan_s / whole):.1f} % less, with "
            + ("as much memory" if needed == now else f"up to {needed} on a rank instead of {now}")
        )
    return said


def parts(one: Priced) -> dict[str, Part]:
    """The programs of a stage, forward and backward, by name; empty where its costs are given."""
    merged: dict[str, Part] = {}
    for part in (*one.forward.parts, *one.backward.parts):
        known = merged.get(part.name, Part(part.name, 0, 0.0))
        merged[part.name] = Part(part.name, known.count + part.count, known.latency_s + part.latency_s)
    return merged


def programs(one: Priced) -> str:
    """The programs that a stage's time goes to, in words."""
    mine = tuple(parts(one).values())
    return ": " + Cost(0.0, 0.0, 0.0, mine).largest(3) if mine else ""


def beyond(slow: Priced, quick: Priced, number: int) -> str:
    """What a stage has that the quickest one has not, in words."""
    mine, other = parts(slow), parts(quick)
    more = {name: part.latency_s - (other[name].latency_s if name in other else 0.0) for name, part in mine.items()}
    named = sorted((name for name in more if more[name] > 0), key=lambda name: -more[name])[:2]
    if not named or not other:
        return ""
    return f"; beyond what stage {number} has: " + ", ".join(f"{name} ({format_latency(more[name])})" for name in named)
