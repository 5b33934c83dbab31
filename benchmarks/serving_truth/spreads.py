"""Residuals of profiles: the spread of measured around predicted durations, within sources and between them.

A residual is what an interval needs beside the bounds of its kernels to hold :data:`SHARE` of the measured durations.
Each model on each device of a source weighs the same, :data:`OWN` times as much where it ran on the profile's engine.
Where a profile's sources cover a cell (``residual``), misses are those of its own fit as well; where they do not
(``near_residual``, ``out_residual``), those of profiles that are fitted without the cell's source.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from cdmpp.llm.engines.profile import EngineProfile
from cdmpp.model.domain.score import LABELS, Label

#: Share of measured durations that an interval holds, and quantile of a normal distribution at its ends.
SHARE, TO_BOUND = 0.8, 1.2816
OWN = 4.0
FIELDS = ("residual", "near_residual", "out_residual")

#: Engine, kind of measurement and device.
Source = tuple[str, str, str]
#: Source and model, domain, and the residual that the interval needs.
Miss = tuple[tuple[Source, str], Label, float]


class _Row(Protocol):
    @property
    def cell(self) -> Any: ...
    def placed(self, engine: EngineProfile) -> tuple[EngineProfile, Label, str]: ...
    def figures(self, engine: EngineProfile) -> Any: ...


def source_of(row: _Row) -> Source:
    """The source of a cell."""
    return row.cell.engine, row.cell.source.partition(",")[0], row.cell.device


def misses(rows: Iterable[_Row], profile: EngineProfile) -> list[Miss]:
    """The residual that each cell needs."""
    plain = profile.model_copy(update=dict.fromkeys(FIELDS, 0.0))
    found = []
    for row in rows:
        bounds = np.log(row.figures(plain) / row.cell.seconds)
        beyond = bounds[2] - bounds[0] if bounds[0] < 0 else bounds[0] - bounds[1]
        needed = max(0.0, float(bounds[0] ** 2 - beyond**2)) ** 0.5 / TO_BOUND
        found.append(((source_of(row), row.cell.model), row.placed(plain)[1], needed))
    return found


class Spreads:
    """Misses of all sources.

    Parameters
    ----------
    rows : sequence of cells
    shipped : mapping of str to EngineProfile
        By engine.
    left_out : mapping of Source to EngineProfile
        Profiles that are fitted without a source.
    """

    def __init__(
        self, rows: Sequence[_Row], shipped: Mapping[str, EngineProfile], left_out: Mapping[Source, EngineProfile]
    ) -> None:
        self._rows = {source: [row for row in rows if source_of(row) == source] for source in map(source_of, rows)}
        self._within = {source: misses(own, shipped[source[0]]) for source, own in self._rows.items()}
        self._between = {source: misses(self._rows[source], profile) for source, profile in left_out.items()}

    def placed(self, profile: EngineProfile, engine: str, without: Source | None = None) -> EngineProfile:
        """A profile of an engine with the residuals of all sources, or of all but one that it was fitted without."""
        within = {source: found for source, found in self._within.items() if source != without}
        if without is not None:
            within |= {s: misses(self._rows[s], profile) for s in within if s[0] == engine}
        # A source that a profile covers says nothing of those that it does not.
        known = [miss for found in within.values() for miss in found if miss[1] == "in"]
        known += [miss for source, found in self._between.items() if source != without for miss in found]
        sizes, least, update = Counter(miss[0] for miss in known), 0.0, {}
        for field, label in zip(FIELDS, LABELS, strict=True):
            chosen = [miss for miss in known if miss[1] == label]
            if chosen:
                needed = np.array([miss[2] for miss in chosen])
                weights = np.array([(OWN if m[0][0][0] == engine else 1.0) / sizes[m[0]] for m in chosen])
                order = np.argsort(needed)
                at = int(np.searchsorted(np.cumsum(weights[order]), SHARE * weights.sum()))
                least = max(least, float(needed[order][min(at, len(chosen) - 1)]))
            update[field] = round(least, 3)
        return profile.model_copy(update=update)
