"""The tables of the study, encoded once, rows and errors of a held-out device, and the network of a group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report.results import rounded
from cdmpp.data.table import MeasurementTable
from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import ArtifactError
from cdmpp.model.artifact.folder import MANIFEST
from cdmpp.model.artifact.load import load_artifact
from cdmpp.model.artifact.model import Artifact
from cdmpp.model.artifact.trained import save_artifact
from cdmpp.model.domain.calibration import read_quantiles
from cdmpp.model.nn.batch import NetworkInputs
from cdmpp.programs.operators import operator_family
from cdmpp.train.adaptation.records import DeviceRecords, device_records
from cdmpp.train.config import TrainConfig
from cdmpp.train.dataset import Dataset, make_dataset
from cdmpp.train.evaluation.metrics import measure
from cdmpp.train.evaluation.tables import INTERVAL
from cdmpp.train.finish import calibrate, fit_domain
from cdmpp.train.fit import train, training_rows
from cdmpp.train.run import load_training_table

Array = np.ndarray[Any, np.dtype[Any]]


def figures(
    log_measured: Array, point: Array, family: Array, levels: Array | None = None, factor: Array | None = None
) -> dict[str, Any]:
    """Figures of predictions of one device and source.

    ``log_measured``, ``point``, (n,): log of seconds. ``levels``, (n, len(LEVELS)), and ``factor``, (n,): as
    :class:`cdmpp.model.raw_predictions.RawPredictions` has them; without them ``coverage`` is None. Returns ``overall``
    and, by family, ``families`` (:func:`cdmpp.train.evaluation.metrics.measure`), and ``macro``, the mean over families
    of the mean relative error.
    """
    measured, predicted = np.exp(log_measured), np.exp(point)
    bounds: list[Array] = []
    if levels is not None and factor is not None:
        low, high = np.exp(read_quantiles(levels, factor, INTERVAL)).T
        bounds = [np.minimum(low, predicted), np.maximum(high, predicted)]

    def of(rows: Any) -> dict[str, Any]:
        errors: dict[str, Any] = rounded(measure(predicted[rows], measured[rows], *(bound[rows] for bound in bounds)))
        return errors

    families = {str(name): of(family == name) for name in np.unique(family)}
    macro = float(np.mean([f["mape"] for f in families.values()]))
    return {"overall": of(slice(None)), "families": families, "macro": round(macro, 4)}


#: Maximum number of rows of a device and source; a seeded sample if there are more.
ROWS_PER_TABLE = 3000
#: Minimum number of rows of a device and source; smaller tables are left out.
ENOUGH = 200


@dataclass(frozen=True)
class Study:
    """All rows that can be trained on."""

    #: Row i of it is row i of the dataset.
    table: MeasurementTable
    #: Every device with the ceilings that its training-part rows sustain.
    dataset: Dataset
    #: (rows,): operator family.
    family: Array

    @classmethod
    def load(cls, config: TrainConfig, public_data: str | Path | None) -> Study:
        """Read and encode the tables that a configuration names, as if no device were held out."""
        table = load_training_table(config, public_data, ())
        usable = table.trainable & np.isfinite(table.latency_s) & (table.latency_s > 0)
        table = table.select(np.flatnonzero(usable))
        everything = config.data.model_copy(update={"holdout_devices": ()})
        dataset = make_dataset(table, everything, schedule=config.network.schedule)
        if len(dataset.rows) != len(table):
            raise ValueError("programs of the public tables that cannot be encoded")
        names = np.array([operator_family(operator) for operator, _ in dataset.kinds])
        return cls(table, dataset, names[dataset.kind[dataset.rows.program]])

    def without(self, held_out: Sequence[str]) -> Dataset:
        """The dataset as a training run sees it that holds these devices out: their data sheets alone."""
        devices = tuple(d.nominal() if d.name in held_out else d for d in self.dataset.devices)
        return replace(self.dataset, devices=devices)

    def device(self, name: str) -> DeviceSpec:
        """A device with its ceilings."""
        return next(d for d in self.dataset.devices if d.name == name)

    def rows_of(self, device: str, source: str) -> Array:
        """Rows of a device and source, those that the source's authors keep."""
        rows, names = self.dataset.rows, [d.name for d in self.dataset.devices]
        mask = (rows.device == names.index(device)) & (rows.source == self.dataset.sources.index(source))
        return np.flatnonzero(mask & rows.report)

    def records(self, rows: Array, spec: DeviceSpec, artifact: Artifact) -> DeviceRecords:
        """Rows of one device as ``cdmpp adapt`` takes them."""
        return device_records(self.table.select(rows), spec, artifact)


def sample(rows: Array, limit: int, seed: Any) -> Array:
    """A seeded sample, in order."""
    if len(rows) <= limit:
        return rows
    return np.sort(np.random.default_rng(seed).choice(rows, limit, replace=False))


def train_model(config: TrainConfig, dataset: Dataset, training: Array, folder: Path) -> None:
    """Train a network and write its model folder; ``training``: rows that its domain is fitted to."""
    network, summary = train(dataset, config, folder.with_name(f"{folder.name}.run"), progress=_progress)
    held = config.data.holdout_devices
    save_artifact(
        folder,
        network,
        fit_domain(dataset, training, config.seed),
        name=config.name,
        devices=["" if d.name in held else d.name for d in dataset.devices],
        calibration=calibrate(network, NetworkInputs(dataset.store, dataset.device_matrix), dataset, config),
        device_specs=dataset.devices,
        details={"config": config.model_dump(mode="json"), "train": summary},
    )


def _progress(step: int, steps: int, metrics: dict[str, float]) -> None:
    print(f"\r{step}/{steps} loss {metrics['loss']}", end="\n" if step == steps else "", flush=True)


def network_of(config: TrainConfig, dataset: Dataset, folder: Path) -> Artifact:
    """The model in ``folder``; it is trained first where there is none, continuing an interrupted run.

    ``dataset``: with the data sheets alone of the devices that the configuration holds out. ``folder``: of the model;
    the run grows beside it.
    Raises ArtifactError: the existing model was trained on a device that the configuration holds out.
    """
    if not (folder / MANIFEST).is_file():
        print(f"{config.name}: training {config.optimiser.steps} steps", flush=True)
        train_model(config, dataset, training_rows(dataset, config)[0], folder)
    artifact = load_artifact(folder)
    seen = set(config.data.holdout_devices) & set(artifact.devices)
    if seen:
        raise ArtifactError(
            f"{folder} was trained on {', '.join(sorted(seen))}", hint="choose another folder for --models"
        )
    return artifact
