"""The noise floor of a data set: how far two measurements of one program on one device disagree."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cdmpp.data.distinct import distinct_rows
from cdmpp.data.labels import Labels
from cdmpp.data.table import MeasurementTable
from cdmpp.errors import DataError

#: Fewest repeats of a record that have a spread.
MIN_REPEATS = 4

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
    by_device: defaultdict[str, list[float]] = defaultdict(list)
    for key, gaps in _gaps(records, repeats).items():
        by_device[key[1]] += gaps
    every = [value for values in by_device.values() for value in values]
    return {
        "noise_floor": float(np.median(every)) if every else None,
        "noise_floor_by_device": {
            device: {"n": len(values), "median": float(np.median(values)), "p90": float(np.quantile(values, 0.9))}
            for device, values in sorted(by_device.items())
        },
    }


def spread(table: MeasurementTable) -> NDArray[np.float64]:
    """Interquartile range / median of the repeats of each row; NaN for fewer than :data:`MIN_REPEATS`."""
    result = np.full(len(table), np.nan)
    for row, repeats in enumerate([] if table.repeats_s is None else table.repeats_s.to_pylist()):
        if repeats is not None and len(repeats) >= MIN_REPEATS:
            result[row] = relative_spread(repeats)
    return result


def relative_spread(repeats: Sequence[float]) -> float:
    """Interquartile range / median of the repeats of one program."""
    low, middle, high = np.quantile(repeats, [0.25, 0.5, 0.75])
    return float((high - low) / middle)


@dataclass(frozen=True)
class Disturbed:
    """A record that another load on the machine seems to have disturbed.

    Attributes
    ----------
    row : int
        Row of the records.
    key : tuple of str
        Program hash, device, backend, protocol, framework.
    spread : float
        Interquartile range / median of its repeats; NaN for fewer than :data:`MIN_REPEATS`.
    difference : float
        Largest relative difference to a second measurement; NaN where there is none.
    floor : float
        Noise floor of the device: the median of such differences.
    """

    row: int
    key: Key
    spread: float
    difference: float
    floor: float


def disturbed(records: MeasurementTable, repeats: MeasurementTable | None, factor: float = 3.0) -> list[Disturbed]:
    """Records whose spread, or whose difference to a second measurement, is over ``factor`` x the noise floor.

    The floor is that of the record's device (:func:`noise_floor`). Of several records of one query the first one
    is compared with the second measurements, as in :func:`noise_floor`; failed records are not listed.

    Returns
    -------
    list of Disturbed
        In the order of the rows.

    Raises
    ------
    DataError
        ``factor`` is not above 0, or a device of the records has no second measurement, so that its floor is unknown.
    """
    if not factor > 0:
        raise DataError(f"factor = {factor:g} of the noise floor", hint="any number above 0, 3 by default")
    floors = {name: one["median"] for name, one in noise_floor(records, repeats)["noise_floor_by_device"].items()}
    rows = np.flatnonzero(measured(records))
    unknown = sorted(set(records.device.array()[rows].tolist()) - set(floors))
    if unknown:
        raise DataError(
            f"no program was measured twice on {', '.join(unknown)}: the noise floor is unknown",
            hint="let cdmpp collect measure its second round, or leave the device out",
        )
    spreads, gaps, found = spread(records), _gaps(records, repeats), []
    for row, key in zip(rows.tolist(), query_keys(records, rows), strict=True):
        floor = floors[key[1]]
        one = Disturbed(row, key, float(spreads[row]), max(gaps.pop(key, [np.nan])), floor)
        # Comparisons with NaN are false.
        if one.spread > factor * floor or one.difference > factor * floor:
            found.append(one)
    return found


def _gaps(records: MeasurementTable, repeats: MeasurementTable | None) -> dict[Key, list[float]]:
    """Relative differences of the first record of each query and its second measurements."""
    if repeats is None:
        return {}
    first: dict[Key, float] = {}
    rows = np.flatnonzero(measured(records))
    for key, latency_s in zip(query_keys(records, rows), records.latency_s[rows].tolist(), strict=True):
        first.setdefault(key, latency_s)
    again = np.flatnonzero(measured(repeats))
    found: defaultdict[Key, list[float]] = defaultdict(list)
    for key, b in zip(query_keys(repeats, again), repeats.latency_s[again].tolist(), strict=True):
        a = first.get(key)
        if a is not None:
            found[key].append(abs(a - b) / ((a + b) / 2))
    return dict(found)
