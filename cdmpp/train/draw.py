"""Selection and order of the rows of a training run."""

from __future__ import annotations

from typing import Any

import numpy as np

from cdmpp.data.networks import without_sizes
from cdmpp.errors import DataError
from cdmpp.train.config import TrainConfig
from cdmpp.train.dataset import Dataset

Array = np.ndarray[Any, np.dtype[Any]]

#: Maximum number of rows of its task that a row is compared with in a batch.
MAX_COMPARED = 31


def training_rows(dataset: Dataset, config: TrainConfig) -> tuple[Array, Array]:
    """Indices of the training rows and the number of draws of each per epoch.

    Rows of held-out devices and of target networks are excluded; ``max_rows_per_source`` keeps a seeded sample.
    """
    rows = dataset.rows
    names = {d.name for d in dataset.devices}
    unknown = set(config.data.holdout_devices) - names
    if unknown:
        raise DataError(f"holdout_devices not in the data: {', '.join(sorted(unknown))}", hint=", ".join(sorted(names)))
    held = [i for i, d in enumerate(dataset.devices) if d.name in config.data.holdout_devices]
    keep = (rows.part == 0) & ~np.isin(rows.device, held) & ~_of_networks(dataset, config)
    weight = np.array([config.data.weights.get(name, 1.0) for name in dataset.sources])[rows.source]
    rng = np.random.default_rng([config.seed, 1])
    if config.data.max_rows_per_source:
        for source in range(len(dataset.sources)):
            members = np.flatnonzero(keep & (rows.source == source))
            excess = len(members) - config.data.max_rows_per_source
            if excess > 0:
                keep[rng.choice(members, excess, replace=False)] = False
    index = np.flatnonzero(keep)
    if not len(index):
        raise DataError("no training rows are left", hint="check the data, holdout_devices and the splits")
    return index, weight[index]


def target_rows(dataset: Dataset, config: TrainConfig) -> Array:
    """Indices of the unlabelled target's rows (:class:`cdmpp.train.config.DomainConfig`), training part only."""
    targets = [i for i, d in enumerate(dataset.devices) if d.name in config.domain.target_devices]
    wanted = np.isin(dataset.rows.device, targets) | _of_networks(dataset, config)
    index = np.flatnonzero(wanted & (dataset.rows.part == 0))
    if config.domain.loss != "none" and not len(index):
        raise DataError("the target has no training rows", hint="see domain.target_*")
    return index


def _of_networks(dataset: Dataset, config: TrainConfig) -> Array:
    """Mask of the rows whose task belongs to a target network."""
    wanted = frozenset(map(without_sizes, config.domain.target_networks))
    known = frozenset().union(*dataset.networks)
    if not wanted <= known:
        raise DataError(
            f"no record is of network {', '.join(sorted(wanted - known))}",
            hint=f"domain.target_networks: {', '.join(sorted(known)) or 'the records name none'}",
        )
    if not wanted:
        return np.zeros(len(dataset.rows), dtype=bool)
    return np.array([not wanted.isdisjoint(n) for n in dataset.networks])[dataset.rows.program]


def epoch_order(
    index: Array, weight: Array, seed: int, epoch: int, *, group: Array | None = None, together: int = 1
) -> Array:
    """Rows of one epoch in a seeded order; a row of weight 2.5 occurs two or three times.

    Parameters
    ----------
    index, weight : (rows,)
        Rows and their mean number of draws.
    group : (rows,) int, optional
        Rows of one group are drawn in blocks of up to ``together``; those of group -1 individually.
    """
    rng = np.random.default_rng([seed, 2, epoch])
    times = np.floor(weight + rng.random(len(weight))).astype(np.int64)
    chosen = np.repeat(np.arange(len(index)), times)
    rng.shuffle(chosen)
    if group is None or together == 1:
        return np.asarray(index[chosen])
    # Sort by group, keeping the shuffled order within; then shuffle blocks.
    chosen = chosen[np.argsort(group[chosen], kind="stable")]
    starts = np.unique(group[chosen], return_index=True)[1]
    place = np.arange(len(chosen)) - np.repeat(starts, np.diff([*starts, len(chosen)]))
    alone = group[chosen] < 0
    block = np.cumsum(alone | (place % together == 0)) - 1
    key = rng.permutation(int(block[-1]) + 1)[block]
    return np.asarray(index[chosen[np.argsort(key, kind="stable")]])


def pairs_within(group: Array) -> tuple[Array, Array]:
    """Pairs of rows of one group (not -1), each pair once; in a large group, pairs of close rows only.

    Returns
    -------
    first, second : (pairs,) int64
    """
    order = np.argsort(group, kind="stable")
    order = order[group[order] >= 0]
    pairs = [(order[:0], order[:0])]
    for apart in range(1, min(MAX_COMPARED, len(order) - 1) + 1):
        same = group[order[apart:]] == group[order[:-apart]]
        if not same.any():
            break
        pairs.append((order[:-apart][same], order[apart:][same]))
    return np.concatenate([p[0] for p in pairs]), np.concatenate([p[1] for p in pairs])
