"""Pipeline schedules of training: searched, or taken from the answer that the request gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cdmpp.errors import FieldError
from cdmpp.plan.fused.schema import FusedPlan, FusedRequest, ModelForm
from cdmpp.plan.rl.training_schema import PipelineForm, TrainingForm, within
from cdmpp.predict.requests.budget import SearchControl
from cdmpp.predict.requests.request import Interval

#: Path of a schedule's request in the request, or in a pool with a training cost of its own.
REQUEST_PATH = "training.pipeline.request"
#: Largest share of the remaining budget for one schedule.
MOST_SHARE = 0.25


@dataclass(frozen=True)
class PipelineSchedule:
    """Time of one run of a schedule.

    Attributes
    ----------
    latency_s, lower_s, upper_s : float
        Makespan, with the predictions and with their bounds.
    plan : FusedPlan or None
        The schedule; None if the request gives its answer only.
    """

    latency_s: float
    lower_s: float
    upper_s: float
    plan: FusedPlan | None = None

    @property
    def predicted(self) -> bool:
        """Whether its time is uncertain."""
        return self.lower_s < self.upper_s


def compile_pipelines(costs: Sequence[TrainingForm | None]) -> None:
    """Compile the search for schedules before the budget begins, if one of the costs needs it."""
    if any(cost is not None and cost.pipeline is not None and cost.pipeline.request is not None for cost in costs):
        model = ModelForm(stages=1, micro_batches=1, forward_s=1.0, backward_s=1.0)
        FusedRequest(models=[model], ranks=1, max_steps=1).solve(SearchControl())


def schedules(
    costs: Sequence[TrainingForm | None], control: SearchControl, ignore_memory: bool = False
) -> dict[int, PipelineSchedule]:
    """Schedules of the costs that have pipelines, by index; equal pipelines are searched once.

    Raises
    ------
    FieldError, InfeasibleError
        A schedule cannot be made.
    """
    known: list[tuple[PipelineForm, PipelineSchedule]] = []
    by_index: dict[int, PipelineSchedule] = {}
    for index, cost in enumerate(costs):
        if cost is None or cost.pipeline is None:
            continue
        form = cost.pipeline
        schedule = next((schedule for other, schedule in known if other == form), None)
        if schedule is None:
            schedule = _schedule(form, control, ignore_memory)
            known.append((form, schedule))
        by_index[index] = schedule
    return by_index


def _schedule(form: PipelineForm, control: SearchControl, ignore_memory: bool) -> PipelineSchedule:
    if form.answer is not None:
        return _of(form.answer.makespan_s, form.answer.interval)
    request = form.schedule_request(ignore_memory)
    assert request is not None
    left_s = control.left_s
    budget_s = min(request.budget_s, MOST_SHARE * left_s) if left_s < float("inf") else request.budget_s
    try:
        plan = request.solve(control.part(budget_s))
    except FieldError as error:
        raise within(error, REQUEST_PATH) from None
    return _of(plan.makespan_s, plan.interval, plan)


def _of(makespan_s: float, interval: Interval | None, plan: FusedPlan | None = None) -> PipelineSchedule:
    if interval is None:
        return PipelineSchedule(makespan_s, makespan_s, makespan_s, plan)
    return PipelineSchedule(makespan_s, min(interval.lower_s, makespan_s), max(interval.upper_s, makespan_s), plan)
