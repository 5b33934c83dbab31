"""Explanation of a multimodal plan: bound, baselines, the busiest rank, and the programs of each module."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cdmpp.plan.multimodal.modules import Module
from cdmpp.plan.multimodal.solution import StepSolution
from cdmpp.plan.multimodal.tasks import Tasks
from cdmpp.predict.requests.pricing import Cost
from cdmpp.utils.units import format_latency


def explain(
    solutions: Sequence[StepSolution],
    costs: Sequence[tuple[list[Cost], list[Cost]]],
    makespan_s: float,
    bound_s: float,
    baselines: dict[str, float],
) -> list[str]:
    """Sentences that explain the makespan.

    Parameters
    ----------
    solutions : sequence of StepSolution
    costs : sequence of (list of Cost, list of Cost)
        Forward and backward cost of a layer of each module, by size.
    makespan_s, bound_s : float
        Sums of all steps.
    baselines : dict of str to float
        Makespans of the baselines in seconds.
    """
    proven = all(solution.complete for solution in solutions)
    gap = f"{100 * (makespan_s / bound_s - 1):.1f} % above the lower bound of all plans"
    lines = [f"{format_latency(makespan_s)}, {'no plan of this request is shorter' if proven else gap}"]
    if "1f1b" in baselines:
        counts = ", ".join(str(solution.micro_batches) for solution in solutions)
        lines.append(
            f"1F1B with contiguous modules takes {format_latency(baselines['1f1b'])} "
            f"({100 * (baselines['1f1b'] / makespan_s - 1):.1f} % longer; micro-batches: {counts})"
        )
    else:
        lines.append("1F1B with contiguous modules does not fit the memory")
    longest = max(solutions, key=lambda solution: solution.schedule.makespan_s)
    tasks = longest.schedule.tasks
    lines.append(_busiest_rank(tasks, longest.schedule.makespan_s))
    kept = tasks.with_knobs(tasks.uniform_knobs("keep"))
    added_s = _work_by_rank(tasks, tasks.duration_s - kept.duration_s)
    if added_s.any():
        rank = int(added_s.argmax())
        lines.append(
            f"recomputation and offloading for the memory limit add up to {format_latency(float(added_s[rank]))} "
            f"of work to a rank ({rank})"
        )
    for module, units, (forward, backward) in zip(tasks.modules, tasks.items, costs, strict=True):
        if units:
            lines.append(_module(module, units, forward, backward))
    return lines


def _work_by_rank(tasks: Tasks, seconds: np.ndarray) -> np.ndarray:
    return np.bincount(tasks.rank_of_all, weights=seconds, minlength=tasks.ranks)


def _busiest_rank(tasks: Tasks, makespan_s: float) -> str:
    work_s = _work_by_rank(tasks, tasks.duration_s)
    rank = int(work_s.argmax())
    shares = []
    for i, module in enumerate(tasks.modules):
        for c, chunk in enumerate(tasks.placement.chunks[i]):
            if chunk.rank == rank and len(tasks.ids[i]) and chunk.layers:
                ids = tasks.ids[i][:, c]
                seconds = float(tasks.duration_s[ids].sum() + tasks.duration_s[tasks.half + ids].sum())
                knob = "" if tasks.knobs[i][c] == "keep" else f", {tasks.knobs[i][c]}"
                shares.append((seconds, f"{module.name} segment {chunk.segment} ({chunk.layers} layers{knob})"))
    shares.sort(reverse=True)
    return f"rank {rank} has the most work, {100 * work_s[rank] / makespan_s:.0f} % of its step: " + ", ".join(
        f"{text} {100 * seconds / work_s[rank]:.0f} %" for seconds, text in shares[:4]
    )


def _module(module: Module, units: Sequence[int], forward: list[Cost], backward: list[Cost]) -> str:
    """Sub-micro-batches of a module, the time of a layer, and its dominating programs."""
    size = max(units)
    forward_s, backward_s = module.layer_s(size)
    line = (
        f"{module.name}: {len(units)} sub-micro-batches of up to {size} items reach "
        f"{100 * module.efficiency(size):.0f} % of the best items per second; a layer takes "
        f"{format_latency(forward_s)} forward and {format_latency(backward_s)} backward"
    )
    point = int(np.searchsorted(module.sizes, size).clip(0, len(module.sizes) - 1))
    programs = [
        f"{name}: {costs[point].largest()}"
        for name, costs in (("forward", forward), ("backward", backward))
        if costs[point].parts
    ]
    return line + (f" ({'; '.join(programs)})" if programs else "")
