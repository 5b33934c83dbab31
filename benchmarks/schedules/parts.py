"""Records of scheduled programs, encoded once, and the parts of each split."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cdmpp.data.folder import SPLITS, records_file
from cdmpp.data.split_file import read_splits, sealed_networks
from cdmpp.data.splits import TEST, UNUSED, network_parts, program_parts, sealed_programs
from cdmpp.data.table import MeasurementTable
from cdmpp.errors import DataError
from cdmpp.train.config import TrainConfig
from cdmpp.train.dataset import Dataset, make_dataset
from cdmpp.train.run import load_training_table

Array = np.ndarray[Any, np.dtype[Any]]

_CONFIGURATION = re.compile(r"(?P<cpu>.+)-\d+t-[a-z0-9]+")


@dataclass(frozen=True)
class ScheduleSplit:
    """Parts of one split."""

    name: str
    #: (rows,) int8: part of each row of the dataset, a code of :mod:`cdmpp.data.splits`.
    part: Array
    #: Indices of the rows to evaluate, by what is unseen in them.
    tests: Mapping[str, Array]
    #: Configurations without training rows.
    held_devices: tuple[str, ...] = ()
    #: Configurations of the same CPU that are trained on.
    twins: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Name in the result file: that of the configuration or CPU, where one is held out."""
        return self.name.partition(":")[2] or self.name


@dataclass(frozen=True)
class Scheduled:
    """All rows of scheduled programs that can be trained on."""

    #: Row i of it is row i of the dataset.
    table: MeasurementTable
    dataset: Dataset
    #: Networks of the split ``network``, and sealed networks.
    test_networks: tuple[str, ...]
    sealed: tuple[str, ...]

    @classmethod
    def load(cls, config: TrainConfig, *, keep_sealed: bool = False, networks: tuple[str, ...] = ()) -> Scheduled:
        """Read and encode the records of a configuration.

        ``keep_sealed``: only for the evaluation of the sealed networks. ``networks``: test networks; by default those
        of ``splits.parquet``.
        Raises DataError: the records hold operators.
        """
        table = load_training_table(config, None, (), keep_sealed=keep_sealed)
        if table.programs:
            raise DataError("the records hold operators; this benchmark evaluates scheduled programs", hint="--data")
        table = table.select(np.flatnonzero(table.trainable & np.isfinite(table.latency_s) & (table.latency_s > 0)))
        everything = {"split": "shape", "test_networks": (), "holdout_devices": ()}
        dataset = make_dataset(table, config.data.model_copy(update=everything), schedule=config.network.schedule)
        # Programs that cannot be encoded are in no bucket.
        table = table.select(np.flatnonzero(dataset.store.bucket[table.program_key] > 0))
        if not networks:
            files = [records_file(path).with_name(SPLITS) for path in config.data.records]
            stored = [read_splits(file).about.get("test_networks", ()) for file in files if file.is_file()]
            networks = tuple(sorted({name for names in stored for name in names}))
        return cls(table, dataset, networks, sealed_networks(config.data.records))

    def split(self, name: str, config: TrainConfig) -> ScheduleSplit:
        """``task``, ``network``, ``sealed``, ``device:NAME`` or ``cpu:NAME``."""
        shares = {"test": config.data.test_share, "validation": config.data.validation_share}
        by_task = program_parts(self.table, **shares)
        sealed = sealed_programs(self.table, self.sealed)
        by_task[sealed] = UNUSED
        if name.startswith(("device:", "cpu:")):
            return self._device(name, by_task)
        tests: dict[str, Array] = {}
        part = by_task
        if name == "task":
            tests["tasks"] = part == TEST
        elif name == "network":
            part = network_parts(self.table, _given(self.test_networks, name), validation=shares["validation"])
            part[sealed] = UNUSED
            tests["networks"] = part == TEST
        elif name == "sealed":
            _given(self.sealed, name)
            part = program_parts(self.table, test=0.0, validation=shares["validation"])
            part[sealed] = TEST
            tests["sealed"] = sealed
        else:
            raise DataError(f"there is no split {name!r}", hint="task, network, sealed, device:NAME, cpu:NAME")
        key = self.dataset.rows.program
        rows = {unseen: np.flatnonzero(mask[key]) for unseen, mask in tests.items()}
        return ScheduleSplit(name, part[key].astype(np.int8), rows)

    def _device(self, name: str, by_task: Array) -> ScheduleSplit:
        kind, _, wanted = name.partition(":")
        names = [device.name for device in self.dataset.devices]
        held = tuple(n for n in names if (n if kind == "device" else cpu_of(n)) == wanted)
        if not held or len(held) == len(names):
            raise DataError(f"{name} is none of several in the records", hint=", ".join(names))
        rows = self.dataset.rows
        unseen = np.isin(rows.device, [names.index(n) for n in held])
        part = np.where(unseen, TEST, by_task[rows.program]).astype(np.int8)
        part[by_task[rows.program] == UNUSED] = UNUSED
        # Test tasks are trained on by nothing, on whatever device they were measured.
        part[(part == TEST) & ~unseen] = UNUSED
        cpus = {cpu_of(n) for n in held}
        twins = tuple(n for n in names if n not in held and cpu_of(n) in cpus)
        return ScheduleSplit(name, part, {"configuration": np.flatnonzero((part == TEST) & unseen)}, held, twins)

    def configurations(self) -> list[str]:
        """Splits that hold out one configuration, then those that hold out one CPU where there are several."""
        names = [device.name for device in self.dataset.devices]
        cpus = sorted({cpu_of(name) for name in names})
        return [f"device:{name}" for name in names] + [f"cpu:{cpu}" for cpu in cpus if len(cpus) > 1]

    def with_part(self, part: Array) -> Dataset:
        """The dataset with other parts of its rows."""
        return replace(self.dataset, rows=replace(self.dataset.rows, part=part.astype(np.int8)))


def _given(networks: tuple[str, ...], split: str) -> tuple[str, ...]:
    """The networks that a split holds out, at least one."""
    if not networks:
        raise DataError(f"there is no split {split!r}: no network is held out", hint="cdmpp data split DIR")
    return networks


def cpu_of(configuration: str) -> str:
    """The CPU of a configuration: "amd-zen3" of "amd-zen3-2t-avx2"; configurations of one CPU are near twins."""
    match = _CONFIGURATION.fullmatch(configuration)
    return match["cpu"] if match else configuration
