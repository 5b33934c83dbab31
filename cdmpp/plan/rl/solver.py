"""Search for a whole plan: sizes, split, streaming and migration, chosen on search steps, judged on held-out ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from cdmpp.errors import InfeasibleError
from cdmpp.plan.rl.dispatch import AnyDispatcher, Dispatcher, Groups, MixDispatcher, PoolMix, TailSplit
from cdmpp.plan.rl.evaluate import (
    SearchResult,
    StepOutcome,
    colocated,
    colocated_sizes,
    elastic_table,
    evaluate,
    evaluate_finish,
    lower_bounds,
)
from cdmpp.plan.rl.generation import Floats, compile_loops
from cdmpp.plan.rl.migration import Migration, best_migration, simulate_migration
from cdmpp.plan.rl.problem import RlProblem, compile_pipelines, make_problem, schedules
from cdmpp.plan.rl.report import plan_of
from cdmpp.plan.rl.schema import ElasticPart, RlPlan, RlRequest
from cdmpp.plan.rl.size_search import SizeSearchResult, candidate_sizes, choose_sizes, search_sizes
from cdmpp.plan.rl.sizes import PoolSizes, SizingProblem
from cdmpp.predict.requests.budget import SearchControl
from cdmpp.predict.requests.plot import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


#: Number of search steps on which a migration is chosen.
MIGRATION_DRAWS = 8
#: Simulations of all steps after the search: the plan, its baselines and its bounds. Time for them is reserved.
EVALUATIONS = 14
#: Shares of the budget that are left when the search for migrations and the elastic table end.
MIGRATION_LEAVES, ELASTIC_LEAVES = 0.25, 0.1


def solve(request: RlRequest, control: SearchControl) -> RlPlan:
    """The best plan within the budget, which begins when the simulation is compiled.

    Raises FieldError: fixed sizes fit no pool, or the minimised price has no positive lower bound.
    Raises InfeasibleError: the longest sample fits into no memory, or every step is longer than the limit.
    """
    costs = [pool.training for pool in request.pools]
    compile_loops()
    compile_pipelines(costs)
    control.restart()
    pipeline_schedules = schedules(costs, control, request.ignore_memory)
    problem = make_problem(request, schedules=pipeline_schedules)

    def answer(result: SearchResult) -> RlPlan:
        return plan_of(request, problem, result, pipeline_schedules)

    return answer(search(problem, control, request.max_steps, answer))


def search(
    problem: RlProblem,
    control: SearchControl | None = None,
    max_steps: int | None = None,
    make_answer: Callable[[SearchResult], Any] | None = None,
) -> SearchResult:
    """Plan a step.

    ``control``: ends the search for sizes early. ``max_steps``: most generation sizes to simulate. ``make_answer``:
    makes the answer of an intermediate result, for progress listeners.
    Raises FieldError: fixed sizes fit no pool.
    Raises InfeasibleError: the longest sample fits into no memory, or every step is longer than the limit.
    """
    control = control or SearchControl()
    left_out = pools_without_memory(problem)
    engines = {
        index: pool.engine
        for index, pool in enumerate(problem.sizing.pools)
        if pool.engine is not None and pool.name not in left_out
    }
    dispatchers, held_out = problem.dispatchers(engines, False), problem.dispatchers(engines, True)

    def answer(result: SizeSearchResult) -> Any:
        stopped = SearchControl()
        stopped.stop()
        plan = _Completion(problem, dispatchers, held_out, result, stopped, 0.0).run(left_out)
        return None if make_answer is None else make_answer(plan)

    # One simulation of all drawn steps is the longest part that does not look at the budget.
    started = control.spent_s
    index, dispatcher = next(iter(dispatchers.items()))
    first_units = problem.sizing.generation_units or problem.sizing.pools[index].units
    dispatcher.finish_times(TailSplit(0, first_units))
    reserve_s = (control.spent_s - started) * (EVALUATIONS + len(dispatchers))
    total_s = control.left_s if control.left_s < np.inf else 0.0
    within = control.part(reserve_s=min(reserve_s, total_s / 2))
    result = search_sizes(problem, dispatchers, within, control, max_steps, answer)
    return _Completion(problem, dispatchers, held_out, result, within, total_s).run(left_out)


def pools_without_memory(problem: RlProblem) -> dict[str, str]:
    """Generation pools whose memory does not hold the longest sample: name to reason.

    Raises InfeasibleError: no pool remains.
    """
    pools = [pool for pool in problem.sizing.pools if pool.engine is not None]
    reasons: dict[str, str] = {}
    for pool in pools:
        try:
            pool.generation_engine().check(problem.lengths.longest)
        except InfeasibleError as error:
            reasons[pool.name] = error.message
            if len(reasons) == len(pools):
                raise
    return reasons


class _Completion:
    """Choice of sizes and migration, and their evaluation with all baselines on the held-out steps."""

    def __init__(
        self,
        problem: RlProblem,
        dispatchers: dict[int, Dispatcher],
        held_out: dict[int, Dispatcher],
        result: SizeSearchResult,
        control: SearchControl,
        total_s: float,
    ) -> None:
        self.problem, self.sizing, self.result = problem, problem.sizing, result
        self.dispatchers, self.held_out, self.control, self.total_s = dispatchers, held_out, control, total_s
        self.migrating = control.part(reserve_s=MIGRATION_LEAVES * total_s)
        self.short = {
            index: Dispatcher(dispatcher.engine, dispatcher.steps.first(MIGRATION_DRAWS))
            for index, dispatcher in dispatchers.items()
        }

    def run(self, left_out: dict[str, str]) -> SearchResult:
        """The plan with its baselines; ``left_out``: pools that cannot generate, and why."""
        problem, sizing, control = self.problem, self.sizing, self.control
        sizes = choose_sizes(problem, self.result.front)
        migration: Migration | None = None
        judge: AnyDispatcher
        dispatches: dict[str, StepOutcome] = {}
        applied = False
        if isinstance(sizes.split, PoolMix):
            judge, best_split = MixDispatcher(self.held_out), TailSplit(0, sizes.generation_units)
            outcome = unmigrated = evaluate(sizing, sizes, judge)
        else:
            sizes, migration = self._sizes_with_migration(sizes)
            judge = self.held_out[sizes.generation]
            sizes, outcome, dispatches["lpt"], best_split, migration = self._split_or_not(judge, sizes, migration)
            unmigrated = outcome
            if migration is not None:
                sizes, outcome, migration, applied = self._migrate_or_not(judge, sizes, outcome, migration)
        if not control.stopped:
            # Other sizes first, then another dispatch to the units that were chosen.
            for simpler in (self._simpler_sizes, self._simpler_dispatches):
                for other in list(simpler(sizes, judge)):
                    other_outcome = evaluate(sizing, other, self.held_out[other.generation])
                    if self._value(other, other_outcome) >= self._value(sizes, outcome):
                        continue
                    sizes, judge = other, self.held_out[other.generation]
                    outcome = unmigrated = other_outcome
                    assert isinstance(sizes.split, TailSplit)
                    migration, applied, best_split = None, False, sizes.split
                    unsplit = replace(sizes, split=TailSplit(0, sizes.generation_units))
                    dispatches = {"lpt": evaluate(sizing, unsplit, judge)}
        elastic: list[ElasticPart] = []
        if isinstance(judge, Dispatcher) and sizes.training is not None and not sizes.shared:
            inference_s, units = sizing.generation_inference_s(sizes), sizes.generation_units
            pool = replace(sizing.pools[sizes.generation], inference_s=inference_s)
            free_units = pool.units - (sizes.units if sizes.training == sizes.generation else units)
            cost, over = sizing.cost_of(sizes), control.part(reserve_s=ELASTIC_LEAVES * self.total_s)
            elastic = elastic_table(
                pool, best_split, cost, sizes.training_units, judge.steps, free_units, lambda: over.expired
            )
        bound_s, bound_price = lower_bounds(sizing, self.held_out)
        step_s = float(outcome.step_s.mean())
        # A user who stopped the search waits for the plan.
        baselines = not control.stopped
        one_pool = baselines and isinstance(sizes.split, PoolMix)
        return SearchResult(
            sizes=replace(sizes, step_s=step_s, price=step_s * sizing.price_per_s(sizes)),
            outcome=outcome,
            migration=migration,
            migration_applied=applied,
            dispatches=dispatches | (self._dispatches(sizes, judge) if baselines else {}),
            one_pool=self._best_of(self.result.one_pool) if one_pool else None,
            disaggregated=self._best_of(self.result.separate) if baselines and sizes.shared else None,
            unstreamed=evaluate(sizing, replace(sizes, batches=1), judge),
            unmigrated=unmigrated,
            colocated=colocated(sizing, problem.objective, self.held_out) if baselines else None,
            best_split=best_split,
            longest_alone_s=float(judge.longest_alone_s().mean()),
            bound_s=bound_s,
            bound_price=bound_price,
            generation_bound_s=float(judge.lower_bound_s(sizes.split).mean()),
            front=self.result.front,
            elastic=elastic,
            sizes_tried=self.result.tried,
            complete=self.result.complete,
            left_out=left_out,
            judge=judge,
        )

    def _value(self, sizes: PoolSizes, outcome: StepOutcome) -> float:
        step_s = float(outcome.step_s.mean())
        if self.problem.most_step_s is not None and step_s > self.problem.most_step_s:
            return np.inf
        return step_s if self.problem.objective == "time" else step_s * self.sizing.price_per_s(sizes)

    def _simpler_sizes(self, sizes: PoolSizes, judge: AnyDispatcher) -> Iterator[PoolSizes]:
        """Sizes of baselines: a search that ended early is not worse than they are."""
        if self.sizing.layout != "separate":
            yield from colocated_sizes(self.sizing, self.held_out)
        allowed = [other for other in self.result.separate if isinstance(other.split, TailSplit)]
        if allowed:
            yield min(allowed, key=lambda other: other.value(self.problem.objective))

    def _simpler_dispatches(self, sizes: PoolSizes, judge: AnyDispatcher) -> Iterator[PoolSizes]:
        """The same units with StreamRL's rule, or without groups and streaming."""
        if isinstance(judge, Dispatcher):
            rule = replace(sizes, split=judge.quantile_rule_split(sizes.generation_units))
            yield from (replace(rule, batches=2**k) for k in range(1 if sizes.batches == 1 else 6))
            yield replace(sizes, split=TailSplit(0, sizes.generation_units), batches=1)

    def _split_or_not(
        self, judge: Dispatcher, sizes: PoolSizes, migration: Migration | None
    ) -> tuple[PoolSizes, StepOutcome, StepOutcome, TailSplit, Migration | None]:
        """The sizes with their split, or without it if it loses on the held-out steps.

        Besides: the outcome, that without split, the best split, and the migration.
        """
        units, dispatcher, control = sizes.generation_units, self.dispatchers[sizes.generation], self.migrating
        assert isinstance(sizes.split, TailSplit)
        best_split = sizes.split
        if not best_split.tail and units > 1 and dispatcher.samples > 1 and not control.expired:
            best_split = dispatcher.best_split(units, lambda: control.expired)
        unsplit = _resimulated(self.sizing, sizes, dispatcher, TailSplit(0, units))
        lpt, outcome = evaluate(self.sizing, unsplit, judge), evaluate(self.sizing, sizes, judge)
        if sizes.split.tail and outcome.step_s.mean() > lpt.step_s.mean():
            # The split gains on the search steps and loses on the held-out steps.
            return unsplit, lpt, lpt, best_split, self._best_migration(unsplit)
        return sizes, outcome, lpt, best_split, migration

    def _migrate_or_not(
        self, judge: Dispatcher, sizes: PoolSizes, outcome: StepOutcome, migration: Migration
    ) -> tuple[PoolSizes, StepOutcome, Migration | None, bool]:
        """Sizes and outcome with or without migration, the migration on held-out steps, whether it is applied."""
        split, inference_s = sizes.split, self.sizing.generation_inference_s(sizes)
        assert isinstance(split, TailSplit)
        threshold, remaining = migration.threshold, migration.remaining
        simulated = simulate_migration(judge, split, threshold, remaining, self.problem.link, inference_s)
        if inference_s == 0:
            return sizes, outcome, simulated, False
        short = self.short[sizes.generation]
        migrated_sizes = _resimulated(self.sizing, sizes, short, split, migration.ready_s)
        migrated = evaluate(self.sizing, migrated_sizes, judge, simulated)
        if migrated.step_s.mean() < outcome.step_s.mean():
            return migrated_sizes, migrated, simulated, True
        return sizes, outcome, None, False

    def _dispatches(self, sizes: PoolSizes, judge: AnyDispatcher) -> dict[str, StepOutcome]:
        """Other dispatches of the samples to the same units, each with its best number of batches."""
        finish: dict[str, Floats | None]
        if isinstance(judge, MixDispatcher):
            assert isinstance(sizes.split, PoolMix)
            finish = {
                "random": judge.random_finish_times(sizes.split),
                "proportional": judge.finish_times(judge.proportional(sizes.split.pools, sizes.split.units)),
            }
        else:
            units = sizes.generation_units
            finish = {
                "random": judge.random_finish_times(units),
                "rule": judge.finish_times(judge.quantile_rule_split(units)),
                "guesses": judge.guessed_finish_times(units, lambda: self.control.expired),
            }
        known = {name: times for name, times in finish.items() if times is not None}
        return {name: evaluate_finish(self.sizing, sizes, judge, times) for name, times in known.items()}

    def _best_of(self, front: list[PoolSizes]) -> tuple[float, float] | None:
        """Seconds and price of the best of some sizes that generate in one pool; None if none is fast enough."""
        limit = self.problem.most_step_s
        front = [sizes for sizes in front if limit is None or sizes.step_s <= limit]
        if not front:
            return None
        best = choose_sizes(self.problem, front)
        seconds = float(evaluate(self.sizing, best, self.held_out[best.generation]).step_s.mean())
        return seconds, seconds * self.sizing.price_per_s(best)

    def _sizes_with_migration(self, sizes: PoolSizes) -> tuple[PoolSizes, Migration | None]:
        """The best sizes with their migration: inference beside the tail may make sizes better than the front."""
        if self.migrating.expired:
            return sizes, None
        migration = self._best_migration(sizes)
        best = self._migrated_value(sizes, migration)
        for other in self.result.inference_sizes:
            if self.migrating.expired or other is sizes:
                continue
            other_migration = self._best_migration(other)
            value = np.inf if other_migration is None else self._migrated_value(other, other_migration)
            if value < best:
                sizes, migration, best = other, other_migration, value
        return sizes, migration

    def _migrated_value(self, sizes: PoolSizes, migration: Migration | None) -> float:
        objective, limit = self.problem.objective, self.problem.most_step_s
        short = self.short[sizes.generation]
        if migration is None or self.sizing.generation_inference_s(sizes) == 0:
            return _resimulated(self.sizing, sizes, short, sizes.split).value(objective)
        migrated = _resimulated(self.sizing, sizes, short, sizes.split, migration.ready_s)
        return np.inf if limit is not None and migrated.step_s > limit else migrated.value(objective)

    def _best_migration(self, sizes: PoolSizes) -> Migration | None:
        short = self.short[sizes.generation]

        def step_of(ready_s: Floats) -> float:
            return _resimulated(self.sizing, sizes, short, sizes.split, ready_s).step_s

        inference_s = self.sizing.generation_inference_s(sizes)
        assert isinstance(sizes.split, TailSplit)
        return best_migration(short, sizes.split, self.problem.link, inference_s, self.migrating, step_of)


def _resimulated(
    sizing: SizingProblem, sizes: PoolSizes, dispatcher: Dispatcher, split: Groups, ready_s: Floats | None = None
) -> PoolSizes:
    """The same sizes with another split or other ready times; the number of batches is chosen again."""
    (resimulated,) = candidate_sizes(sizing, sizes.generation, dispatcher, split, ready_s, sizes)
    return resimulated


_TAIL, _REGULAR, _CHOSEN, _WEIGHTS = "#efb118", "#4269d0", "#d0342c", "#6cc5b0"


def draw(request: RlRequest, plan: RlPlan) -> Figure:
    """Histogram of the lengths with samples flagged as long, the Pareto front and the plan, and the stages."""
    figure = new_figure(14, 3.8)
    left, middle, right = figure.subplots(1, 3)
    _draw_lengths(left, request, plan)
    _draw_front(middle, request, plan)
    _draw_stages(right, plan)
    return figure


def _draw_stages(axes: Axes, plan: RlPlan) -> None:
    """Seconds of each stage and each pool, and of the transfer of the weights, beside the step."""
    generation, training, streaming = plan.generation, plan.training, plan.streaming
    bars = [(f"generation, {part.pool}", part.time_s, _REGULAR) for part in generation.parts]
    if not bars:
        bars = [(f"generation, {generation.pool}", generation.time_s, _REGULAR)]
    if generation.stage_s > generation.time_s:
        bars.append(("with inference", generation.stage_s, _REGULAR))
    if training is not None:
        bars.append((f"training, {training.pool}", training.time_s, _TAIL))
    if streaming is not None and streaming.weights_s:
        bars.append(("weights", streaming.weights_s, _WEIGHTS))
        bars.append(("weights, not overlapped", streaming.weights_exposed_s, _WEIGHTS))
    names, seconds, colors = zip(*bars, strict=True)
    axes.barh(range(len(bars)), seconds, color=colors)
    axes.set_yticks(range(len(bars)), names)
    axes.invert_yaxis()
    axes.axvline(plan.step_s, color=_CHOSEN, label="step")
    axes.set(xlabel="seconds", title="Stages of a step")
    axes.legend(fontsize=8)


def _draw_lengths(axes: Axes, request: RlRequest, plan: RlPlan) -> None:
    split, histogram, steps = plan.tail_split, plan.lengths.histogram, max(plan.draws, 1)
    widths = [high - low for low, high in pairwise(histogram.edges)]
    regular = [count / steps for count in histogram.regular]
    tail = [count / steps for count in histogram.tail]
    from matplotlib.ticker import LogFormatter

    labels = ["regular samples", "samples flagged as long"]
    if split.used:
        labels = [
            f"{label}: {group.instances} instances, batch {group.batch}"
            for label, group in zip(labels, (split.regular, split.tail), strict=True)
        ]
    border = f"minimum length of the longest {100 * request.ranker.share:.0f} %"
    axes.bar(histogram.edges[:-1], regular, widths, align="edge", color=_REGULAR, label=labels[0])
    axes.bar(histogram.edges[:-1], tail, widths, align="edge", bottom=regular, color=_TAIL, label=labels[1])
    axes.axvline(plan.lengths.tail_border, color="black", linestyle="--", linewidth=1, label=border)
    axes.set_xscale("log")
    # The default formatters write mathematics, which figures of plans do not read.
    axes.xaxis.set_major_formatter(LogFormatter())
    axes.xaxis.set_minor_formatter(LogFormatter())
    # Leave room for the legend above the bars.
    axes.set_ylim(0, 1.4 * max([1e-9, *(a + b for a, b in zip(regular, tail, strict=True))]))
    axes.set(xlabel="response length (tokens)", ylabel="samples per step", title="Response lengths and tail split")
    axes.legend(fontsize=8)


def _draw_front(axes: Axes, request: RlRequest, plan: RlPlan) -> None:
    priced = any(pool.price_per_hour for pool in request.pools)
    training = plan.training
    units = plan.generation.instances + (0 if training is None or training.shared else training.units)
    label = "Pareto front of sizes, without migration"
    values = [sizes.price if priced else sizes.units for sizes in plan.pareto]
    axes.plot([sizes.step_s for sizes in plan.pareto], values, "o-", color=_REGULAR, markersize=4, label=label)
    value = plan.price_per_step if priced else units
    axes.plot([plan.step_s], [value], "*", color=_CHOSEN, markersize=13, label="the plan")
    axes.axvline(plan.lower_bound_s, color="black", linestyle=":", linewidth=1, label="lower bound of the step time")
    axes.set(
        xlabel="simulated step (s)",
        ylabel="price of a step" if priced else "units",
        title="Step time and price" if priced else "Step time and units",
    )
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
