"""What a table holds: the figures of ``cdmpp data info``, and its fingerprint."""

from __future__ import annotations

import hashlib
from os import PathLike
from typing import Any

import numpy as np

from cdmpp.data.load import load_table
from cdmpp.data.splits import PART_NAMES, split_by_shape
from cdmpp.data.table import TEXT_COLUMNS, MeasurementTable


def info(path: str | PathLike[str]) -> dict[str, Any]:
    """Summary of a table on disk, ready for JSON (see :func:`summarise`)."""
    return {"path": str(path), **summarise(load_table(path))}


def summarise(table: MeasurementTable) -> dict[str, Any]:
    """Counts of rows and programs by what they are; ``None`` where there is nothing to take a figure of.

    ``excluded`` and ``unsupported`` count rows by reason, ``splits`` rows by part of the split by shape.
    """
    measured = table.latency_s[np.isfinite(table.latency_s)]
    parts = split_by_shape(table)
    low, middle, high = np.quantile(measured, [0.0, 0.5, 1.0]) if len(measured) else (None, None, None)
    return {
        "rows": len(table),
        "programs": table.n_programs,
        "tvm_programs": len(table.tvm.hashes),
        "predictable_rows": int(table.predictable.sum()),
        "trainable_rows": int(table.trainable.sum()),
        "row_filter_rows": None if table.row_filter is None else int(table.row_filter.sum()),
        "rows_with_repeats": 0 if table.repeats_s is None else len(table) - table.repeats_s.null_count,
        **{name: getattr(table, name).counts() for name in ("source", "op", "device", "backend")},
        "protocol": table.protocol.counts(),
        "framework": table.framework.counts(),
        "excluded": _reasons(table.excluded.counts()),
        "unsupported": _reasons(table.unsupported.counts()),
        "splits": {name: int((parts == part).sum()) for part, name in PART_NAMES.items()},
        "latency_s": {"min": _float(low), "median": _float(middle), "max": _float(high)},
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


def _reasons(counts: dict[str, int]) -> dict[str, int]:
    return {reason: n for reason, n in counts.items() if reason}


def _float(value: Any) -> float | None:
    return None if value is None else float(value)
