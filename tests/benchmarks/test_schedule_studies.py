"""Variants of training: which rows they train on, and that a run is made once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.schedules.feature_groups import GROUPS, columns_of
from benchmarks.schedules.methods import Contest, cost_ratio
from benchmarks.schedules.parts import Scheduled, Split
from benchmarks.schedules.runs import Run, claimed, stored
from benchmarks.schedules.variants import STUDIES, Variant, keep_origins, keep_tasks, prepared, without_columns
from cdmpp.data.splits import TRAIN
from cdmpp.errors import DataError
from cdmpp.features.schedule import SCHEDULE_WIDTH
from cdmpp.features.schema import WIDTH
from cdmpp.train.config import TrainConfig
from cdmpp.train.draw import target_rows
from tests.benchmarks.scheduled import networks, tasks, trained

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def split(scheduled: Scheduled, scheduled_config: TrainConfig) -> Split:
    return scheduled.split("development", scheduled_config)


def test_groups_of_features_are_five_sets_of_schedule_columns_without_overlap() -> None:
    columns = np.concatenate([columns_of(group) for group in GROUPS])
    assert len(GROUPS) == 5 and all(len(columns_of(group)) for group in GROUPS)
    assert len(set(columns.tolist())) == len(columns)
    assert columns.min() >= WIDTH and columns.max() < WIDTH + SCHEDULE_WIDTH


@pytest.mark.parametrize("sampler", ["random", "kmeans"])
def test_chosen_tasks_are_training_tasks_with_all_their_schedules(
    scheduled: Scheduled, split: Split, sampler: str
) -> None:
    part = keep_tasks(scheduled, split.part, sampler, 6, seed=0)
    before, after = (np.flatnonzero(p == TRAIN) for p in (split.part, part))
    kept = tasks(scheduled, after)
    assert len(kept) == 6 and kept < tasks(scheduled, before)
    names = [scheduled.table.tvm.tasks[key] for key in scheduled.dataset.rows.program[before].tolist()]
    assert len(after) == sum(name in kept for name in names)
    assert (part != TRAIN)[split.part != TRAIN].all()
    with pytest.raises(DataError, match="training tasks cannot be chosen"):
        keep_tasks(scheduled, split.part, sampler, 1000, seed=0)


def test_random_and_active_schedules_are_compared_on_equal_numbers(scheduled: Scheduled, split: Split) -> None:
    counts = {}
    for origins in ((), ("sampled",), ("active",)):
        index = np.flatnonzero(keep_origins(scheduled, split.part, origins, seed=0) == TRAIN)
        programs = np.unique(scheduled.dataset.rows.program[index])
        assert set(scheduled.origin[programs]) == {"default", *origins}
        counts[origins] = np.bincount(scheduled.dataset.task[programs], minlength=100).tolist()
    assert counts[("sampled",)] == counts[("active",)] and sum(counts[("active",)]) == 3 * sum(counts[()])
    alone = scheduled.origin.copy()
    alone[alone == "active"] = "good"
    with pytest.raises(DataError, match="no training task has schedules of the origins sampled, active"):
        keep_origins(Scheduled(scheduled.table, scheduled.dataset, (), (), alone), split.part, ("active",), seed=0)


def test_a_domain_loss_reads_features_of_unseen_networks_and_no_labels(
    scheduled: Scheduled, split: Split, scheduled_config: TrainConfig
) -> None:
    with_loss = Contest(*prepared(scheduled, split, scheduled_config, Variant(domain=("cmd", 0.1)), seed=0))
    without = Contest(*prepared(scheduled, split, scheduled_config, Variant(), seed=0))
    assert with_loss.train.tolist() == without.train.tolist()
    target = target_rows(with_loss.dataset, with_loss.config)
    assert target.tolist() == split.tests["networks"].tolist()
    assert networks(scheduled, with_loss.train).isdisjoint(scheduled.development_networks)
    by_task = scheduled.split("task", scheduled_config)
    with pytest.raises(DataError, match="no unseen networks as a target"):
        prepared(scheduled, by_task, scheduled_config, Variant(domain=("cmd", 0.1)), seed=0)


def test_a_group_of_features_is_zero_and_the_others_stay(scheduled: Scheduled) -> None:
    columns = columns_of(next(iter(GROUPS)))
    changed = without_columns(scheduled.dataset, columns)
    for size, bucket in scheduled.dataset.store.buckets.items():
        leaves = changed.store.buckets[size].leaves
        assert not leaves[:, :, columns].any()
        np.testing.assert_array_equal(np.delete(leaves, columns, axis=2), np.delete(bucket.leaves, columns, axis=2))


def test_variants_of_equal_content_are_one_run(
    scheduled: Scheduled, split: Split, scheduled_config: TrainConfig, tmp_path: Path
) -> None:
    default, pairwise, none = (
        Run(scheduled, split, scheduled_config, variant, 0, tmp_path)
        for variant in (Variant(), STUDIES["ranking loss"]["pairwise, weight 0.05"], STUDIES["ranking loss"]["none"])
    )
    assert default.key == pairwise.key != none.key
    assert Run(scheduled, split, scheduled_config, Variant(), 1, tmp_path).key != default.key
    assert Run(scheduled, split, scheduled_config, Variant(without=next(iter(GROUPS))), 0, tmp_path).key != default.key
    result = default.result()
    assert result["figures"].keys() == {"networks", "tasks"}
    assert result["train_tasks"] == len(tasks(scheduled, trained(split)))
    assert pairwise.file.is_file() and stored(pairwise.file, lambda: {"made": "again"}) == result


def test_a_run_is_claimed_by_one_process(tmp_path: Path) -> None:
    file = tmp_path / "runs" / "a.json"
    with claimed(file, wait=False) as mine, claimed(file, wait=False) as second:
        assert mine and not second
    with claimed(file, wait=False) as again:
        assert again


def test_cost_is_relative_to_the_first_method() -> None:
    def work(times: int):
        return lambda rows: [np.sort(rows) for _ in range(times)] and rows

    rows = np.random.default_rng(0).random(20_000)
    assert cost_ratio(work(1), work(10), rows) > 2  # type: ignore[arg-type]
