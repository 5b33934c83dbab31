"""Lengths, rankers and dispatch: the given recall, the best split, baselines, and true lengths in seven regimes."""

from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdmpp.plan.rl.dispatch import Dispatcher, TailSplit
from cdmpp.plan.rl.generation import GenerationEngine
from cdmpp.plan.rl.lengths import LengthDistribution, Misses, RankerForm, SampledSteps, draw_steps
from tests.plan.rl_cases import ranker

pytestmark = pytest.mark.slow

#: Decode curve a_s + b_s * batch; samples; instances; largest batch of an instance.
Regime = tuple[float, float, int, int, int]
REGIMES: tuple[Regime, ...] = (
    (0.008, 0.00002, 1024, 16, 16),
    (0.008, 0.00002, 1024, 16, 32),
    (0.008, 0.00002, 1024, 16, 64),
    (0.008, 0.0001, 2048, 16, 128),
    (0.008, 0.0001, 4096, 16, 256),
    (0.008, 0.00005, 2048, 8, 128),
    (0.01, 0.00003, 1024, 8, 128),
)


def true_lengths(count: int, seed: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Draw response lengths in tokens: log-normal, truncated."""
    drawn = np.random.default_rng(seed).lognormal(np.log(1500), 0.9, count)
    return np.clip(np.rint(drawn), 1, 20_480).astype(np.int64)


def true_step_s(regime: Regime, seed: int, split: TailSplit) -> dict[str, float]:
    """Seconds of one step with its true lengths: the plan's split and alternatives."""
    a_s, b_s, samples, instances, max_batch = regime
    lengths = true_lengths(samples, 20_000 + seed)
    rng = np.random.default_rng([seed, 30_000])
    near = ranker(0.87, 0.2, "near")
    row = lengths[near.rank(lengths, rng)]
    guesses = row * np.exp(0.5 * rng.standard_normal(samples))
    step = SampledSteps(row[None], near.tail_samples(samples), rng.permutation(samples)[None], guesses[None])
    dispatcher = Dispatcher(GenerationEngine(a_s + b_s * np.arange(max_batch + 1)), step)
    makespans = [float(dispatcher.makespans(TailSplit(tail, instances - tail))[0]) for tail in range(instances)]
    return {
        "lpt": makespans[0],
        "guesses": float(dispatcher.guessed_finish_times(instances).max()),
        "plan": float(dispatcher.makespans(split)[0]),
        "best": min(makespans),
        "floor": float(dispatcher.longest_alone_s()[0]),
    }


PAST = true_lengths(20_000, 7)


def sample_steps(ranker: RankerForm, samples: int, draws: int, seed: int) -> SampledSteps:
    return draw_steps(LengthDistribution.of_samples(PAST.tolist()), ranker, samples, draws, seed)


def test_quantiles_of_a_log_normal_distribution_give_it_back() -> None:
    levels = {level: float(np.exp(7 + 0.9 * NormalDist().inv_cdf(level))) for level in (0.1, 0.5, 0.9)}
    lengths = LengthDistribution.of_quantiles(levels, 1024)
    drawn = lengths.draw(np.random.default_rng(0), 50_000)
    logs = np.log(drawn)
    assert logs.mean() == pytest.approx(7, abs=0.02)
    assert logs.std() == pytest.approx(0.9, rel=0.02)
    # The longest response expected in a step of 1,024 samples.
    top = np.exp(7 + 0.9 * NormalDist().inv_cdf(1 - 0.5 / 1024))
    assert lengths.longest == pytest.approx(top, rel=1e-3)
    assert drawn.max() == lengths.longest
    assert lengths.median() == pytest.approx(np.exp(7), rel=1e-3)


def test_levels_zero_and_one_and_the_token_limit_end_the_distribution() -> None:
    lengths = LengthDistribution.of_quantiles({0.0: 10, 0.5: 100, 1.0: 4000}, 64)
    drawn = lengths.draw(np.random.default_rng(1), 20_000)
    assert lengths.longest == drawn.max() == 4000
    assert LengthDistribution.of_quantiles({0.5: 100, 1.0: 4000}, 64, longest=900).longest == 900
    assert LengthDistribution.of_samples([5, 700], longest=600).draw(np.random.default_rng(0), 50).max() == 600
    assert set(LengthDistribution.of_samples([5, 700]).draw(np.random.default_rng(0), 50)) == {5, 700}


@pytest.mark.parametrize("misses", ["near", "any"])
@pytest.mark.parametrize(("recall", "share"), [(0.87, 0.2), (0.5, 0.3), (1.0, 0.1), (0.2, 0.2)])
def test_simulated_ranker_has_the_given_recall(misses: Misses, recall: float, share: float) -> None:
    steps = sample_steps(ranker(recall, share, misses), 1000, 20, 3)
    assert steps.tail_samples == round(1000 * share)
    border = np.sort(steps.lengths, axis=1)[:, -steps.tail_samples]
    hits = (steps.lengths[:, : steps.tail_samples] >= border[:, None]).mean()
    assert hits == pytest.approx(recall, abs=0.02)


@settings(max_examples=20)
@given(instances=st.integers(2, 9), slope=st.floats(0, 0.01), max_batch=st.integers(1, 40), seed=st.integers(0, 99))
def test_best_split_equals_exhaustive_search(instances: int, slope: float, max_batch: int, seed: int) -> None:
    steps = sample_steps(ranker(1.0, 0.2), 120, 2, seed)
    dispatcher = Dispatcher(GenerationEngine(0.01 + slope * np.arange(max_batch + 1)), steps)

    def gain(tail: int) -> float:
        return float(dispatcher.gains(TailSplit(tail, instances - tail)).mean())

    best = max(gain(tail) for tail in range(1, instances))
    split = dispatcher.best_split(instances)
    assert split.instances == instances
    # Means of few steps are not exactly unimodal in the split.
    assert gain(split.tail) >= best - 0.02


def test_makespans_of_groups_equal_those_of_their_queues_together() -> None:
    steps = sample_steps(ranker(), 200, 3, 0)
    dispatcher = Dispatcher(GenerationEngine(0.01 + 1e-4 * np.arange(9)), steps)
    for split in (TailSplit(0, 5), TailSplit(2, 3), TailSplit(4, 1)):
        assert dispatcher.finish_times(split).max(1).tolist() == dispatcher.makespans(split).tolist()
        queues = split.queues(200, steps.tail_samples)
        assert sorted(queues.members.tolist()) == list(range(200))
        assert queues.instances == 5
        if split.tail:
            assert queues.first_instances.tolist() == [0, split.tail, 5]
            assert (queues.members[: queues.starts[1]] < steps.tail_samples).all()
    assert (dispatcher.random_finish_times(5) > 0).all()


@settings(max_examples=20)
@given(instances=st.integers(1, 12), max_batch=st.integers(1, 60), seed=st.integers(0, 99))
def test_no_dispatch_is_below_the_lower_bound(instances: int, max_batch: int, seed: int) -> None:
    steps = sample_steps(ranker(), 64, 2, seed)
    dispatcher = Dispatcher(GenerationEngine(0.01 + 1e-3 * np.arange(max_batch + 1), prefill_s=0.1), steps)
    bound = dispatcher.lower_bound_s(TailSplit(0, instances)) * (1 - 1e-12)
    assert (dispatcher.longest_alone_s() <= bound * (1 + 1e-9)).all()
    for tail in range(instances):
        assert (dispatcher.makespans(TailSplit(tail, instances - tail)) >= bound).all()
    assert (dispatcher.random_finish_times(instances).max(1) >= bound).all()
    assert (dispatcher.guessed_finish_times(instances).max(1) >= bound).all()


def test_longest_first_balances_instances_of_batch_one() -> None:
    steps = sample_steps(ranker(1.0, 0.5), 400, 4, 0)
    dispatcher = Dispatcher(GenerationEngine(np.array([0.0, 0.01])), steps)
    # Graham's bound for longest first, although the ranker only separates the longer half.
    assert (dispatcher.makespans(TailSplit(0, 8)) <= 4 / 3 * dispatcher.lower_bound_s(TailSplit(0, 8))).all()
    assert dispatcher.makespans(TailSplit(0, 8)).mean() < dispatcher.random_finish_times(8).max(1).mean()


def test_doubt_of_the_ranker_reduces_the_tail_instances_down_to_no_split() -> None:
    engine = GenerationEngine(0.008 + 1e-4 * np.arange(129))
    near = sample_steps(ranker(0.87, 0.2, "near"), 2048, 6, 0)
    pessimistic = sample_steps(ranker(0.87, 0.2, "any"), 2048, 6, 1)
    tails = [Dispatcher(engine, near, pessimistic, doubt).choose_split(16).tail for doubt in (0.0, 0.1, 1.0)]
    assert tails[0] >= tails[1] > tails[2] == 0


def test_quantile_rule_follows_its_definition() -> None:
    steps = sample_steps(ranker(), 1000, 1, 0)
    engine = GenerationEngine(0.008 + 2e-5 * np.arange(33))
    median, high = np.quantile(steps.lengths, [0.5, 0.9])

    def seconds(samples: int, instances: int, length: float) -> float:
        samples_each = int(np.ceil(samples / instances))
        batch = min(samples_each, 32)
        return float((0.008 + 2e-5 * batch) * length * np.ceil(samples_each / batch))

    times = {tail: (seconds(200, tail, high), seconds(800, 10 - tail, median)) for tail in range(1, 10)}
    dispatcher = Dispatcher(engine, steps)
    assert dispatcher.quantile_rule_split(10).tail == min(times, key=lambda tail: (max(times[tail]), tail))


@pytest.mark.parametrize("regime", REGIMES, ids=str)
def test_split_on_true_lengths_is_no_worse_than_longest_first_and_near_the_best(regime: Regime) -> None:
    """The planner has past lengths and a recall; the lengths and ranking errors of the step are different ones."""
    a_s, b_s, samples, instances, max_batch = regime
    near = sample_steps(ranker(0.87, 0.2, "near"), samples, 8, 5)
    pessimistic = sample_steps(ranker(0.87, 0.2, "any"), samples, 8, 6)
    engine = GenerationEngine(a_s + b_s * np.arange(max_batch + 1))
    split = Dispatcher(engine, near, pessimistic, 0.1).choose_split(instances)
    for seed in range(3):
        ends = true_step_s(regime, seed, split)
        assert ends["plan"] <= 1.01 * ends["lpt"]
        assert ends["plan"] <= 1.02 * ends["best"]
        assert ends["plan"] < ends["guesses"] * 1.01
        assert ends["floor"] <= ends["best"]
