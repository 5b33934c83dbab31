"""Summary of a table for ``cdmpp data info``, its fingerprint, and the noise floor.

The noise floor says how far two measurements of one program on one device disagree.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cdmpp.data.folder import repeats_file
from cdmpp.data.labels import Labels, distinct_rows
from cdmpp.data.load import load_table
from cdmpp.data.physics import UNSTABLE
from cdmpp.data.splits import PART_NAMES, network_names, split_by_shape
from cdmpp.data.table import TEXT_COLUMNS, MeasurementTable, OperatorBlock
from cdmpp.errors import DataError

#: Fewest repeats of a record that have a spread.
MIN_REPEATS = 4
Key = tuple[str, ...]


def info(path: str | PathLike[str]) -> dict[str, Any]:
    """Summary of a file or a dataset folder, ready for JSON (see :func:`summarise`)."""
    repeats = repeats_file(path)
    table = load_table(path)
    return {"path": str(path), **summarise(table, None if repeats is None else load_table(repeats))}


def summarise(table: MeasurementTable, repeats: MeasurementTable | None = None) -> dict[str, Any]:
    """Counts of rows and programs by what they are; ``None`` where there is nothing to take a figure of.

    ``rows``: all; ``records``: successful measurements, flagged ones included; ``failed``: programs that
    could not be measured; ``flagged``: records whose spread is over the stated one; ``duplicates``: records
    whose program, device, backend, protocol and framework occurred before; ``repeats``: second measurements,
    which are counted nowhere else. ``programs``: distinct programs of all rows, failed ones included;
    ``tasks``: distinct tasks that they are schedules of; ``networks``, ``devices``: names, sorted.
    ``op`` is the source's name of the operator, ``operator`` and ``dtype`` count rows by cdmpp's.
    ``excluded`` and ``unsupported`` count rows by reason, ``inexpressible`` schedules without a program by detail,
    ``splits`` rows by part of the split by shape.
    ``noise_floor`` and ``noise_floor_by_device``: see :func:`cdmpp.data.summary.noise_floor`.
    """
    latencies = table.latency_s[np.isfinite(table.latency_s)]
    parts = split_by_shape(table)
    low, middle, high = np.quantile(latencies, [0.0, 0.5, 1.0]) if len(latencies) else (None, None, None)
    return {
        "rows": len(table),
        "records": int(measured(table).sum()),
        "failed": int(table.failed.sum()),
        "flagged": int(table.excluded.is_(UNSTABLE).sum()),
        "duplicates": count_duplicates(table),
        "repeats": 0 if repeats is None else int(measured(repeats).sum()),
        "programs": table.n_programs,
        "tvm_programs": len(table.tvm.hashes),
        "tasks": len({task for task in table.tvm.tasks if task}),
        "networks": network_names(table),
        "devices": sorted(table.device.used()),
        "predictable_rows": int(table.predictable.sum()),
        "trainable_rows": int(table.trainable.sum()),
        "row_filter_rows": None if table.row_filter is None else int(table.row_filter.sum()),
        "rows_with_repeats": 0 if table.repeats_s is None else len(table) - table.repeats_s.null_count,
        **{name: getattr(table, name).counts() for name in ("source", "op", "device", "backend")},
        "operator": _rows_of_programs(table, lambda block: block.operator),
        "dtype": _rows_of_programs(table, lambda block: block.dtype),
        "protocol": table.protocol.counts(),
        "framework": table.framework.counts(),
        "implementation": table.implementation.counts(),
        "excluded": _reasons(table.excluded.counts()),
        "unsupported": _reasons(table.unsupported.counts()),
        "inexpressible": _reasons(table.provenance["inexpressible"].counts())
        if "inexpressible" in table.provenance
        else {},
        "splits": {name: int((parts == part).sum()) for part, name in PART_NAMES.items()},
        "latency_s": {"min": _float(low), "median": _float(middle), "max": _float(high)},
        **noise_floor(table, repeats),
        "fingerprint": fingerprint(table),
    }


def fingerprint(table: MeasurementTable) -> str:
    """Hash (hex, 32 characters) of programs, conditions, latencies and flags, row by row, and of the devices'
    specifications that the records bring.

    The same for the same rows in the same order, whichever file they were read from.
    """
    digest = hashlib.sha256()
    programs = np.array([*(int(text[:16], 16) for text in table.program_hashes), 0], dtype="<u8")
    digest.update(programs[table.program_key].tobytes())  # key -1, no program, is the 0 at the end
    digest.update(table.latency_s.astype("<f8").tobytes())
    for name in (*TEXT_COLUMNS, "excluded", "unsupported"):
        labels = getattr(table, name)
        order = sorted(labels.used())
        rank = np.array([order.index(n) if n in order else -1 for n in labels.names], dtype="<i4")
        digest.update("\0".join(order).encode())
        digest.update(rank[labels.codes].tobytes() if len(table) else b"")
    for name in sorted(set(table.device.used()) & set(table.device_specs)):
        digest.update(f"{name}\0{table.device_spec(name).digest()}".encode())
    return digest.hexdigest()[:32]


def measured(table: MeasurementTable) -> NDArray[np.bool_]:
    """Rows that are successful measurements: not failed, with a finite latency above 0."""
    is_measured: NDArray[np.bool_] = ~table.failed & np.isfinite(table.latency_s) & (table.latency_s > 0)
    return is_measured


def count_duplicates(table: MeasurementTable) -> int:
    """Records whose program, device and settings (backend to implementation) occurred in an earlier one."""
    rows = np.flatnonzero(measured(table) & (table.program_key >= 0))
    columns = [table.program_key[rows]]
    for labels in _conditions(table):
        columns.append(labels.map(str).codes[rows].astype(np.int64))
    return len(rows) - len(distinct_rows(columns)[0])


def _conditions(table: MeasurementTable) -> tuple[Labels, ...]:
    """Columns that say, with the program, what a row measured."""
    return (table.device, table.backend, table.protocol, table.framework, table.implementation)


def query_keys(table: MeasurementTable, rows: NDArray[np.int64]) -> list[Key]:
    """Identity of each row: program hash, device, backend, protocol, framework, implementation."""
    hashes = (*table.program_hashes, "")  # -1, no program, is the last one
    program = [hashes[key] for key in table.program_key[rows].tolist()]
    columns = (column.take(rows).array().tolist() for column in _conditions(table))
    return list(zip(program, *columns, strict=True))


def noise_floor(records: MeasurementTable, repeats: MeasurementTable | None) -> dict[str, Any]:
    """Relative difference |a - b| / ((a + b) / 2) of latencies of first and second measurements.

    A repeat is compared with the first record of the same program, device and settings; flagged ones count, failed ones
    do not. ``noise_floor`` is the median over all pairs, None without any; ``noise_floor_by_device`` has ``n``,
    ``median`` and ``p90`` (90 % quantile).
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
    """A record that another load on the machine seems to have disturbed."""

    row: int  # of the records
    key: Key  # program hash, device, backend, protocol, framework
    spread: float  # interquartile range / median of its repeats; NaN for fewer than :data:`MIN_REPEATS`
    difference: float  # largest relative difference to a second measurement; NaN where there is none
    floor: float  # noise floor of the device: the median of such differences


def disturbed(records: MeasurementTable, repeats: MeasurementTable | None, factor: float = 3.0) -> list[Disturbed]:
    """Records whose spread, or whose difference to a second measurement, is over ``factor`` x the noise floor.

    The floor is that of the record's device (:func:`noise_floor`). Of several records of one query the first one is
    compared with the second measurements; failed records are not listed. A device without any second measurement, so
    that its floor is unknown, is an error.
    """
    if not factor > 0:
        raise DataError(f"factor = {factor:g} of the noise floor", hint="any number above 0, 3 by default")
    floors = {name: floor["median"] for name, floor in noise_floor(records, repeats)["noise_floor_by_device"].items()}
    rows = np.flatnonzero(measured(records))
    unknown = sorted(set(records.device.array()[rows].tolist()) - set(floors))
    if unknown:
        raise DataError(
            f"no program was measured twice on {', '.join(unknown)}: the noise floor is unknown",
            hint="let cdmpp collect measure its second round, or leave the device out",
        )
    spreads, gaps, disturbed_rows = spread(records), _gaps(records, repeats), []
    for row, key in zip(rows.tolist(), query_keys(records, rows), strict=True):
        floor = floors[key[1]]
        disturbed_row = Disturbed(row, key, float(spreads[row]), max(gaps.pop(key, [np.nan])), floor)
        # Comparisons with NaN are false.
        if disturbed_row.spread > factor * floor or disturbed_row.difference > factor * floor:
            disturbed_rows.append(disturbed_row)
    return disturbed_rows


def _gaps(records: MeasurementTable, repeats: MeasurementTable | None) -> dict[Key, list[float]]:
    """Relative differences of the first record of each query and its second measurements."""
    if repeats is None:
        return {}
    first: dict[Key, float] = {}
    rows = np.flatnonzero(measured(records))
    for key, latency_s in zip(query_keys(records, rows), records.latency_s[rows].tolist(), strict=True):
        first.setdefault(key, latency_s)
    again = np.flatnonzero(measured(repeats))
    gaps: defaultdict[Key, list[float]] = defaultdict(list)
    for key, b in zip(query_keys(repeats, again), repeats.latency_s[again].tolist(), strict=True):
        a = first.get(key)
        if a is not None:
            gaps[key].append(abs(a - b) / ((a + b) / 2))
    return dict(gaps)


def _rows_of_programs(table: MeasurementTable, name: Callable[[OperatorBlock], str]) -> dict[str, int]:
    """Rows by a property of their operators; rows without an operator are not counted."""
    counts: Counter[str] = Counter()
    for block in table.specs:
        counts[name(block)] += len(block)
    return dict(counts.most_common())


def _reasons(counts: dict[str, int]) -> dict[str, int]:
    return {reason: n for reason, n in counts.items() if reason}


def _float(value: Any) -> float | None:
    return None if value is None else float(value)
