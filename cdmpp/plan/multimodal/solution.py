"""Solution of one step."""

from __future__ import annotations

from dataclasses import dataclass

from cdmpp.plan.multimodal.schedule import Schedule


@dataclass(frozen=True)
class StepSolution:
    """Best schedule of one step.

    Attributes
    ----------
    batch : tuple of int
        Items of each module.
    schedule : Schedule
    bound_s : float
        Lower bound of every plan that the request allows, in seconds.
    searched_bound_s : float
        Lower bound of the designs that were searched, in seconds.
    baselines_s : dict of str to float
        "1f1b": contiguous modules, the best number of micro-batches; "1f1b_segments": the rule's segments in data
        order. Absent where they do not fit the memory.
    one_f_one_b : Schedule or None
        Schedule of "1f1b".
    micro_batches : int or None
        Micro-batches of "1f1b".
    complete : bool
        No plan that the request allows is shorter.
    steps : int
        Orders that were evaluated.
    """

    batch: tuple[int, ...]
    schedule: Schedule
    bound_s: float
    searched_bound_s: float
    baselines_s: dict[str, float]
    one_f_one_b: Schedule | None
    micro_batches: int | None
    complete: bool = False
    steps: int = 0
