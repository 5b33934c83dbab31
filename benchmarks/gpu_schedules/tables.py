"""The brute-forced configurations of Kernel Tuner's kernels as one table per kernel: configurations by GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from cdmpp.data.importers.kernel_tuner.tables import IMPORTERS
from cdmpp.data.importers.kernel_tuner.template import TunedKernel
from cdmpp.devices.registry import lookup
from cdmpp.devices.spec import DeviceSpec

Array = np.ndarray[Any, np.dtype[Any]]

#: Name in this study -> importer of the kernel's table.
SOURCES = {importer.name.removeprefix("kernel_tuner_").replace("_", "-"): importer for importer in IMPORTERS}
KERNELS = tuple(SOURCES)
#: GPUs with the same chip design: the error on one that is left out is helped by the other.
TWINS = (
    ("NVIDIA RTX 3090", "NVIDIA RTX 3060 Laptop"),
    ("NVIDIA A100-PCIE-40GB", "NVIDIA RTX A4000"),
    ("AMD MI250X", "AMD W7800"),
)


@dataclass(frozen=True)
class KernelTable:
    """Measured configurations of one kernel.

    Attributes
    ----------
    name : str
        Of :data:`KERNELS`.
    kernel : TunedKernel
    parameters : tuple of str
    configurations : int64, (configurations, parameters)
        Distinct ones, sorted.
    devices : tuple of str
    log_latency : float64, (configurations, devices)
        Natural log of seconds, the mean over collections; NaN where a GPU lacks the configuration.
    left_out : dict of str to int
        Rows that the program cannot express, or that did not run as their parameters say, by reason.
    """

    name: str
    kernel: TunedKernel
    parameters: tuple[str, ...]
    configurations: Array
    devices: tuple[str, ...]
    log_latency: Array
    left_out: dict[str, int]

    def mapping(self, row: int) -> dict[str, int]:
        """Parameters of one configuration by name."""
        return dict(zip(self.parameters, self.configurations[row].tolist(), strict=True))

    def take(self, rows: Array) -> KernelTable:
        """Some of the configurations."""
        return replace(self, configurations=self.configurations[rows], log_latency=self.log_latency[rows])


def load_kernel(name: str, folder: Path, thin: int | None = None) -> KernelTable:
    """Read one kernel's configurations.

    Parameters
    ----------
    name : str
        Of :data:`KERNELS`.
    folder : Path
        Of the public tables.
    thin : int, optional
        A seeded sample of so many configurations.
    """
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    importer = SOURCES[name]
    space = next(space for space in importer.spaces if space.source == importer.name)
    kernel = space.kernel
    table = pq.read_table(folder / importer.file_name)
    if space.label:
        table = table.filter(pc.equal(table["kernel"].cast("string"), space.label))
    columns = [
        np.full(len(table), space.defaults[p]) if p in space.defaults else table[p].to_numpy().astype(np.int64)
        for p in kernel.parameters
    ]
    values = np.stack(columns, axis=1).astype(np.int64)
    collection = table["collection"].to_pylist() if "collection" in table.column_names else [""] * len(table)
    reasons = [
        kernel.inexpressible(parameters) or space.misstated(run, parameters)
        for run, parameters in zip(collection, _mappings(kernel, values), strict=True)
    ]
    left_out = {reason: reasons.count(reason) for reason in sorted(set(reasons)) if reason}
    kept = np.array([not reason for reason in reasons], dtype=bool)
    table, values = table.filter(pa.array(kept)), values[kept]
    latency = np.log(table["latency_us"].to_numpy().astype(np.float64) * 1e-6)
    names = np.array(table["device"].cast("string").to_pylist())
    configurations, row = np.unique(values, axis=0, return_inverse=True)
    devices = tuple(sorted(set(names.tolist())))
    sums, counts = (np.zeros((len(configurations), len(devices))) for _ in range(2))
    column = np.searchsorted(devices, names)
    np.add.at(sums, (row.reshape(-1), column), latency)
    np.add.at(counts, (row.reshape(-1), column), 1)
    with np.errstate(invalid="ignore"):
        means = sums / np.where(counts, counts, np.nan)
    read = KernelTable(name, kernel, kernel.parameters, configurations, devices, means, left_out)
    if thin is None or thin >= len(configurations):
        return read
    return read.take(np.sort(np.random.default_rng(0).choice(len(configurations), thin, replace=False)))


def _mappings(kernel: TunedKernel, values: Array) -> Iterator[dict[str, int]]:
    return (dict(zip(kernel.parameters, row, strict=True)) for row in values.tolist())


def specifications(devices: Iterable[str]) -> dict[str, DeviceSpec]:
    """Specifications of the GPUs of the tables."""
    return {name: lookup(name) for name in devices}
