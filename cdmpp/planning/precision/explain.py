"""Why a precision plan is what it is: what decides the time, what was refused, and what the error is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from cdmpp.planning.precision.build import Job, Tables
from cdmpp.planning.precision.pricing import DeviceCosts, Pricing
from cdmpp.units import format_latency, format_si

_MOST = 3
Breaks = Literal["memory", "time", "memory and time"]


@dataclass(frozen=True)
class Raise:
    """A raise by one level that the plan does not take, with the figures that it would have."""

    device: int
    operator: int
    source: str
    target: str
    reduction: float
    breaks: Breaks
    iteration_s: float
    memory_bytes: float


def rejected_raises(device: int, costs: DeviceCosts, priced: Pricing, limit_s: float) -> list[Raise]:
    """Every raise by one level that would reduce the error and breaks a limit."""
    out: list[Raise] = []
    for i in range(costs.size):
        at = priced.levels[i]
        if at + 1 == len(costs.dtypes[i]):
            continue
        reduction = float(costs.sensitivity[i][at] - costs.sensitivity[i][at + 1])
        if reduction <= 0:
            continue
        priced.change(i, at + 1)
        memory, seconds = priced.memory_bytes, priced.iteration_s
        priced.change(i, at)
        memory_broken, time_broken = memory > costs.memory_bytes, seconds > limit_s
        if not (memory_broken or time_broken):
            continue  # the search ended before it came here
        breaks: Breaks = "memory and time" if memory_broken and time_broken else "memory" if memory_broken else "time"
        out.append(Raise(device, i, costs.dtypes[i][at], costs.dtypes[i][at + 1], reduction, breaks, seconds, memory))
    return out


def explain(
    job: Job,
    made: Sequence[Tables],
    priced: Sequence[Pricing],
    limit_s: float,
    limit_of: str,
    rejected: Sequence[Raise],
) -> list[str]:
    """Sentences, the most important first."""
    names = [one.id for one in job.operators]
    said = [
        f"the time limit {format_latency(limit_s)} is "
        + ("that of the request" if limit_of == "request" else "what the lowest precision that fits takes")
    ]
    last = max(range(len(priced)), key=lambda d: priced[d].iteration_s)
    said += _time(job, made[last], priced[last])
    for one, pricing in zip(made, priced, strict=True):
        if np.isfinite(one.costs.memory_bytes):
            share = pricing.memory_bytes / one.costs.memory_bytes
            said.append(
                f"{one.costs.name} holds {format_si(pricing.memory_bytes, 'B')} of "
                f"{format_si(one.costs.memory_bytes, 'B')} ({100 * share:.0f} %)"
            )
    for one, pricing in zip(made, priced, strict=True):
        costs = one.costs
        added = np.array([costs.sensitivity[i][at] for i, at in enumerate(pricing.levels)])
        total = float(added.sum())
        if total <= 0:
            said.append(f"{costs.name} adds no error")
            continue
        largest = np.argsort(-added, kind="stable")[:_MOST]
        parts = ", ".join(
            f"{names[i]} in {costs.dtypes[i][pricing.levels[i]]} {100 * added[i] / total:.0f} %"
            for i in largest
            if added[i] > 0
        )
        said.append(f"the error of {costs.name} comes from {parts}")
    for refused in rejected[:_MOST]:
        costs = made[refused.device].costs
        over = []
        if "time" in refused.breaks:
            over.append(f"{format_latency(refused.iteration_s - limit_s)} over the time")
        if "memory" in refused.breaks:
            over.append(f"{format_si(refused.memory_bytes - costs.memory_bytes, 'B')} over the memory")
        said.append(
            f"{names[refused.operator]} is not raised to {refused.target} on {costs.name}: " + " and ".join(over)
        )
    return said


def _time(job: Job, one: Tables, pricing: Pricing) -> list[str]:
    costs = one.costs
    ends = np.cumsum(pricing.slots_s)[costs.after] + costs.tail_s
    decides = int(np.argmax(ends))
    computes = float(pricing.slots_s.sum())
    what = (
        "its computing"
        if decides == len(ends) - 1
        else f"the exchange that starts after the backward pass of "
        f"{job.operators[2 * costs.size - 1 - int(costs.after[decides])].id}"
    )
    said = [
        f"{costs.name} decides the iteration by {what}: it computes {format_latency(computes)}, "
        f"{format_latency(pricing.casts_s)} of it casts"
    ]
    both = [(one.forward[i][at].latency_s + one.backward[i][at].latency_s, i) for i, at in enumerate(pricing.levels)]
    for seconds, i in sorted(both, key=lambda pair: (-pair[0], pair[1]))[:_MOST]:
        at = pricing.levels[i]
        programs = one.forward[i][at].largest() or ""
        share = 100 * seconds / computes if computes else 0.0
        said.append(
            f"{job.operators[i].id} in {costs.dtypes[i][at]} takes {share:.0f} % of it"
            + (f" (forward: {programs})" if programs else "")
        )
    return said
