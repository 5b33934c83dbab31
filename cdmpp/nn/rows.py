"""Rows to predict, as numbers, over encoded programs and devices."""

from __future__ import annotations

from typing import Any, Protocol, Self

import numpy as np

from cdmpp.nn.inputs import query_inputs
from cdmpp.nn.store import ProgramStore

Array = np.ndarray[Any, np.dtype[Any]]


class QueryRows(Protocol):
    """Rows as numbers, arrays of one length: keys into a store, indices of devices, codes."""

    @property
    def program(self) -> Array:
        """Keys into the store."""

    @property
    def device(self) -> Array:
        """Rows of the device matrix."""

    @property
    def backend(self) -> Array:
        """Index into BACKENDS."""

    @property
    def protocol(self) -> Array:
        """Index into PROTOCOLS."""

    @property
    def framework(self) -> Array:
        """Index into FRAMEWORKS, -1 where not known."""

    def __len__(self) -> int: ...

    def take(self, rows: Array) -> Self:
        """Some rows."""


class RowInputs:
    """What rows refer to: encoded programs, and :func:`cdmpp.nn.inputs.stack_devices` of devices."""

    def __init__(self, store: ProgramStore, device_matrix: Array) -> None:
        self.store, self.device_matrix = store, device_matrix

    def reference(self, rows: QueryRows) -> Array:
        """log(reference seconds) of rows."""
        out = np.empty(len(rows))
        for start in range(0, len(rows), 65536):
            part = rows.take(np.arange(start, min(start + 65536, len(rows))))
            out[start : start + len(part)] = self.queries(part)[2]
        return out

    def queries(self, rows: QueryRows, device: Array | None = None) -> tuple[Array, Array, Array]:
        """:func:`query_inputs` of rows; ``device``, (rows, .), in place of their devices' figures."""
        return query_inputs(
            self.store.summary[rows.program],
            self.device_matrix[rows.device] if device is None else device,
            rows.backend,
            rows.protocol,
            rows.framework,
        )
