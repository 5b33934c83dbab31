"""Lengths, rankers, splits: the stated recall, the best split found, and true lengths over seven regimes."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.planning.rl import REGIMES, SEEDS, judge, true_lengths
from cdmpp.errors import FieldError
from cdmpp.planning.rl import Dispatcher, Engine, Lengths, Queues, Ranker, Split, draw_steps, generate
from cdmpp.planning.rl.lengths import Misses

PAST = true_lengths(20_000, 7)


def test_quantiles_give_back_the_distribution_that_they_are_of() -> None:
    levels = {level: float(np.exp(7 + 0.9 * NormalDist().inv_cdf(level))) for level in (0.1, 0.5, 0.9)}
    lengths = Lengths.of_quantiles(levels, 1024)
    drawn = lengths.draw(np.random.default_rng(0), 50_000)
    logs = np.log(drawn)
    assert logs.mean() == pytest.approx(7, abs=0.02)
    assert logs.std() == pytest.approx(0.9, rel=0.02)
    # The longest that a step of 1,024 is expected to hold.
    top = np.exp(7 + 0.9 * NormalDist().inv_cdf(1 - 0.5 / 1024))
    assert lengths.longest == pytest.approx(top, rel=1e-3)
    assert drawn.max() == lengths.longest
    assert lengths.median() == pytest.approx(np.exp(7), rel=1e-3)


def test_levels_zero_and_one_and_a_limit_end_the_distribution() -> None:
    lengths = Lengths.of_quantiles({0.0: 10, 0.5: 100, 1.0: 4000}, 64)
    drawn = lengths.draw(np.random.default_rng(1), 20_000)
    assert lengths.longest == drawn.max() == 4000
    assert Lengths.of_quantiles({0.5: 100, 1.0: 4000}, 64, longest=900).longest == 900
    assert Lengths.of_samples([5, 700], longest=600).draw(np.random.default_rng(0), 50).max() == 600
    assert set(Lengths.of_samples([5, 700]).draw(np.random.default_rng(0), 50)) == {5, 700}


def test_lengths_that_fall_are_refused() -> None:
    with pytest.raises(FieldError, match="fall"):
        Lengths.of_quantiles({0.5: 100, 0.9: 90}, 64)


@pytest.mark.parametrize("misses", ["near", "any"])
@pytest.mark.parametrize(("recall", "share"), [(0.87, 0.2), (0.5, 0.3), (1.0, 0.1), (0.2, 0.2)])
def test_a_ranker_errs_as_much_as_it_is_said_to(misses: Misses, recall: float, share: float) -> None:
    drawn = draw_steps(Lengths.of_samples(PAST.tolist()), Ranker(recall, share, misses), 1000, 20, 3)
    assert drawn.tail == round(1000 * share)
    border = np.sort(drawn.lengths, axis=1)[:, -drawn.tail]
    hits = (drawn.lengths[:, : drawn.tail] >= border[:, None]).mean()
    assert hits == pytest.approx(recall, abs=0.02)


@settings(max_examples=20, deadline=None)
@given(instances=st.integers(2, 9), slope=st.floats(0, 0.01), cap=st.integers(1, 40), seed=st.integers(0, 99))
def test_the_best_split_is_the_best_of_all(instances: int, slope: float, cap: int, seed: int) -> None:
    steps = draw_steps(Lengths.of_samples(PAST.tolist()), Ranker(1.0, 0.2), 120, 2, seed)
    dispatcher = Dispatcher(Engine(0.01 + slope * np.arange(cap + 1)), steps)

    def gain(tail: int) -> float:
        return float(dispatcher.gains(Split(tail, instances - tail)).mean())

    best = max(gain(tail) for tail in range(1, instances))
    found = dispatcher.best_split(instances)
    assert found.instances == instances
    # Means of few steps are not quite smooth in the split.
    assert gain(found.tail) >= best - 0.02


def test_ends_of_groups_are_those_of_their_queues_together() -> None:
    steps = draw_steps(Lengths.of_samples(PAST.tolist()), Ranker(), 200, 3, 0)
    dispatcher = Dispatcher(Engine(0.01 + 1e-4 * np.arange(9)), steps)
    for split in (Split(0, 5), Split(2, 3), Split(4, 1)):
        assert dispatcher.finish(split).max(1).tolist() == dispatcher.ends(split).tolist()
        queues = split.queues(200, steps.tail)
        assert sorted(queues.members.tolist()) == list(range(200))
        assert queues.instances == 5
        if split.tail:
            assert queues.takers.tolist() == [0, split.tail, 5]
            assert (queues.members[: queues.starts[1]] < steps.tail).all()
    assert (dispatcher.random_finish(5) > 0).all()


@settings(max_examples=20, deadline=None)
@given(instances=st.integers(1, 12), cap=st.integers(1, 60), seed=st.integers(0, 99))
def test_no_dispatch_ends_before_its_bound(instances: int, cap: int, seed: int) -> None:
    steps = draw_steps(Lengths.of_samples(PAST.tolist()), Ranker(), 64, 2, seed)
    dispatcher = Dispatcher(Engine(0.01 + 1e-3 * np.arange(cap + 1), prefill_s=0.1), steps)
    bound = dispatcher.bound(instances) * (1 - 1e-12)
    assert (dispatcher.floor() <= bound * (1 + 1e-9)).all()
    for tail in range(instances):
        assert (dispatcher.ends(Split(tail, instances - tail)) >= bound).all()
    assert (dispatcher.random_finish(instances).max(1) >= bound).all()
    assert (dispatcher.guessed_finish(instances).max(1) >= bound).all()


def test_longest_first_balances_instances_that_decode_one_sample_at_a_time() -> None:
    steps = draw_steps(Lengths.of_samples(PAST.tolist()), Ranker(1.0, 0.5), 400, 4, 0)
    dispatcher = Dispatcher(Engine(np.array([0.0, 0.01])), steps)
    # Graham's bound for longest first, of which the ranker knows one half from the other only.
    assert (dispatcher.ends(Split(0, 8)) <= 4 / 3 * dispatcher.bound(8)).all()
    assert dispatcher.ends(Split(0, 8)).mean() < dispatcher.random_finish(8).max(1).mean()


@pytest.mark.parametrize("recall", [0.87, 1.0])
@pytest.mark.parametrize(("kind", "cap"), [("narrow", 16), ("uniform", 16), ("uniform", 32), ("cut", 16)])
def test_one_queue_is_shorter_than_dealing_where_the_batch_makes_several_waves(
    kind: str, cap: int, recall: float
) -> None:
    rng = np.random.default_rng(0)
    drawn = {
        "narrow": lambda: rng.lognormal(np.log(2000), 0.4, 20_000),
        "uniform": lambda: rng.uniform(10, 8000, 20_000),
        "cut": lambda: rng.lognormal(np.log(6000), 1.0, 20_000),
    }[kind]()
    past = np.clip(np.rint(drawn), 1, 16_384).astype(np.int64)
    steps = draw_steps(Lengths.of_samples(past.tolist()), Ranker(recall, 0.2, "near"), 1024, 4, 0)
    engine = Engine(0.008 + 2e-5 * np.arange(cap + 1))
    dealt = np.array([generate(engine, row, Queues.dealt(1024, 16)).end_s for row in steps.lengths])
    ends = Dispatcher(engine, steps).ends(Split(0, 16))
    # A ranker that errs may make one step a little longer, never the mean.
    assert (ends <= 1.01 * dealt).all()
    assert ends.mean() < 0.995 * dealt.mean()


def test_one_queue_is_dealing_where_all_samples_run_at_once() -> None:
    steps = draw_steps(Lengths.of_samples(PAST.tolist()), Ranker(), 256, 1, 0)
    engine = Engine(0.008 + 5e-5 * np.arange(33), prefill_s=0.25, prompt_tokens=100)
    shared, dealt = (generate(engine, steps.lengths[0], one(256, 8)) for one in (Queues.shared, Queues.dealt))
    assert shared.finish_s.tobytes() == dealt.finish_s.tobytes()
    assert shared.home.tolist() == [number % 8 for number in range(256)]


def test_doubt_of_the_ranker_moves_the_split_to_fewer_instances_or_to_none() -> None:
    lengths, engine = Lengths.of_samples(PAST.tolist()), Engine(0.008 + 1e-4 * np.arange(129))
    near = draw_steps(lengths, Ranker(0.87, 0.2, "near"), 2048, 6, 0)
    rough = draw_steps(lengths, Ranker(0.87, 0.2, "any"), 2048, 6, 1)
    tails = [Dispatcher(engine, near, rough, doubt).best(16).tail for doubt in (0.0, 0.1, 1.0)]
    assert tails[0] >= tails[1] > tails[2] == 0


def test_the_rule_by_quantiles_is_as_it_is_written() -> None:
    steps = draw_steps(Lengths.of_samples(PAST.tolist()), Ranker(), 1000, 1, 0)
    engine = Engine(0.008 + 2e-5 * np.arange(33))
    median, high = np.quantile(steps.lengths, [0.5, 0.9])

    def seconds(samples: int, instances: int, length: float) -> float:
        each = int(np.ceil(samples / instances))
        batch = min(each, 32)
        return float((0.008 + 2e-5 * batch) * length * np.ceil(each / batch))

    times = {k: (seconds(200, k, high), seconds(800, 10 - k, median)) for k in range(1, 10)}
    dispatcher = Dispatcher(engine, steps)
    assert dispatcher.by_rule(10).tail == min(times, key=lambda k: (max(times[k]), k))
    assert dispatcher.by_rule(10, "sum").tail == min(times, key=lambda k: (sum(times[k]), k))


@pytest.mark.parametrize("regime", REGIMES, ids=str)
def test_on_true_lengths_a_split_is_no_worse_than_longest_first_and_near_the_best(
    regime: tuple[float, float, int, int, int],
) -> None:
    """The planner knows past lengths and a recall; the step's lengths and the ranker's errors are others."""
    a_s, b_s, samples, instances, cap = regime
    lengths = Lengths.of_samples(PAST.tolist())
    near = draw_steps(lengths, Ranker(0.87, 0.2, "near"), samples, 8, 5)
    rough = draw_steps(lengths, Ranker(0.87, 0.2, "any"), samples, 8, 6)
    split = Dispatcher(Engine(a_s + b_s * np.arange(cap + 1)), near, rough, 0.1).best(instances)
    for seed in SEEDS:
        ends = judge(regime, seed, "near", split)
        assert ends["plan"] <= 1.01 * ends["lpt"]
        assert ends["plan"] <= 1.02 * ends["best"]
        assert ends["plan"] < ends["guesses"] * 1.01
        assert ends["floor"] <= ends["best"]


def test_a_generation_is_deterministic() -> None:
    engine = Engine(0.01 + 1e-4 * np.arange(17))
    steps = draw_steps(Lengths.of_samples(PAST.tolist()), Ranker(), 256, 1, 9)
    again = draw_steps(Lengths.of_samples(PAST.tolist()), Ranker(), 256, 1, 9)
    queues = Queues.dealt(256, 4)
    first, second = (generate(engine, each.lengths[0], queues) for each in (steps, again))
    assert first.finish_s.tobytes() == second.finish_s.tobytes()
