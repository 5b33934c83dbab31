"""Explanation of a simulated step: the busiest rank, the slowest stage and its programs, shorter schedules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cdmpp.predict.requests.pricing import Cost, Part
from cdmpp.simulate.emulator.emulate import Step
from cdmpp.simulate.emulator.stages import Stage
from cdmpp.utils.units import format_latency, format_si


@dataclass(frozen=True)
class StageCosts:
    """A stage with its costs.

    Attributes
    ----------
    middle, lower, upper : Stage
        With the predictions, and with their lower and upper bounds.
    forward, backward : Cost
        Class 0.
    """

    middle: Stage
    lower: Stage
    upper: Stage
    forward: Cost
    backward: Cost

    @property
    def both_s(self) -> float:
        """Forward and backward pass of one micro-batch."""
        return self.forward.latency_s + self.backward.latency_s

    def parts(self) -> dict[str, Part]:
        """The programs of both passes by name; empty where the costs are given."""
        merged: dict[str, Part] = {}
        for part in (*self.forward.parts, *self.backward.parts):
            before = merged.get(part.name, Part(part.name, 0, 0.0))
            merged[part.name] = Part(part.name, before.count + part.count, before.latency_s + part.latency_s)
        return merged


def explain(
    step: Step, stages: Sequence[StageCosts], same_passes_s: float, bound_s: float, others: Mapping[str, Step]
) -> list[str]:
    """Sentences about a step.

    Parameters
    ----------
    step : Step
    stages : sequence of StageCosts
    same_passes_s : float
        Lower bound of all orders of the same passes.
    bound_s : float
        Lower bound of all schedules of the stages.
    others : mapping of str to Step
        The step under other schedules.
    """
    makespan_s = step.makespan_s
    if makespan_s <= 0:
        return ["no pass takes any time"]
    lines = [
        f"the ranks wait {100 * step.bubble:.1f} % of the step of {format_latency(makespan_s)}; "
        + _possible_saving("another order of the same passes", makespan_s, same_passes_s),
        _busiest_rank(step),
        _slowest_stage(stages),
    ]
    if step.structure.any_split and any(stage.middle.weight_s is None for stage in stages):
        lines.append("weight gradients are assumed to take half of the backward pass where they are not given")
    shorter = {name: other for name, other in others.items() if other.makespan_s < makespan_s}
    if shorter:
        name = min(shorter, key=lambda name: shorter[name].makespan_s)
        needed, now = (format_si(float(s.peak_bytes.max()), "B") for s in (shorter[name], step))
        step_s = shorter[name].makespan_s
        memory = "the same peak memory" if needed == now else f"a peak memory of {needed} instead of {now} on a rank"
        lines.append(
            f"with the schedule {name} the step takes {format_latency(step_s)}, "
            f"{100 * (1 - step_s / makespan_s):.1f} % less, and {memory}; "
            + _possible_saving("another schedule", step_s, bound_s)
        )
    return lines


def _possible_saving(what: str, makespan_s: float, bound_s: float) -> str:
    """How much shorter than ``makespan_s`` a step can be at most, rounded as it is shown."""
    share = f"{100 * (1 - bound_s / makespan_s):.1f}"
    return f"{what} cannot shorten it" if share in ("0.0", "-0.0") else f"{what} can shorten it by {share} % at most"


def _busiest_rank(step: Step) -> str:
    rank = int(step.busy_s.argmax())
    row = step.row(rank)
    start, end = step.start_s[row], step.end_s[row]
    first_s, last_s = float(start[0]), step.makespan_s - float(end[-1])
    between_s = step.makespan_s - float(step.busy_s[rank]) - first_s - last_s
    waits = [format_latency(max(wait_s, 0.0)) for wait_s in (first_s, between_s, last_s)]
    return (
        f"rank {rank} is the busiest: {100 * float(step.busy_s[rank]) / step.makespan_s:.1f} % of the step; it "
        f"waits {waits[0]} for its first pass, {waits[1]} between passes and {waits[2]} after the last"
    )


def _slowest_stage(stages: Sequence[StageCosts]) -> str:
    by_stage = [stage.both_s for stage in stages]
    mean = sum(by_stage) / len(by_stage)
    slowest = max(range(len(stages)), key=by_stage.__getitem__)
    parts = tuple(stages[slowest].parts().values())
    programs = ": " + Cost(0.0, 0.0, 0.0, parts).largest(3) if parts else ""
    if by_stage[slowest] <= 1.0001 * mean:
        return f"the stages are equally long: {format_latency(mean)} for both passes of a micro-batch{programs}"
    shortest = min(range(len(stages)), key=by_stage.__getitem__)
    return (
        f"stage {slowest} is long: {format_latency(by_stage[slowest])} for both passes of a micro-batch, "
        f"{by_stage[slowest] / mean:.2f} times the mean of the stages{programs}"
        f"{_difference(stages[slowest], stages[shortest], shortest)}"
    )


def _difference(slow: StageCosts, fast: StageCosts, number: int) -> str:
    """Programs in which a stage exceeds the fastest stage, ``number``."""
    parts, other = slow.parts(), fast.parts()
    more = {name: part.latency_s - (other[name].latency_s if name in other else 0.0) for name, part in parts.items()}
    names = sorted((name for name in more if more[name] > 0), key=lambda name: -more[name])[:2]
    if not names or not other:
        return ""
    return f"; more than stage {number}: " + ", ".join(f"{name} ({format_latency(more[name])})" for name in names)
