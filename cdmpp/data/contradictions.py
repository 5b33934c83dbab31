"""Rows that contradict both a sibling device and their own wider type: not the kernel that a framework runs.

A group is one operator with its types and structure, on one device, from one source, framework and protocol. Its rows
are doubtful where equal programs take much longer than on a sibling, a device of the same chip, and where the 16-bit
form of the same sizes is much faster on the device itself. One of the two alone is kept: memories differ between
siblings, and narrow kernels may be slower than wide ones (`docs/data.md`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cdmpp.data.labels import Mask
from cdmpp.errors import UnknownDeviceError
from cdmpp.programs.elements import DTYPE_BYTES

if TYPE_CHECKING:
    from cdmpp.data.table import MeasurementTable, OperatorBlock
    from cdmpp.devices.spec import DeviceSpec

#: Median ratio beyond which a group is slower than a sibling (beyond the ratio of the bandwidths) or than the wider
#: type, over at least so many equal programs.
RATIO, MIN_PAIRS = 1.5, 50
#: Siblings have equal units and peaks, up to this log ratio.
SAME_CHIP = 0.05


def contradicting_rows(table: MeasurementTable) -> Mask:
    """Rows of doubtful groups, (n,) bool."""
    doubtful = np.zeros(len(table), dtype=np.bool_)
    narrow = [block for block in table.specs if DTYPE_BYTES[block.dtype] < 2]
    halves = [block for block in table.specs if _is_half(block)] if narrow else []
    wide = {(half.operator, _structure(half)): half for half in halves}
    for block in narrow:
        half = wide.get((block.operator, _structure(block)))
        for rows in () if half is None else _of_block(table, block, half):
            doubtful[rows] = True
    return doubtful


def _is_half(block: OperatorBlock) -> bool:
    return block.dtype == "bfloat16" and not block.flags.get("scaling") and not block.flags.get("weight_dtype")


def _structure(block: OperatorBlock) -> tuple[tuple[str, object], ...]:
    """Structural fields without those of the types."""
    left_out = ("scaling", "weight_dtype")
    return tuple(sorted((k, v) for k, v in block.flags.items() if k not in left_out))


def _of_block(table: MeasurementTable, block: OperatorBlock, half: OperatorBlock) -> Iterator[NDArray[np.int64]]:
    """Rows of the doubtful groups of a narrow type; ``half`` has the same operator and structure in 16 bits."""
    labels = (table.source, table.framework, table.protocol, table.device)
    places = np.stack([label.codes[block.row_index] for label in labels])
    groups = _split(np.asarray(np.ravel_multi_index(list(places), [len(label.names) for label in labels])))
    for members in groups:
        place = places[:, members[0]]
        for others in groups:
            other = places[:, others[0]]
            if (other[:3] != place[:3]).any() or other[3] == place[3]:
                continue
            names = [table.device.names[code] for code in (place[3], other[3])]
            try:
                device, sibling = (table.device_spec(name) for name in names)
            except UnknownDeviceError:
                continue
            if not _same_chip(device, sibling):
                continue
            rows, other_rows = block.row_index[members], block.row_index[others]
            limit = RATIO * max(1.0, sibling.mem_bandwidth_bytes_per_s / device.mem_bandwidth_bytes_per_s)
            over_sibling = _median_ratio(
                table, rows, other_rows, table.program_key[rows], table.program_key[other_rows]
            )
            if over_sibling <= limit:
                continue
            same = np.all(
                [label.codes[half.row_index] == code for label, code in zip(labels, place, strict=True)], axis=0
            )
            at = np.flatnonzero(same)
            sizes = np.concatenate([_sizes(block.take(members)), _sizes(half.take(at))])
            keys = np.unique(sizes, axis=0, return_inverse=True)[1].reshape(-1)
            over_wide = _median_ratio(table, rows, half.row_index[at], keys[: len(rows)], keys[len(rows) :])
            if over_wide > RATIO:
                yield rows
                break


def _split(codes: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Positions of each distinct code, of :data:`MIN_PAIRS` rows or more."""
    order = np.argsort(codes, kind="stable")
    parts = np.split(order, np.flatnonzero(np.diff(codes[order])) + 1)
    return [part for part in parts if len(part) >= MIN_PAIRS]


def _sizes(block: OperatorBlock) -> NDArray[np.int64]:
    return np.stack([block.sizes[name] for name in sorted(block.sizes)], axis=1)


def _same_chip(one: DeviceSpec, other: DeviceSpec) -> bool:
    figures = [(d.compute_units, d.peak_flops_fp32) for d in (one, other)]
    return one.arch == other.arch and bool((np.abs(np.log(figures[0]) - np.log(figures[1])) < SAME_CHIP).all())


def _median_ratio(
    table: MeasurementTable,
    rows: NDArray[np.int64],
    others: NDArray[np.int64],
    keys: NDArray[np.int64],
    other_keys: NDArray[np.int64],
) -> float:
    """Median ratio of the least latencies of equal keys; 0 where fewer than :data:`MIN_PAIRS` are equal."""
    common = np.intersect1d(keys, other_keys)
    if len(common) < MIN_PAIRS:
        return 0.0
    least = []
    for chosen, of in ((rows, keys), (others, other_keys)):
        latency_s = np.full(len(common), np.inf)
        position = np.searchsorted(common, of)
        known = (position < len(common)) & (common[np.minimum(position, len(common) - 1)] == of)
        np.minimum.at(latency_s, position[known], table.latency_s[chosen[known]])
        least.append(latency_s)
    return float(np.median(least[0] / least[1]))
