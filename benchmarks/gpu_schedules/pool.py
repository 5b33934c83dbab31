"""Rows of all kernels and GPUs, and the columns that each method sees of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.gpu_schedules.tables import KernelTable, specifications
from cdmpp.devices.spec import DeviceSpec
from cdmpp.features.gpu_schedule import GPU_WIDTH
from cdmpp.model.nn.gpu_inputs import gpu_inputs

Array = np.ndarray[Any, np.dtype[Any]]

DEVICE_FIGURES = (
    "compute_units",
    "cores_per_unit",
    "clock_hz",
    "mem_bandwidth_bytes_per_s",
    "peak_flops_fp32",
    "l2_bytes",
)


@dataclass(frozen=True)
class Rows:
    """Measured rows, arrays of one length.

    Attributes
    ----------
    kernel, device, configuration : int
        Positions in :attr:`Pool.tables`, :attr:`Pool.devices` and the table's configurations.
    log_latency : float
    """

    kernel: Array
    device: Array
    configuration: Array
    log_latency: Array

    def __len__(self) -> int:
        return len(self.kernel)

    def take(self, rows: Array) -> Rows:
        """Some of the rows."""
        return Rows(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))

    def groups(self) -> list[tuple[tuple[int, int], Array]]:
        """(kernel, device) and the positions of its rows."""
        pairs = np.stack([self.kernel, self.device], axis=1)
        found, inverse = np.unique(pairs, axis=0, return_inverse=True)
        return [((int(k), int(d)), np.flatnonzero(inverse.reshape(-1) == i)) for i, (k, d) in enumerate(found)]

    def centred(self, values: Array) -> Array:
        """``values`` less their median within each kernel and device."""
        out = values.copy()
        for _, members in self.groups():
            out[members] -= np.median(values[members])
        return out


class Pool:
    """All rows with their columns.

    Parameters
    ----------
    tables : sequence of KernelTable
    features : sequence of (features, bytes)
        :func:`benchmarks.gpu_schedules.programs.program_features` of each table.
    """

    def __init__(self, tables: Sequence[KernelTable], features: Sequence[tuple[Array, Array]]) -> None:
        self.tables = list(tables)
        self.devices = sorted({name for table in tables for name in table.devices})
        by_name = specifications(self.devices)
        self.specs: list[DeviceSpec] = [by_name[name] for name in self.devices]
        self.programs = [f for f, _ in features]
        self._inputs: dict[tuple[int, int], tuple[Array, Array]] = {}
        parts = []
        for k, (table, (own, size)) in enumerate(zip(tables, features, strict=True)):
            for column, name in enumerate(table.devices):
                d = self.devices.index(name)
                self._inputs[k, d] = gpu_inputs(own[:, :GPU_WIDTH], size, self.specs[d])
                rows = np.flatnonzero(np.isfinite(table.log_latency[:, column]))
                parts.append((np.full(len(rows), k), np.full(len(rows), d), rows, table.log_latency[rows, column]))
        self.rows = Rows(*(np.concatenate(column) for column in zip(*parts, strict=True)))
        self._parameters = sorted({p for table in tables for p in table.parameters})
        figures = [[float(getattr(spec, name) or np.nan) for name in DEVICE_FIGURES] for spec in self.specs]
        self._figures = np.log2(np.array(figures))

    def _gather(self, rows: Rows, of: Any, width: int) -> Array:
        out = np.empty((len(rows), width), dtype=np.float32)
        for (k, d), members in rows.groups():
            out[members] = of(k, d)[rows.configuration[members]]
        return out

    def own(self, rows: Rows) -> Array:
        """Our columns: the program's, and those where it meets the GPU."""
        first = next(iter(self._inputs.values()))[0].shape[1]
        met = self._gather(rows, lambda k, d: self._inputs[k, d][0], first)
        return np.concatenate([self.program(rows), met], axis=1)

    def program(self, rows: Rows) -> Array:
        """The program's columns."""
        return self._gather(rows, lambda k, d: self.programs[k], self.programs[0].shape[1])

    def reference(self, rows: Rows) -> Array:
        """Natural log of the reference time."""
        return self._gather(rows, lambda k, d: self._inputs[k, d][1][:, None], 1)[:, 0].astype(np.float64)

    def parameters(self, rows: Rows) -> Array:
        """Raw parameters (NaN where a kernel has no such), the kernel, and the GPU's figures."""
        out = np.full((len(rows), len(self._parameters)), np.nan, dtype=np.float32)
        for k, table in enumerate(self.tables):
            members = np.flatnonzero(rows.kernel == k)
            columns = [self._parameters.index(p) for p in table.parameters]
            out[np.ix_(members, columns)] = table.configurations[rows.configuration[members]]
        return np.concatenate([out, rows.kernel[:, None], self._figures[rows.device]], axis=1).astype(np.float32)

    def roofline(self, rows: Rows) -> Array:
        """Natural log of arithmetic at peak plus traffic at full bandwidth."""
        program = self.program(rows)[:, GPU_WIDTH : GPU_WIDTH + 2].astype(np.float64)
        flops, size = (np.exp2(program) - 1).T
        peak, bandwidth = (np.exp2(self._figures[rows.device, i]) for i in (4, 3))
        return np.log(flops / peak + size / bandwidth)

    def profiles(self, known: Rows) -> list[Array]:
        """Per kernel the centred log latency of each configuration (rows) on each GPU (columns) of known rows."""
        centred = known.centred(known.log_latency)
        out = []
        for k, table in enumerate(self.tables):
            own = np.full((len(table.configurations), len(self.devices)), np.nan)
            members = known.kernel == k
            own[known.configuration[members], known.device[members]] = centred[members]
            out.append(own)
        return out
