"""Training of the original (``cdmpp train`` with ``[reference]``), from configuration to folder.

Batches are of one leaf count; Adam has a cyclic rate and a time budget.
"""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from cdmpp.data.table import MeasurementTable
from cdmpp.errors import DataError
from cdmpp.model.artifact.folder import ERROR_TABLE, FORMAT_VERSION, MANIFEST, library_versions, write_folder
from cdmpp.model.nn.batch import NetworkInputs
from cdmpp.model.nn.network import parameter_count
from cdmpp.train.baselines import fit_baselines
from cdmpp.train.config import TrainConfig
from cdmpp.train.dataset import Dataset, MeasuredRows, make_dataset
from cdmpp.train.finish import tabulate
from cdmpp.train.fit import target_rows, training_rows
from cdmpp.train.loop import Progress
from cdmpp.train.reference.network import (
    PUBLISHED_DISCREPANCIES,
    BoxCox,
    ReferenceNetwork,
    ReferencePrograms,
    device_rows,
    per_store_features,
    reference_loss,
)

Array = np.ndarray[Any, np.dtype[Any]]

#: Batches per leaf count from which the final statistics of the normalisations are computed.
SETTLING_BATCHES = 2


class ReferenceModel:
    """The original's network, its inputs and its label, as a baseline.

    Parameters
    ----------
    dataset : Dataset
    config : TrainConfig
        Configuration with a section ``reference``.
    features : list of float32 array, (stores, 164)
        PerStoreFeature of the programs ``first_key ..``.
    first_key : int
        Key of the first program that is given as TIR.

    Attributes
    ----------
    summary : dict
        After :meth:`fit`: steps, samples, seconds.
    """

    def __init__(self, dataset: Dataset, config: TrainConfig, features: list[Array], first_key: int = 0) -> None:
        if config.reference is None:
            raise DataError("the configuration has no section [reference]", hint="see configs/reference.toml")
        if config.domain.loss == "coral":
            raise DataError("the reference has no domain loss 'coral'", hint="none, cmd or mmd")
        self.dataset, self.config, self.settings = dataset, config, config.reference
        self._features, self._first_key = features, first_key
        self._devices = device_rows(dataset.devices)
        self.network: ReferenceNetwork
        self.label: BoxCox
        self.summary: dict[str, Any] = {}

    def fit(self, index: Array, progress: Progress | None = None) -> Self:
        """Train on the rows ``index`` until steps or seconds are used up."""
        rows, opt = self.dataset.rows, self.config.optimiser
        torch.manual_seed(self.config.seed)
        if opt.threads:
            torch.set_num_threads(opt.threads)
        self._programs = ReferencePrograms.of(self._features, self._first_key, rows.program[index])
        self.label = BoxCox.fit(rows.log_latency[index], np.random.default_rng([self.config.seed, 7]))
        self._median = float(np.median(rows.log_latency[index]))
        counts = self._programs.count[rows.program[index]]
        leaf_counts, times = np.unique(counts, return_counts=True)
        # A leaf count needs two rows for its normalisation; programs without features are not used.
        usable = leaf_counts[(leaf_counts > 0) & (times > 1)]
        index, counts = (a[np.isin(counts, usable)] for a in (index, counts))
        if not len(index):
            raise DataError("no leaf count has two training rows", hint="check the records and their split")
        self.network = ReferenceNetwork(usable.tolist())
        optimiser = torch.optim.Adam(
            self.network.parameters(), lr=self.settings.learning_rate, weight_decay=self.settings.weight_decay
        )
        target = target_rows(self.dataset, self.config)
        self.network.train()
        started, step, samples, epoch = time.monotonic(), 0, 0, 0
        batches: list[Array] = []
        while True:
            passed = (time.monotonic() - started) / opt.seconds if opt.seconds else 0.0
            share = max(step / opt.steps, passed)
            if share >= 1:
                break
            for group in optimiser.param_groups:
                group["lr"] = self.settings.learning_rate * cyclic(step, share, self.settings.cycle_steps)
            if not batches:
                batches = epoch_batches(index, counts, self.settings.batch_rows, [self.config.seed, 2, epoch])
                epoch += 1
            batch = batches.pop()
            loss = self._loss(batch, target, step)
            optimiser.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(self.network.parameters(), self.settings.clip_norm)
            optimiser.step()
            step, samples = step + 1, samples + len(batch)
            if progress:
                progress(step, opt.steps, {"loss": float(loss.detach())})
        self._settle(index, counts)
        seconds = time.monotonic() - started
        self.summary = {
            "steps": step,
            "samples": samples,
            "train_rows": len(index),
            "train_seconds": round(seconds, 3),
            "samples_per_s": round(samples / seconds, 1),
            "leaf_counts": sorted(set(counts.tolist())),
        }
        return self

    @torch.no_grad()
    def _settle(self, index: Array, counts: Array) -> None:
        """Recompute the statistics of the batch normalisations from training rows.

        Moving averages need tens of batches of every leaf count, more than a short run has. Leaves the network in
        evaluation mode.
        """
        self.network.eval()
        norms = [m for m in self.network.modules() if isinstance(m, torch.nn.BatchNorm1d)]
        before = [norm.momentum for norm in norms]
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # the mean over all batches that follow
            norm.train()
        seen: dict[int, int] = {}
        for batch in epoch_batches(index, counts, self.settings.batch_rows, [self.config.seed, 3]):
            rows = self.dataset.rows.take(batch)
            count = self._count(rows)
            seen[count] = seen.get(count, 0) + 1
            if seen[count] <= SETTLING_BATCHES:
                self._hidden(rows)
        for norm, momentum in zip(norms, before, strict=True):
            norm.momentum = momentum
        self.network.eval()

    def _loss(self, batch: Array, target: Array, step: int) -> Tensor:
        rows = self.dataset.rows.take(batch)
        wanted = torch.from_numpy(self.label.encode(rows.log_latency).astype(np.float32))
        hidden = self._hidden(rows)
        loss = reference_loss(self.network.output(hidden), wanted)
        domain = self.config.domain
        if domain.loss == "none" or not domain.weight:
            return loss
        same = target[self._programs.count[self.dataset.rows.program[target]] == self._count(rows)]
        if len(same) < 2:  # the target has no programs of this leaf count
            return loss
        rng = np.random.default_rng([self.config.seed, 8, step])
        chosen = rng.choice(same, min(len(same), domain.rows), replace=False)
        other = self._hidden(self.dataset.rows.take(chosen))
        return loss + domain.weight * PUBLISHED_DISCREPANCIES[domain.loss](hidden, other)

    def _count(self, rows: MeasuredRows) -> int:
        return int(self._programs.count[rows.program[0]])

    def _hidden(self, rows: MeasuredRows) -> Tensor:
        """Rows of one leaf count."""
        slots = torch.from_numpy(self._programs.slot[rows.program])
        device = self._devices[torch.from_numpy(rows.device.astype(np.int64))]
        return self.network.hidden(self._programs.leaves[self._count(rows)][slots], device)

    @torch.inference_mode()
    def predict_log(self, rows: MeasuredRows) -> Array:
        """log latency of rows; the median training latency for leaf counts without training rows."""
        log_latency = np.full(len(rows), self._median)
        counts = self._programs.count[rows.program]
        for count in map(int, self.network.flatten):
            members = np.flatnonzero(counts == count)
            for start in range(0, len(members), 2048):
                part = members[start : start + 2048]
                out = self.network.output(self._hidden(rows.take(part))).double().numpy()
                log_latency[part] = self.label.decode(out)
        return log_latency

    def untrained(self, rows: MeasuredRows) -> int:
        """Number of rows whose leaf count has no training rows."""
        known = [int(count) for count in self.network.flatten]
        return int((~np.isin(self._programs.count[rows.program], known)).sum())


def epoch_batches(index: Array, counts: Array, batch_rows: int, seed: list[int]) -> list[Array]:
    """Every row once, in shuffled batches of one leaf count.

    Parameters
    ----------
    index, counts : (rows,)
        Rows and the leaf counts of their programs.
    """
    rng = np.random.default_rng(seed)
    batches = []
    for count in np.unique(counts):
        members = rng.permutation(index[counts == count])
        # Batches of nearly equal size: a batch of one row has no variance for the normalisation.
        batches += np.array_split(members, -(-len(members) // batch_rows))
    return [batches[i] for i in rng.permutation(len(batches))]


def cyclic(step: int, share: float, half: int | None) -> float:
    """Rate of a step relative to the configured one: up and down between a tenth and ten times.

    Parameters
    ----------
    step : int
    share : float
        Used share of the budget.
    half : int, optional
        Steps of half a cycle; without it one cycle takes the whole budget.
    """
    phase = 2 * share if half is None else step / half
    return 0.1 + 9.9 * (1 - abs(phase % 2 - 1))


TENSORS = "reference.safetensors"


def scheduled_features(table: MeasurementTable) -> list[Any]:
    """PerStoreFeature of a table's programs.

    Raises
    ------
    DataError
        Some records are operators, which have no schedule.
    """
    if table.programs:
        raise DataError(
            "the reference reads scheduled programs; the records hold operators",
            hint="train it on records of TVM programs, as data/cdmpp-measured",
        )
    return per_store_features(table.tvm.texts)


def train_reference(
    config: TrainConfig, table: MeasurementTable, *, out: Path, progress: Progress | None = None
) -> dict[str, Any]:
    """Train the original, evaluate it and the baselines on the test part, write its folder.

    The folder records the run and cannot be loaded for predictions: its manifest has ``"kind": "reference"``.

    Returns
    -------
    dict
        As :func:`cdmpp.train.run.train_model`, without a calibration: it has no intervals.

    Raises
    ------
    DataError
        The table holds operators, or nothing to train on.
    """
    features = scheduled_features(table)
    dataset = make_dataset(table, config.data, schedule=config.network.schedule, every_part=True)
    index = training_rows(dataset, config)[0]
    model = ReferenceModel(dataset, config, features, table.tvm.first_key).fit(index, progress)
    inputs = NetworkInputs(dataset.store, dataset.device_matrix)
    baselines = fit_baselines(dataset, inputs, config, index, config.finish.baselines)
    held = [i for i, d in enumerate(dataset.devices) if d.name in config.data.holdout_devices]
    unseen = np.isin(dataset.rows.device, held)
    test = dataset.rows.take(np.flatnonzero((dataset.rows.part == 2) & ~unseen))
    metrics = tabulate(dataset, test, model.predict_log(test), baselines)
    metrics["untrained_leaf_counts"] = model.untrained(test)
    if held:
        rows = dataset.rows.take(np.flatnonzero(unseen))
        metrics["held_out_devices"] = tabulate(dataset, rows, model.predict_log(rows), baselines)
    summary = model.summary | {"parameters": parameter_count(model.network)}
    tensors = save({k: v.contiguous() for k, v in model.network.state_dict().items()}, {"format": "cdmpp"})
    errors = (json.dumps(metrics, indent=1) + "\n").encode()
    digest = hashlib.sha256(tensors).hexdigest()
    manifest = {
        "format_version": FORMAT_VERSION,
        "kind": "reference",
        "model_id": f"{config.name}-{digest[:12]}",
        "config": config.model_dump(mode="json"),
        "data": {"fingerprint": dataset.fingerprint, "sources": dict(table.source.counts())},
        "train": summary,
        "metrics": {"overall": metrics["overall"], "by_source": metrics["by_source"]},
        "libraries": library_versions(),
        "sha256": {TENSORS: digest, ERROR_TABLE: hashlib.sha256(errors).hexdigest()},
    }
    text = json.dumps(manifest, indent=1, sort_keys=True) + "\n"
    write_folder(out, {TENSORS: tensors, ERROR_TABLE: errors, MANIFEST: text.encode()})
    return {"model_id": manifest["model_id"], "out": str(out), "train": summary, "calibration": {}, "metrics": metrics}
