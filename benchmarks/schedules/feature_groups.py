"""Positions of the groups of schedule columns, for the ablation."""

from __future__ import annotations

import numpy as np

from benchmarks.schedules.parts import Array
from cdmpp.features.schedule import SCHEDULE_COLUMNS
from cdmpp.features.schedule import SCHEDULE_GROUPS as GROUPS
from cdmpp.features.schema import WIDTH

__all__ = ["GROUPS", "columns_of"]


def columns_of(group: str) -> Array:
    """Positions of a group's columns in a leaf."""
    return WIDTH + np.array([SCHEDULE_COLUMNS.index(name) for name in GROUPS[group]], dtype=np.int64)
