"""Variants of training that the studies of scheduled programs compare."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from benchmarks.schedules.feature_groups import GROUPS, columns_of
from benchmarks.schedules.parts import Array, Scheduled, Split
from cdmpp.data.splits import TRAIN, UNUSED
from cdmpp.errors import DataError
from cdmpp.features.schema import WIDTH
from cdmpp.model.nn.discrepancy import Discrepancy
from cdmpp.model.nn.store import ProgramStore
from cdmpp.train.adaptation.samplers import choose
from cdmpp.train.baselines import summed_leaves
from cdmpp.train.config import TrainConfig
from cdmpp.train.dataset import Dataset

Domain = tuple[Discrepancy, float]


@dataclass(frozen=True)
class Variant:
    """How one variant differs from the configuration.

    Attributes
    ----------
    optimiser : mapping
        Changed fields of ``TrainConfig.optimiser``.
    domain : (loss, weight), optional
        Distance to the unlabelled programs of the test networks.
    tasks : (sampler, number), optional
        Training tasks to keep, chosen by features of their default program.
    origins : tuple of str, optional
        Keep of each training task its default schedule and the same number of schedules of these origins, for every
        variant of the study; tasks without all of :data:`COMPARED` are left out.
    without : str
        Group of features that is set to 0 (:mod:`benchmarks.schedules.feature_groups`).
    """

    optimiser: Mapping[str, Any] = field(default_factory=dict)
    domain: Domain | None = None
    tasks: tuple[str, int] | None = None
    origins: tuple[str, ...] | None = None
    without: str = ""


#: Origins that the study of schedules compares.
COMPARED = ("sampled", "active")


def _ranking(kind: str, weight: float) -> Variant:
    return Variant(optimiser={"ranking": kind, "ranking_weight": weight})


_LOSSES: tuple[Discrepancy, ...] = ("cmd", "coral")
STUDIES: dict[str, dict[str, Variant]] = {
    "domain loss": {
        "none": Variant(),
        **{
            f"{loss.upper()}, weight {weight:g}": Variant(domain=(loss, weight))
            for loss in _LOSSES
            for weight in (0.1, 1.0)
        },
    },
    "choice of tasks": {
        f"{sampler}, {count} tasks": Variant(tasks=(sampler, count))
        for count in (150, 300, 600)
        for sampler in ("random", "kmeans")
    },
    "choice of schedules": {
        "default schedules alone": Variant(origins=()),
        "default and random": Variant(origins=("sampled",)),
        "default and active": Variant(origins=("active",)),
    },
    "feature groups": {"all": Variant(), **{f"without {group}": Variant(without=group) for group in GROUPS}},
    "ranking loss": {
        "none": _ranking("pairwise", 0.0),
        **{
            f"{kind}, weight {weight:g}": _ranking(kind, weight)
            for kind in ("pairwise", "listwise")
            for weight in (0.05, 0.2, 0.5)
        },
    },
}


def prepared(
    data: Scheduled, split: Split, config: TrainConfig, variant: Variant, seed: int
) -> tuple[Scheduled, Split, TrainConfig]:
    """Data, split and configuration of one run.

    Raises
    ------
    DataError
        The data have too few tasks, no schedules of an origin, or no unseen networks for a domain loss.
    """
    optimiser = config.optimiser.model_copy(update={**variant.optimiser, "threads": 1})
    config = config.model_copy(update={"optimiser": optimiser, "seed": seed})
    part = split.part
    if variant.tasks is not None:
        part = keep_tasks(data, part, *variant.tasks, seed)
    if variant.origins is not None:
        part = keep_origins(data, part, variant.origins, seed)
    if variant.domain is not None:
        part, config = with_target(data, replace(split, part=part), config, variant.domain)
    if variant.without:
        data = replace(data, dataset=without_columns(data.dataset, columns_of(variant.without)))
    return data, replace(split, part=part), config


def keep_tasks(data: Scheduled, part: Array, sampler: str, count: int, seed: int) -> Array:
    """Parts where only ``count`` of the training tasks are left to train on.

    KMeans chooses by the features of each task's default schedule, summed over leaves, without latencies.
    """
    task = data.dataset.task
    programs = np.unique(data.dataset.rows.program[part == TRAIN])
    programs = programs[task[programs] >= 0]
    # The default schedule first; a task without one is represented by its first program.
    programs = programs[np.lexsort((programs, data.origin[programs] != "default", task[programs]))]
    _, first = np.unique(task[programs], return_index=True)
    programs = programs[first]
    if count >= len(programs):
        raise DataError(f"{count} of {len(programs)} training tasks cannot be chosen", hint="collect more tasks")
    features = summed_leaves(data.dataset)[programs, :WIDTH]
    chosen = choose(sampler, features, np.zeros(len(programs), dtype=np.int64), count, seed)
    kept = np.isin(task[data.dataset.rows.program], task[programs[chosen]])
    return np.where((part == TRAIN) & ~kept, np.int8(UNUSED), part)


def keep_origins(data: Scheduled, part: Array, origins: tuple[str, ...], seed: int) -> Array:
    """Parts where each training task keeps its default schedule and as many schedules of ``origins`` as others have.

    The number is the smallest count over :data:`COMPARED`; of more schedules a seeded sample is kept.
    """
    task, origin = data.dataset.task, data.origin
    programs = np.unique(data.dataset.rows.program[part == TRAIN])
    rng = np.random.default_rng([seed, 31])
    kept: list[int] = []
    programs = programs[np.argsort(task[programs], kind="stable")]
    for members in np.split(programs, np.flatnonzero(np.diff(task[programs])) + 1):
        count = min(int((origin[members] == name).sum()) for name in COMPARED)
        if not count or not (origin[members] == "default").any():
            continue
        kept += members[origin[members] == "default"].tolist()
        for name in origins:
            kept += rng.permutation(members[origin[members] == name])[:count].tolist()
    if not kept:
        raise DataError(f"no training task has schedules of the origins {', '.join(COMPARED)}", hint="collect them")
    return np.where((part == TRAIN) & ~np.isin(data.dataset.rows.program, kept), np.int8(UNUSED), part)


def with_target(data: Scheduled, split: Split, config: TrainConfig, domain: Domain) -> tuple[Array, TrainConfig]:
    """Parts and configuration with the test networks' programs as the unlabelled target.

    The rows are of the part that training reads, but :func:`cdmpp.train.draw.training_rows` leaves target networks
    out, and the loss does not read their latencies.
    """
    if "networks" not in split.tests:
        raise DataError(f"split {split.name} has no unseen networks as a target", hint="--on development or network")
    networks = data.test_networks if split.name == "network" else data.development_networks
    part = split.part.copy()
    part[split.tests["networks"]] = TRAIN
    target = {"loss": domain[0], "weight": domain[1], "target_networks": networks}
    return part, config.model_copy(update={"domain": config.domain.model_copy(update=target)})


def without_columns(dataset: Dataset, columns: Array) -> Dataset:
    """A dataset whose leaves have zeros in some columns."""
    store = ProgramStore(0, dataset.store.width)
    store.summary, store.bucket, store.slot = dataset.store.summary, dataset.store.bucket, dataset.store.slot
    for size, bucket in dataset.store.buckets.items():
        leaves = bucket.leaves.copy()
        leaves[:, :, columns] = 0.0
        store.buckets[size] = replace(bucket, leaves=leaves)
    return replace(dataset, store=store)
