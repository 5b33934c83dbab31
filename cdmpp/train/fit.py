"""Training of a network on a dataset: the rows that are trained on, and the steps."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cdmpp.data.splits import without_sizes
from cdmpp.errors import DataError
from cdmpp.model.nn.batch import NetworkInputs
from cdmpp.model.nn.network import LatencyNetwork
from cdmpp.train.checkpoint import read_weights
from cdmpp.train.config import TrainConfig
from cdmpp.train.dataset import Dataset
from cdmpp.train.job import TrainingJob
from cdmpp.train.loop import Progress, run_steps
from cdmpp.train.ranks import ALONE, Ranks
from cdmpp.train.start import start_from
from cdmpp.train.step import Objective

Array = np.ndarray[Any, np.dtype[Any]]

logger = logging.getLogger(__name__)


def train(
    dataset: Dataset,
    config: TrainConfig,
    out: Path,
    *,
    progress: Progress | None = None,
    ranks: Ranks = ALONE,
    make_objective: Callable[[TrainingJob, NetworkInputs], Objective] = Objective,
    on: str = "cpu",
) -> tuple[LatencyNetwork, dict[str, Any]]:
    """Train a network on a dataset; see :func:`cdmpp.train.loop.run_steps`. Returns the network with averaged weights,
    in evaluation mode; and steps, rows and seconds."""
    job = job_of(dataset, config)
    start, folder = None, config.optimiser.start_from
    if folder:
        start = partial(start_from, Path(folder), dataset=dataset, config=config)
    return run_steps(job, out, start=start, progress=progress, ranks=ranks, make_objective=make_objective, on=on)


def read_trained(dataset: Dataset, config: TrainConfig, folder: Path) -> tuple[LatencyNetwork, dict[str, Any]]:
    """:func:`train` by another machine: the network of the weights that :mod:`cdmpp.train.loop` wrote. Weights of
    another configuration or other data are a DataError."""
    step, seconds, state = read_weights(folder, identity_of(dataset, config))
    opt = config.optimiser
    if step < opt.steps and not (opt.seconds and seconds >= opt.seconds):
        logger.warning("%s has the averaged weights of step %s of %s", folder, f"{step:,}", f"{opt.steps:,}")
    network = LatencyNetwork(config.network, len(dataset.devices))
    network.load_state_dict(state)
    rows = len(training_rows(dataset, config)[0])
    return network.eval(), {"steps": step, "train_rows": rows, "train_seconds": round(seconds, 3)}


def job_of(dataset: Dataset, config: TrainConfig) -> TrainingJob:
    """The training of a dataset without the parts of it that only evaluation reads."""
    index, weight = training_rows(dataset, config)
    # With the precision of the files, a job that another machine trains has the same labels.
    log_latency = dataset.rows.log_latency.astype(np.float32).astype(np.float64)
    return TrainingJob(
        network=config.network,
        optimiser=config.optimiser,
        domain=config.domain,
        seed=config.seed,
        store=dataset.store,
        device_matrix=dataset.device_matrix,
        rows=replace(dataset.rows, log_latency=log_latency),
        task=dataset.group(dataset.rows),
        composed=dataset.composed,
        index=index,
        weight=weight,
        target=target_rows(dataset, config),
        identity=identity_of(dataset, config),
    )


def identity_of(dataset: Dataset, config: TrainConfig) -> dict[str, str]:
    """Fields of a checkpoint that must match for it to be continued: the configuration of the steps, and the data,
    because ``--records`` may add to it."""
    return {
        "config": config.model_dump_json(exclude={"finish", "name"}),
        "data": dataset.fingerprint,
        "devices": json.dumps([device.name for device in dataset.devices]),
        # The networks that use a task decide its part and are not in the fingerprint.
        "parts": hashlib.sha256(dataset.rows.part.tobytes()).hexdigest()[:32],
    }


def training_rows(dataset: Dataset, config: TrainConfig) -> tuple[Array, Array]:
    """Indices of the training rows and the number of draws of each per epoch.

    Rows of held-out devices and of target networks are excluded.
    """
    rows = dataset.rows
    names = {d.name for d in dataset.devices}
    unknown = set(config.data.holdout_devices) - names
    if unknown:
        raise DataError(f"holdout_devices not in the data: {', '.join(sorted(unknown))}", hint=", ".join(sorted(names)))
    held = [i for i, d in enumerate(dataset.devices) if d.name in config.data.holdout_devices]
    keep = (rows.part == 0) & ~np.isin(rows.device, held) & ~_of_networks(dataset, config)
    weight = np.array([config.data.weights.get(name, 1.0) for name in dataset.sources])[rows.source]
    index = np.flatnonzero(keep)
    if not len(index):
        raise DataError("no training rows are left", hint="check the data, holdout_devices and the splits")
    return index, weight[index]


def target_rows(dataset: Dataset, config: TrainConfig) -> Array:
    """Indices of the unlabelled target's rows (:class:`cdmpp.train.options.DomainConfig`), training part only."""
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
