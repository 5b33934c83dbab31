"""The noise floor of a data set: how far two measurements of one program on one device disagree."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cdmpp.data.distinct import distinct_rows
from cdmpp.data.labels import Labels
from cdmpp.data.table import MeasurementTable

Key = tuple[str, str, str, str, str]


def measured(table: MeasurementTable) -> NDArray[np.bool_]:
    """Rows that are successful measurements: not failed, with a finite latency above 0."""
    found: NDArray[np.bool_] = ~table.failed & np.isfinite(table.latency_s) & (table.latency_s > 0)
    return found


def count_duplicates(table: MeasurementTable) -> int:
    """Records whose program, device, backend, protocol and framework occurred in an earlier one."""
    rows = np.flatnonzero(measured(table) & (table.program_key >= 0))
    columns = [table.program_key[rows]]
    for labels in (table.device, table.backend, table.protocol, table.framework):
        columns.append(labels.map(str).codes[rows].astype(np.int64))
    return len(rows) - len(distinct_rows(columns)[0])


def query_keys(table: MeasurementTable, rows: NDArray[np.int64]) -> list[Key]:
    """Identity of each row: program hash, device, backend, protocol, framework."""
    hashes = (*table.program_hashes, "")  # -1, no program, is the last one
    program = [hashes[key] for key in table.program_key[rows].tolist()]
    columns: list[Labels] = [table.device, table.backend, table.protocol, table.framework]
    return list(zip(program, *(column.take(rows).array().tolist() for column in columns), strict=True))


def noise_floor(records: MeasurementTable, repeats: MeasurementTable | None) -> dict[str, Any]:
    """Relative difference of first and second measurements.

    The relative difference of latencies a and b is |a - b| / ((a + b) / 2). A repeat is compared with the
    first record of the same program, device, backend, protocol and framework; flagged ones count, failed
    ones do not.

    Returns
    -------
    dict
        ``noise_floor``: the median over all pairs, None without any; ``noise_floor_by_device``: per device
        ``n``, ``median`` and ``p90`` (90 % quantile).
    """
    if repeats is None:
        return {"noise_floor": None, "noise_floor_by_device": {}}
    first: dict[Key, float] = {}
    rows = np.flatnonzero(measured(records))
    for key, latency_s in zip(query_keys(records, rows), records.latency_s[rows].tolist(), strict=True):
        first.setdefault(key, latency_s)
    again = np.flatnonzero(measured(repeats))
    by_device: dict[str, list[float]] = {}
    for key, b in zip(query_keys(repeats, again), repeats.latency_s[again].tolist(), strict=True):
        a = first.get(key)
        if a is not None:
            by_device.setdefault(key[1], []).append(abs(a - b) / ((a + b) / 2))
    every = [value for values in by_device.values() for value in values]
    return {
        "noise_floor": float(np.median(every)) if every else None,
        "noise_floor_by_device": {
            device: {"n": len(values), "median": float(np.median(values)), "p90": float(np.quantile(values, 0.9))}
            for device, values in sorted(by_device.items())
        },
    }
