"""Order within tasks: against a count by hand and scipy's tau."""

import numpy as np
import pytest
from scipy.stats import kendalltau

from cdmpp.train.evaluation.metrics import MIN_PROGRAMS, rank


def test_one_group_by_hand() -> None:
    measured = np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0])
    # The program of 4 s is predicted fastest; the best one comes sixth.
    predicted = np.array([6.0, 5.0, 7.0, 1.0, 2.0, 3.0, 4.0, 8.0, 9.0, 10.0])
    found = rank(predicted, measured, np.zeros(10, dtype=np.int64), np.arange(10))
    assert found["top1_score"] == pytest.approx(1 / 4)
    assert found["top5_score"] == pytest.approx(1 / 2)  # 4, 5, 6, 7 and 2
    assert found["task_kendall_tau"] == pytest.approx(kendalltau(predicted, measured).statistic)
    assert found["ranked_groups"] == 1


def test_groups_weigh_the_same_and_small_ones_do_not_count() -> None:
    rng = np.random.default_rng(0)
    sizes = (MIN_PROGRAMS, 40, MIN_PROGRAMS - 1)
    group = np.repeat([3, 0, 5], sizes)
    measured, program = rng.random(len(group)) + 0.1, np.arange(len(group))
    predicted = np.where(group == 3, measured, -measured)
    shuffled = rng.permutation(len(group))
    found = rank(predicted[shuffled], measured[shuffled], group[shuffled], program[shuffled])
    assert found["ranked_groups"] == 2
    assert found["task_kendall_tau"] == pytest.approx(0.0)  # one perfect, one reversed
    members = measured[group == 0]
    worst_first = np.sort(members)[::-1]
    assert found["top1_score"] == pytest.approx((1 + members.min() / worst_first[0]) / 2)
    assert found["top5_score"] == pytest.approx((1 + members.min() / worst_first[4]) / 2)


def test_rows_without_a_task_and_repeated_programs() -> None:
    measured = np.arange(1.0, 9.0)
    group = np.zeros(8, dtype=np.int64)
    twice = np.concatenate([np.arange(8), np.arange(8)])
    found = rank(measured[twice], measured[twice], group[twice], twice)
    assert found.pop("task_kendall_tau") == pytest.approx(1.0)
    assert found == {"top1_score": 1.0, "top5_score": 1.0, "ranked_groups": 1}
    few = rank(measured[twice], measured[twice], group[twice], twice % 4)
    assert few["ranked_groups"] == 0
    assert few["top1_score"] is None
    assert rank(measured, measured, group - 1, np.arange(8))["ranked_groups"] == 0


def test_equal_predictions_say_nothing() -> None:
    measured = np.tile(np.arange(1.0, 21.0), 200)
    group, program = np.repeat(np.arange(200), 20), np.tile(np.arange(20), 200)
    found = rank(np.ones(4000), measured, group, program)
    assert found["task_kendall_tau"] == 0.0
    # A program drawn at random: the mean of 1/1 ... 1/20, not the first row of the file.
    assert found["top1_score"] == pytest.approx(np.mean(1 / np.arange(1, 21)), abs=0.06)
