"""Summary of a table for ``cdmpp data info``, and its fingerprint."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from os import PathLike
from typing import Any

import numpy as np

from cdmpp.data.folder import repeats_file
from cdmpp.data.load import load_table
from cdmpp.data.networks import network_names
from cdmpp.data.noise import count_duplicates, measured, noise_floor
from cdmpp.data.physics import UNSTABLE
from cdmpp.data.splits import PART_NAMES, split_by_shape
from cdmpp.data.table import TEXT_COLUMNS, MeasurementTable, OperatorBlock


def info(path: str | PathLike[str]) -> dict[str, Any]:
    """Summary of a file or a dataset folder, ready for JSON (see :func:`summarise`).

    Raises
    ------
    DataError
        The table cannot be read, or the folder's collection is not finished.
    """
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
    ``excluded`` and ``unsupported`` count rows by reason, ``splits`` rows by part of the split by shape.
    ``noise_floor`` and ``noise_floor_by_device``: see :func:`cdmpp.data.noise.noise_floor`.
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
        "excluded": _reasons(table.excluded.counts()),
        "unsupported": _reasons(table.unsupported.counts()),
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
