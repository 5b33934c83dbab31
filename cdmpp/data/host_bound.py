"""Rows whose latency is time of the host, found by rule.

A source that launches kernels one after the other, where it means to replay a captured graph, measures its host: the
latency does not grow with the work, and other frameworks run the same operator on the same device several times faster.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cdmpp.data.labels import Mask

if TYPE_CHECKING:
    from cdmpp.data.table import MeasurementTable

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
