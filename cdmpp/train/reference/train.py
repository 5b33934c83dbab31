"""Training of the original (``cdmpp train`` with ``[reference]``), from configuration to folder.

Adam has a cyclic rate and a time budget.
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
    BoxCoxLabel,
    ReferenceNetwork,
    ReferencePrograms,
    device_rows,
    per_store_features,
    reference_loss,
    store_positions,
)

Array = np.ndarray[Any, np.dtype[Any]]


class ReferenceModel:
    """The original's network, its inputs and its label, as a baseline; after :meth:`fit`, ``summary`` has steps,
    samples and seconds.

    ``features``, each (stores, 164), and ``positions``, each (stores,): PerStoreFeature of the programs given as TIR,
    from key ``first_key`` on, and the rows' positions in the AST.
    """

    def __init__(
        self, dataset: Dataset, config: TrainConfig, features: list[Array], positions: list[Array], first_key: int = 0
    ) -> None:
        if config.reference is None:
            raise DataError("the configuration has no section [reference]", hint="see configs/reference.toml")
        if config.domain.loss == "coral":
            raise DataError("the reference has no domain loss 'coral'", hint="none, cmd or mmd")
        self.dataset, self.config, self.settings = dataset, config, config.reference
        self._features, self._positions, self._first_key = features, positions, first_key
        self._devices = device_rows(dataset.devices)
        self.network: ReferenceNetwork
        self.label: BoxCoxLabel
        self.summary: dict[str, Any] = {}

    def fit(self, index: Array, progress: Progress | None = None) -> Self:
        """Train on the rows ``index`` until steps or seconds are used up."""
        rows, opt = self.dataset.rows, self.config.optimiser
        torch.manual_seed(self.config.seed)
        if opt.threads:
            torch.set_num_threads(opt.threads)
        self._programs = ReferencePrograms.of(self._features, self._positions, self._first_key, rows.program[index])
        self.label = BoxCoxLabel.fit(rows.log_latency[index], np.random.default_rng([self.config.seed, 7]))
        sizes = self.settings.model_dump(include={"layers", "feed_forward", "dropout"})
        self.network = ReferenceNetwork(**sizes)
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
                group["lr"] = self.settings.learning_rate * cyclic(share)
            if not batches:
                shuffled = np.random.default_rng([self.config.seed, 2, epoch]).permutation(index)
                # Batches of nearly equal size: a batch of one row has no variance for the normalisation.
                batches = np.array_split(shuffled, -(-len(index) // self.settings.batch_rows))
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
        self.network.eval()
        seconds = time.monotonic() - started
        self.summary = {
            "steps": step,
            "samples": samples,
            "train_rows": len(index),
            "train_seconds": round(seconds, 3),
            "samples_per_s": round(samples / seconds, 1),
        }
        return self

    def _loss(self, batch: Array, target: Array, step: int) -> Tensor:
        domain = self.config.domain
        if domain.loss != "none":
            rng = np.random.default_rng([self.config.seed, 8, step])
            unlabelled = rng.choice(target, min(len(target), domain.rows), replace=False)
        else:
            unlabelled = target[:0]
        # One pass over both, so that both have the same normalisation.
        latent = self._latent(self.dataset.rows.take(np.concatenate([batch, unlabelled])))
        source = latent[: len(batch)]
        wanted = self.label.encode(self.dataset.rows.log_latency[batch]).astype(np.float32)
        loss = reference_loss(self.network.output(source), torch.from_numpy(wanted))
        if domain.loss == "none":
            return loss
        return loss + domain.weight * PUBLISHED_DISCREPANCIES[domain.loss](source, latent[len(batch) :])

    def _latent(self, rows: MeasuredRows) -> Tensor:
        counts = self._programs.count[rows.program]
        order = np.argsort(counts, kind="stable")
        slots = self._programs.slot[rows.program]
        groups = [
            self._programs.leaves[count][torch.from_numpy(slots[counts == count])]
            for count in np.unique(counts).tolist()
        ]
        device = self._devices[torch.from_numpy(rows.device[order].astype(np.int64))]
        return self.network.latent(groups, device)[torch.from_numpy(np.argsort(order))]

    @torch.inference_mode()
    def predict_log(self, rows: MeasuredRows) -> Array:
        """log latency of rows."""
        parts = np.array_split(np.arange(len(rows)), -(-len(rows) // 2048))
        labels = [self.network.output(self._latent(rows.take(part))).double().numpy() for part in parts]
        return self.label.decode(np.concatenate(labels))


def cyclic(share: float) -> float:
    """Rate at a share of the budget, relative to the configured one: from a tenth up to ten times and down again."""
    return 0.1 + 9.9 * (1 - abs(2 * share - 1))


TENSORS = "reference.safetensors"


def scheduled_features(table: MeasurementTable) -> tuple[list[Array], list[Array]]:
    """PerStoreFeature of a table's programs and their positions; operators, which have no schedule, are a DataError."""
    if table.programs:
        raise DataError(
            "the reference reads scheduled programs; the records hold operators",
            hint="train it on records of TVM programs, as data/cdmpp-measured",
        )
    return per_store_features(table.tvm.texts), store_positions(table.tvm.texts)


def train_reference(
    config: TrainConfig, table: MeasurementTable, *, out: Path, progress: Progress | None = None
) -> dict[str, Any]:
    """Train the original, evaluate it and the baselines on the test part, write its folder.

    The folder records the run and cannot be loaded for predictions: its manifest has ``"kind": "reference"``. Returns
    what :func:`cdmpp.train.run.train_model` does, without a calibration: it has no intervals.
    """
    features = scheduled_features(table)
    dataset = make_dataset(table, config.data, schedule=config.network.schedule, every_part=True)
    index = training_rows(dataset, config)[0]
    model = ReferenceModel(dataset, config, *features, table.tvm.first_key).fit(index, progress)
    inputs = NetworkInputs(dataset.store, dataset.device_matrix)
    baselines = fit_baselines(dataset, inputs, config, index, config.finish.baselines)
    held = [i for i, d in enumerate(dataset.devices) if d.name in config.data.holdout_devices]
    unseen = np.isin(dataset.rows.device, held)
    test = dataset.rows.take(np.flatnonzero((dataset.rows.part == 2) & ~unseen))
    metrics = tabulate(dataset, test, model.predict_log(test), baselines)
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
