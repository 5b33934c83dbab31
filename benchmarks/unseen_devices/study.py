"""The tables of the study, encoded once, and the rows of a held-out device to evaluate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.unseen_devices.figures import Array
from cdmpp.data.table import MeasurementTable
from cdmpp.devices.spec import DeviceSpec
from cdmpp.model.artifact.model import Artifact
from cdmpp.programs.operators import operator_family
from cdmpp.train.adaptation.records import DeviceRecords, device_records
from cdmpp.train.config import TrainConfig
from cdmpp.train.dataset import Dataset, make_dataset
from cdmpp.train.run import load_training_table

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
