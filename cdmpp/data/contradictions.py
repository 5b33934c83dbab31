"""Rows that other measurements contradict: time of the host, and kernels that a framework does not run.

A source that launches kernels one after the other, where it means to replay a captured graph, measures its host: the
latency does not grow with the work, and other frameworks run the same operator on the same device several times faster.

A narrow type is doubtful in a group: one operator with its types and structure, on one device, from one source,
framework and protocol. Equal programs take much longer there than on a sibling, a device of the same chip, and the
16-bit form of the same sizes is much faster on the device itself. One of the two alone is kept: memories differ between
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
#: A row is far above its physical bound from this factor on; a group needs so many of them.
FAR, MIN_ROWS = 4.0, 50
#: Quantile of the far rows that is the floor of a group, and how many times the least floor of the other frameworks on
#: the device it is at least. Of the groups of the visible tables, host time is 7 to 67 times it, kernels up to 5 times.
QUANTILE, ABOVE_OTHERS = 0.05, 6.0
#: Rows up to so many times the floor are host time, if half of the group's far rows are, and if the bounds of the
#: middle 80 % of them differ by so much.
ON_THE_FLOOR, SPREAD = 2.0, 4.0


def host_bound_rows(table: MeasurementTable, bound_s: NDArray[np.float64]) -> Mask:
    """Rows that are host time, (n,) bool; ``bound_s`` (n,): their physical bounds, NaN where there is none.

    Rows are grouped by operator, types and structure, device, source and framework. Eager calls have their host time by
    definition, and are never among them.
    """
    is_bound = np.zeros(len(table), dtype=np.bool_)
    with np.errstate(invalid="ignore"):
        far = (table.latency_s > FAR * bound_s) & ~table.protocol.is_("eager") & table.implementation.is_("fused")
    for block in table.specs:
        index = block.row_index[far[block.row_index]]
        if len(index) < 2 * MIN_ROWS:
            continue
        places = np.stack([table.source.codes[index], table.device.codes[index]], axis=1)
        for place in np.unique(places, axis=0):
            here = index[(places == place).all(axis=1)]
            frameworks = table.framework.codes[here]
            groups = [here[frameworks == code] for code in np.unique(frameworks)]
            floors = [np.quantile(table.latency_s[g], QUANTILE) if len(g) >= MIN_ROWS else np.inf for g in groups]
            for number, group in enumerate(groups):
                others = [floor for other, floor in enumerate(floors) if other != number]
                if not ABOVE_OTHERS * min(others, default=np.inf) < floors[number] < np.inf:
                    continue
                on_it = group[table.latency_s[group] <= ON_THE_FLOOR * floors[number]]
                low, high = np.quantile(bound_s[on_it], (0.1, 0.9))
                if 2 * len(on_it) >= len(group) and high >= SPREAD * low:
                    is_bound[on_it] = True
    return is_bound


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


def _same_chip(device: DeviceSpec, sibling: DeviceSpec) -> bool:
    figures = [(d.compute_units, d.peak_flops_fp32) for d in (device, sibling)]
    return device.arch == sibling.arch and bool((np.abs(np.log(figures[0]) - np.log(figures[1])) < SAME_CHIP).all())


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
