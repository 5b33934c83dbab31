"""Plans as JSON values, with the reasons for their length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cdmpp.compose.pricing import Cost
from cdmpp.planning.multimodal.knobs import peaks_bytes
from cdmpp.planning.multimodal.modules import Module
from cdmpp.planning.multimodal.plan import SHARE, Plan
from cdmpp.planning.multimodal.schedule import followed
from cdmpp.planning.multimodal.search import Counter
from cdmpp.planning.multimodal.tasks import Tasks
from cdmpp.units import format_latency

Costs = Sequence[tuple[list[Cost], list[Cost]]]


def plan_answer(
    plan: Plan, share: float = SHARE, bounds: tuple[Sequence[Module], Sequence[Module]] | None = None
) -> dict[str, Any]:
    """A step's plan, without its explanation.

    Parameters
    ----------
    share : float
        Of the peak efficiency, for the rule's sizes.
    bounds : pair of sequence of Module, optional
        The modules at the lower and at the upper bounds of their predicted costs.
    """
    tasks, start_s = plan.schedule.tasks, plan.schedule.start_s
    names = [module.name for module in tasks.modules]
    orders = plan.schedule.orders
    busy_s = float(tasks.duration_s.sum())
    whole_s = plan.schedule.makespan_s * tasks.ranks
    return {
        "batch": dict(zip(names, plan.batch, strict=True)),
        "makespan_s": plan.schedule.makespan_s,
        "lower_bound_s": plan.bound_s,
        "gap": plan.schedule.makespan_s / plan.bound_s - 1,
        "baselines": plan.baselines_s,
        "interval": None
        if bounds is None
        else {
            name: followed(tasks.with_costs(modules), orders).makespan_s
            for name, modules in zip(("lower_s", "upper_s"), bounds, strict=True)
        },
        "sub_batches": _sub_batches(tasks, share),
        "layout": [
            {
                "module": names[i],
                "segment": chunk.segment,
                "rank": chunk.rank,
                "first_layer": chunk.first,
                "layers": chunk.layers,
            }
            for i, row in enumerate(tasks.placement.chunks)
            for chunk in row
        ],
        "memory": [
            {
                "rank": rank,
                "peak_bytes": peak,
                "knobs": {
                    names[i]: found
                    for i, row in enumerate(tasks.placement.chunks)
                    if (found := [tasks.knobs[i][at] for at, chunk in enumerate(row) if chunk.rank == rank])
                },
            }
            for rank, peak in enumerate(peaks_bytes(tasks, orders))
        ],
        "order": _order(tasks, orders, start_s),
        "bubble": 1 - busy_s / whole_s if whole_s else 0.0,
    }


def _sub_batches(tasks: Tasks, share: float) -> dict[str, Any]:
    out = {}
    for module, units in zip(tasks.modules, tasks.items, strict=True):
        work_s = sum(sum(module.layer_s(n)) for n in units)
        best = float((module.sizes / (module.forward_s + module.backward_s)).max())
        out[module.name] = {
            "rule_size": module.sub_batch(share),
            "size": max(units, default=0),
            "count": len(units),
            "items": list(units),
            "efficiency": sum(units) / work_s / best if units else 0.0,
        }
    return out


def _order(tasks: Tasks, orders: Sequence[Sequence[int]], start_s: np.ndarray) -> list[list[dict[str, Any]]]:
    said: list[tuple[str, int, int]] = [("", 0, 0)] * tasks.half
    for i, grid in enumerate(tasks.ids):
        for at, chunk in enumerate(tasks.placement.chunks[i]):
            for unit in range(len(grid)):
                said[int(grid[unit, at])] = (tasks.modules[i].name, chunk.segment, unit)
    out = []
    for order in orders:
        row = []
        for task in order:
            module, segment, unit = said[task % tasks.half]
            row.append(
                {
                    "module": module,
                    "segment": segment,
                    "pass": "F" if task < tasks.half else "B",
                    "micro_batch": unit,
                    "start_s": float(start_s[task]),
                    "end_s": float(start_s[task] + tasks.duration_s[task]),
                }
            )
        out.append(row)
    return out


def summed(
    answers: Sequence[dict[str, Any]], plans: Sequence[Plan], costs: Costs, counter: Counter, *, several: bool
) -> dict[str, Any]:
    """The whole answer: the only step's plan, or the steps' plans and their sums."""
    makespan_s = sum(answer["makespan_s"] for answer in answers)
    bound_s = sum(answer["lower_bound_s"] for answer in answers)
    names = [name for name in answers[0]["baselines"] if all(name in a["baselines"] for a in answers)]
    baselines = {name: sum(answer["baselines"][name] for answer in answers) for name in names}
    first = answers[0]
    return {
        "makespan_s": makespan_s,
        "lower_bound_s": bound_s,
        "gap": makespan_s / bound_s - 1,
        "baselines": baselines,
        "interval": None
        if first["interval"] is None
        else {name: sum(answer["interval"][name] for answer in answers) for name in first["interval"]},
        "batch": None if several else first["batch"],
        "sub_batches": None if several else first["sub_batches"],
        "layout": first["layout"],
        "memory": None if several else first["memory"],
        "order": None if several else first["order"],
        "bubble": sum(a["bubble"] * a["makespan_s"] for a in answers) / makespan_s,
        "plans": list(answers) if several else None,
        "cache": {
            "hits": counter.hits,
            "misses": counter.misses,
            "hit_rate": counter.hits / counter.total if counter.total else 0.0,
        },
        "steps": sum(plan.steps for plan in plans),
        "complete": all(plan.complete for plan in plans),
        "explanation": explain(plans, costs, makespan_s, bound_s, baselines),
    }


def explain(
    plans: Sequence[Plan], costs: Costs, makespan_s: float, bound_s: float, baselines: dict[str, float]
) -> list[str]:
    """Why it takes so long: against its bound and 1F1B, the fullest rank, the layers, the programs."""
    out = [f"{format_latency(makespan_s)}, {100 * (makespan_s / bound_s - 1):.1f} % above the lower bound"]
    if "1f1b" in baselines:
        counts = ", ".join(str(plan.micro_batches) for plan in plans)
        out.append(
            f"1F1B with the modules one behind the other takes {format_latency(baselines['1f1b'])} "
            f"({100 * (baselines['1f1b'] / makespan_s - 1):.1f} % longer; micro-batches: {counts})"
        )
    else:
        out.append("1F1B with the modules one behind the other does not fit the memory")
    # The longest step says most of what the time goes into.
    plan = max(plans, key=lambda plan: plan.schedule.makespan_s)
    tasks = plan.schedule.tasks
    both = np.concatenate([tasks.rank, tasks.rank])
    work_s = np.bincount(both, weights=tasks.duration_s, minlength=tasks.ranks)
    rank = int(work_s.argmax())
    shares = []
    for i, module in enumerate(tasks.modules):
        for at, chunk in enumerate(tasks.placement.chunks[i]):
            if chunk.rank == rank and len(tasks.ids[i]) and chunk.layers:
                ids = tasks.ids[i][:, at]
                seconds = float(tasks.duration_s[ids].sum() + tasks.duration_s[tasks.half + ids].sum())
                knob = tasks.knobs[i][at]
                said = "" if knob == "keep" else f", {knob}"
                shares.append((seconds, f"{module.name} segment {chunk.segment} ({chunk.layers} layers{said})"))
    shares.sort(reverse=True)
    out.append(
        f"rank {rank} has most to do, {100 * work_s[rank] / plan.schedule.makespan_s:.0f} % of its step: "
        + ", ".join(f"{text} {100 * seconds / work_s[rank]:.0f} %" for seconds, text in shares[:4])
    )
    alone = tasks.with_knobs(tuple(tuple("keep" for _ in row) for row in tasks.knobs))
    added_s = np.bincount(both, weights=tasks.duration_s - alone.duration_s, minlength=tasks.ranks)
    if added_s.any():
        worst = int(added_s.argmax())
        out.append(
            f"recomputing and offloading to fit the memory add up to {format_latency(float(added_s[worst]))} "
            f"of work to a rank ({worst})"
        )
    for i, (module, (forward, backward)) in enumerate(zip(tasks.modules, costs, strict=True)):
        if not len(tasks.items[i]):
            continue
        size = max(tasks.items[i])
        forward_s, backward_s = module.layer_s(size)
        line = (
            f"{module.name}: {len(tasks.items[i])} sub-micro-batches of up to {size} items keep "
            f"{100 * module.efficiency(size):.0f} % of the best items a second; a layer takes "
            f"{format_latency(forward_s)} forward and {format_latency(backward_s)} backward"
        )
        at = int(np.searchsorted(module.sizes, size).clip(0, len(module.sizes) - 1))
        parts = [
            f"{what}: {cost[at].largest()}"
            for what, cost in (("forward", forward), ("backward", backward))
            if cost[at].parts
        ]
        out.append(line + (f" ({'; '.join(parts)})" if parts else ""))
    return out
