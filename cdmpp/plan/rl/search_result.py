"""Result of the search for a plan of an RL step."""

from __future__ import annotations

from dataclasses import dataclass

from cdmpp.plan.rl.dispatch import TailSplit
from cdmpp.plan.rl.evaluate import StepOutcome
from cdmpp.plan.rl.lengths import SampledSteps
from cdmpp.plan.rl.migration import Migration
from cdmpp.plan.rl.plan_schema import ElasticPart
from cdmpp.plan.rl.sizes import AnyDispatcher, PoolSizes


@dataclass(frozen=True)
class SearchResult:
    """The chosen plan, its baselines and its bounds, all on held-out steps.

    Attributes
    ----------
    sizes : PoolSizes
        ``step_s`` and ``price`` are means over the held-out steps.
    outcome : StepOutcome
    migration : Migration or None
    migration_applied : bool
        Whether ``outcome`` includes the migration.
    dispatches : dict of str to StepOutcome
        Baselines of the dispatch with the same units. In one pool: ``lpt`` (longest first, without split and
        migration), ``random``, ``rule`` (StreamRL's split by quantiles), ``guesses`` (splits that trust guesses of
        lengths). In several: ``random`` and ``proportional`` (samples in proportion to throughput).
    one_pool : (float, float) or None
        Baseline of a mix: seconds and price of the best plan that generates in one pool, without split and migration.
    unstreamed : StepOutcome
        Baseline: training after generation, in one batch.
    unmigrated : StepOutcome
        Baseline: the plan without migration.
    colocated : (float, float) or None
        Baseline: seconds and price if all units of one pool generate and then train.
    best_split : TailSplit
        The best split into two groups, used or not; no split if the search ended before.
    longest_alone_s : float
        Decoding of the longest sample alone.
    bound_s, bound_price : float
        Lower bounds of the step over all sizes.
    generation_bound_s : float
        Lower bound of generation with these units.
    front : list of PoolSizes
        The Pareto front of time and price.
    elastic : list of ElasticPart
        Empty without separate training and for a mix; shorter if the search ended before.
    sizes_tried : int
        Number of generation sizes that were simulated.
    complete : bool
        Whether all sizes were simulated.
    left_out : dict of str to str
        Name of each pool whose memory is too small, and the reason.
    judge : Dispatcher or MixDispatcher
        Dispatcher of the units that generate, on the held-out steps.
    """

    sizes: PoolSizes
    outcome: StepOutcome
    migration: Migration | None
    migration_applied: bool
    dispatches: dict[str, StepOutcome]
    one_pool: tuple[float, float] | None
    unstreamed: StepOutcome
    unmigrated: StepOutcome
    colocated: tuple[float, float] | None
    best_split: TailSplit
    longest_alone_s: float
    bound_s: float
    bound_price: float
    generation_bound_s: float
    front: list[PoolSizes]
    elastic: list[ElasticPart]
    sizes_tried: int
    complete: bool
    left_out: dict[str, str]
    judge: AnyDispatcher

    @property
    def steps(self) -> SampledSteps:
        """The held-out steps."""
        return self.judge.steps
