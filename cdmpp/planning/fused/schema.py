"""The request and the answer of fused pipelines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from cdmpp.compose.budget import SearchControl
from cdmpp.compose.pricing import Cost, PredictedCost
from cdmpp.compose.request import Budget, Closed, Explained, MaxSteps, PositiveSeconds, PriceRequest, Seed, WholeNumber
from cdmpp.compose.request import OldRequest as Request
from cdmpp.errors import FieldError
from cdmpp.planning.fused.bound import held_bound_s
from cdmpp.planning.fused.explore import Found, search
from cdmpp.planning.fused.problem import Model, Problem
from cdmpp.planning.fused.timing import Task, makespan_s, peaks, run_order
from cdmpp.prediction import Prediction

MAX_RANKS, MAX_MICRO_BATCHES, MAX_MODELS = 128, 4096, 8
#: Passes of one request altogether: some ten milliseconds for one schedule.
MAX_TASKS = 32_768
MAX_ACTIVATION = 1e12
#: Costs of one request differ by at most this factor: below it, sums keep every one of them.
MAX_RATIO = 1e9


class ModelForm(Closed):
    """One model. Each of its two costs is given, or predicted from the programs of one stage."""

    stages: Annotated[
        Annotated[int, Field(ge=1, le=MAX_RANKS), WholeNumber],
        Field(description="Equal stages; divides the ranks, which its copies fill side by side."),
    ]
    micro_batches: Annotated[
        Annotated[int, Field(ge=1, le=MAX_MICRO_BATCHES), WholeNumber], Field(description="Of each copy.")
    ]
    forward_s: Annotated[PositiveSeconds | None, Field(description="Seconds of a stage for one micro-batch.")] = None
    backward_s: PositiveSeconds | None = None
    forward: Annotated[
        PredictedCost | None, Field(description="Instead of forward_s: a stage's programs, forward.")
    ] = None
    backward: PredictedCost | None = None
    direction: Annotated[
        Literal["down", "up"], Field(description="Stage 0 of copy 0: on rank 0 (down), or on the last (up).")
    ] = "down"
    activation: Annotated[
        float, Field(gt=0, le=MAX_ACTIVATION, description="What a stage holds for a micro-batch, in any unit.")
    ] = 1.0

    def check(self, path: str) -> None:
        """Raise :class:`FieldError` where a cost is there twice, or not at all."""
        for name in ("forward", "backward"):
            if (getattr(self, name) is None) == (getattr(self, f"{name}_s") is None):
                raise FieldError(
                    f"{path}: give either {name}_s or {name}",
                    path=path,
                    hint="seconds, or the programs to predict them from",
                )


class FusedRequest(Request):
    """A schedule of one, two or more models trained at once on the same ranks (RLHFuse's fused pipelines)."""

    models: Annotated[list[ModelForm], Field(min_length=1, max_length=MAX_MODELS)]
    ranks: Annotated[int, Field(ge=1, le=MAX_RANKS), WholeNumber]
    max_activations: Annotated[
        Annotated[float, Field(gt=0, le=MAX_ACTIVATION)] | None,
        Field(description="Most that a rank may hold at any time, in the unit of `activation`."),
    ] = None
    budget_s: Budget = 1.0
    seed: Seed = 0
    max_steps: MaxSteps = None

    answer_model: ClassVar[type[BaseModel]]

    def price_requests(self) -> list[PriceRequest]:
        """Programs of the costs that are to be predicted, model by model, forward first.

        Raises
        ------
        FieldError, InfeasibleError
            The request is wrong whatever its programs cost.
        """
        tasks = sum(2 * model.micro_batches * self.ranks for model in self.models)
        if tasks > MAX_TASKS:
            raise FieldError(
                f"models: {tasks:,} passes to schedule",
                path="models",
                hint=f"at most {MAX_TASKS:,}: 2 x micro_batches x ranks, summed over the models",
            )
        for at, model in enumerate(self.models):
            model.check(f"models.{at}")
        any_cost = Cost.given(1.0)
        self.problem([(any_cost, any_cost)] * len(self.models))
        return [
            one
            for at, model in enumerate(self.models)
            for name in ("forward", "backward")
            if (cost := getattr(model, name)) is not None
            for one in cost.price_requests(f"models.{at}.{name}")
        ]

    def costs(self, prices: Sequence[Prediction]) -> list[tuple[Cost, Cost]]:
        """Forward and backward cost of a stage, for each model; after :meth:`price_requests`."""
        left = iter(prices)
        return [(_cost(model, "forward", left), _cost(model, "backward", left)) for model in self.models]

    def problem(self, costs: Sequence[tuple[Cost, Cost]], figure: str = "latency_s") -> Problem:
        """What is to be scheduled.

        Parameters
        ----------
        costs : sequence of (Cost, Cost)
        figure : {"latency_s", "lower_s", "upper_s"}
            Which seconds of the costs hold.

        Raises
        ------
        FieldError, InfeasibleError
        """
        models = tuple(
            Model(
                form.stages,
                form.micro_batches,
                getattr(forward, figure),
                getattr(backward, figure),
                form.direction,
                form.activation,
            )
            for form, (forward, backward) in zip(self.models, costs, strict=True)
        )
        return Problem(self.ranks, models, self.max_activations)

    def solve(self, prices: Sequence[Prediction], watch: SearchControl) -> dict[str, Any]:
        """See :class:`FusedAnswer`."""
        costs = self.costs(prices)
        problem = self.problem(costs)
        seconds = [s for model in problem.models for s in (model.forward_s, model.backward_s)]
        if max(seconds) > MAX_RATIO * min(seconds):
            raise FieldError(
                f"models: the longest pass takes more than {MAX_RATIO:g} times the shortest",
                path="models",
                hint="leave out what takes no time beside the rest",
            )
        describe = partial(self._answer, problem, costs)
        return describe(search(problem, watch, seed=self.seed, max_steps=self.max_steps, describe=describe))

    def _answer(self, problem: Problem, costs: Sequence[tuple[Cost, Cost]], found: Found) -> dict[str, Any]:
        order = order_of(problem, found.schedule.start_s)
        times = run_order(problem, order)
        makespan = makespan_s(times)
        # Sums of the same terms in another order may differ in their last digits, and in no more.
        bound = _no_more_than(makespan, found.lower_bound_s)
        baselines = {name: -_no_more_than(-makespan, -seconds) for name, seconds in found.baselines.items()}
        held = peaks(problem, order)
        interval = None
        if self.price_requests():
            ends = [makespan_s(run_order(self.problem(costs, which), order)) for which in ("lower_s", "upper_s")]
            interval = {"lower_s": ends[0], "upper_s": ends[1]}
        return {
            "makespan_s": makespan,
            "baselines": baselines,
            "lower_bound_s": bound,
            "gap": makespan / bound - 1,
            "peak_activations": max(held),
            "rank_peak_activations": held,
            "interval": interval,
            "costs": [
                {"forward_s": forward.latency_s, "backward_s": backward.latency_s} for forward, backward in costs
            ],
            "steps": found.steps,
            "order": [
                [
                    {
                        "model": task.model,
                        "copy": task.copy,
                        "pass": task.way,
                        "micro_batch": task.micro_batch,
                        "start_s": times[task][0],
                        "end_s": times[task][1],
                    }
                    for task in row
                ]
                for row in order
            ],
            "explanation": _explain(problem, found, makespan, costs),
        }


class Interval(BaseModel):
    """The makespan of the same order when every predicted cost is at its lower, or its upper bound."""

    model_config = ConfigDict(extra="forbid")

    lower_s: float
    upper_s: float


class StageCost(BaseModel):
    """Seconds of one stage of a model for one micro-batch."""

    model_config = ConfigDict(extra="forbid")

    forward_s: float
    backward_s: float


class Step(BaseModel):
    """One pass of a micro-batch on a rank; the rank, model and copy tell its stage."""

    model_config = ConfigDict(extra="forbid")

    model: Annotated[int, Field(description="Index in the request.")]
    copy_: Annotated[int, Field(alias="copy")]
    pass_: Annotated[Literal["F", "B"], Field(alias="pass")]
    micro_batch: int
    start_s: float
    end_s: float


class FusedAnswer(Explained):
    """A schedule; baselines, bound and gap are of ``makespan_s``."""

    model_config = ConfigDict(extra="forbid")

    makespan_s: float
    lower_bound_s: float
    peak_activations: Annotated[
        float, Field(description="Most that any rank holds; from a forward's start to its backward's end.")
    ]
    rank_peak_activations: Annotated[list[float], Field(description="The same for each rank.")]
    interval: Annotated[Interval | None, Field(description="null where all costs are given.")]
    costs: Annotated[list[StageCost], Field(description="Of each model.")]
    steps: Annotated[int, Field(description="Schedules that the search made.")]
    order: Annotated[list[list[Step]], Field(description="For each rank what it runs, in order.")]


FusedRequest.answer_model = FusedAnswer


def order_of(problem: Problem, start_s: np.ndarray) -> list[list[Task]]:
    """The tasks of each rank by their starts."""
    tasks = problem.tasks
    lanes = problem.lanes()
    rank = tasks.rank[tasks.group]
    out: list[list[Task]] = []
    for r in range(problem.ranks):
        mine = np.flatnonzero(rank == r)
        row = []
        for number in mine[np.argsort(start_s[mine], kind="stable")]:
            g = tasks.group[number]
            model, copy = lanes[tasks.lane[g]]
            way: Literal["F", "B"] = "F" if tasks.forward[g] else "B"
            row.append(Task(model, copy, int(tasks.stage[g]), way, int(tasks.index[number])))
        out.append(row)
    return out


def _cost(model: ModelForm, name: str, prices: Iterator[Prediction]) -> Cost:
    predicted: PredictedCost | None = getattr(model, name)
    return predicted.with_prices(prices).cost if predicted is not None else Cost.given(getattr(model, f"{name}_s"))


def _explain(problem: Problem, found: Found, makespan: float, costs: Sequence[tuple[Cost, Cost]]) -> list[str]:
    """Why the makespan is what it is: the share of the models, what holds it up, their programs."""
    work = [m.micro_batches * (m.forward_s + m.backward_s) for m in problem.models]
    chains = [(m.micro_batches + m.stages - 1) * (m.forward_s + m.backward_s) for m in problem.models]
    busy = sum(work)
    words = [
        f"every rank works {busy:.6g} s of {makespan:.6g} s ({100 * busy / makespan:.1f} %): "
        + ", ".join(f"model {m} {100 * s / makespan:.1f} %" for m, s in enumerate(work))
    ]
    longest = max(range(len(chains)), key=chains.__getitem__)
    if chains[longest] >= found.lower_bound_s * (1 - 1e-9):
        words.append(
            f"model {longest} alone takes as long as the lower bound, (micro-batches + stages - 1) x "
            f"(forward + backward) = {chains[longest]:.6g} s: the others run in its bubbles"
        )
    elif held_bound_s(problem) >= found.lower_bound_s * (1 - 1e-9):
        words.append(
            "the memory limit sets the lower bound: micro-batches are held until they have been to the last "
            f"stage and back, at most {problem.max_activations:g} on a rank"
        )
    else:
        words.append(
            f"the lower bound is a rank's: its work of {busy:.6g} s, and {found.lower_bound_s - busy:.6g} s "
            "until its first micro-batches can arrive and after its last ones have gone"
        )
    for m, pair in enumerate(costs):
        for name, cost in zip(("forward", "backward"), pair, strict=True):
            if cost.parts:
                words.append(f"model {m} {name}, {cost.latency_s:.4g} s a stage: {cost.largest()}")
    return words


def _no_more_than(limit: float, value: float) -> float:
    """The limit for a value that is above it by a rounding alone; else the value, whatever it is."""
    return limit if limit < value <= limit + 1e-9 * abs(limit) else value
