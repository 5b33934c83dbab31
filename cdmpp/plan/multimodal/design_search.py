"""Search for the design of one or several steps: cuts of the layers, and numbers of sub-micro-batches."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from cdmpp.plan.multimodal.candidates import segment_placements
from cdmpp.plan.multimodal.evaluate import Evaluated, StepDesigns
from cdmpp.plan.multimodal.modules import split_evenly
from cdmpp.plan.multimodal.placement import move_layer
from cdmpp.plan.multimodal.space import Cuts, Items, cuts_of, layer_seconds, most_segments, place

#: Best designs that are kept; the search continues from these.
POOL = 12
#: Numbers of sub-micro-batches beside the present one that are tried first.
_NEAR = (1, -1, 2, -2, 3, -3)
#: A random change continues from the n-th best design with this share of the probability of the one before it.
_RANK_SHARE = 0.7
#: Changes in a row that give nothing new, after which the search ends.
_MAX_STALE = 500
#: Counts up to this are all tried for each module in turn; of more, near ones and those at these ratios.
_MAX_SCAN, _RATIOS = 32, (0.5, 2.0, 0.25, 4.0, 0.67, 1.5, 0.8, 1.25, 0.125, 8.0)


@dataclass(frozen=True)
class Design:
    """Cuts of the layers, and the sub-micro-batches of each step."""

    cuts: Cuts
    items: tuple[Items, ...]


@dataclass(frozen=True)
class Entry:
    """A design with its schedules, one for each step."""

    total_s: float
    number: int
    design: Design
    evaluated: tuple[Evaluated, ...]


class DesignSearch:
    """The best designs so far, and the search for better ones.

    Parameters
    ----------
    steps : sequence of StepDesigns
        They share modules and ranks.
    rng : numpy.random.Generator
    over : callable
        Whether to end.
    on_best : callable
        Called with each new best entry.
    """

    def __init__(
        self,
        steps: Sequence[StepDesigns],
        rng: np.random.Generator,
        over: Callable[[], bool],
        on_best: Callable[[Entry], None],
    ) -> None:
        self.steps, self._rng, self._over, self._on_best = steps, rng, over, on_best
        self.modules, self.ranks = steps[0].step.modules, steps[0].step.ranks
        self.pool: list[Entry] = []
        self._tried: set[int] = set()  # hashes: a long search tries millions
        self._number = self._stale = self._tried_before = 0

    @property
    def best_s(self) -> float:
        """Sum of the makespans of the best design; infinite without one."""
        return self.pool[0].total_s if self.pool else float("inf")

    def add(self, design: Design, parent: Entry | None = None) -> bool:
        """Evaluate a design; True if it is the best so far. Unchanged steps of ``parent`` are not evaluated again."""
        if hash(design) in self._tried:
            return False
        self._tried.add(hash(design))
        placement = place(design.cuts, self.ranks)
        same = parent is not None and parent.design.cuts == design.cuts
        evaluated = []
        for at, (step, items) in enumerate(zip(self.steps, design.items, strict=True)):
            if parent is not None and same and parent.design.items[at] == items:
                evaluated.append(parent.evaluated[at])
                continue
            step_result = step.evaluate(placement, items, self.best_s if len(self.steps) == 1 else float("inf"))
            if step_result is None:
                return False
            evaluated.append(step_result)
        return self.insert(design, evaluated)

    def insert(self, design: Design, evaluated: Sequence[Evaluated]) -> bool:
        """Insert a design whose schedules are known; True if it is the best so far."""
        self._number += 1
        total_s = sum(step_result.schedule.makespan_s for step_result in evaluated)
        entry = Entry(total_s, self._number, design, tuple(evaluated))
        improved = total_s < self.best_s * (1 - 1e-12)
        bisect.insort(self.pool, entry, key=lambda e: (e.total_s, e.number))
        del self.pool[POOL:]
        if improved:
            self._on_best(entry)
        return improved

    def scan(self) -> None:
        """Try other numbers of sub-micro-batches and of segments from the best design until none is better."""
        improved = True
        while improved and not self._over():
            improved = False
            for at, step in enumerate(self.steps):
                for i in range(len(self.modules)):
                    if step.step.batch[i]:
                        improved |= self._scan_counts(at, i)
            for i in range(len(self.modules)):
                improved |= self._scan_segments(i)

    def wander(self) -> None:
        """Change good designs at random until the time is over."""
        while not self._over():
            rank = min(int(self._rng.geometric(1 - _RANK_SHARE)) - 1, len(self.pool) - 1)
            parent = self.pool[rank]
            design = parent.design
            for _ in range(int(self._rng.integers(1, 4))):
                design = self._changed(design)
            self.add(design, parent)
            if self._exhausted():
                return

    def _exhausted(self) -> bool:
        """Whether many changes in a row gave designs that were tried before: the space is small."""
        self._stale = self._stale + 1 if len(self._tried) == self._tried_before else 0
        self._tried_before = len(self._tried)
        return self._stale > _MAX_STALE

    def _scan_counts(self, at: int, i: int) -> bool:
        """Try other numbers of sub-micro-batches of one module in one step."""
        improved = False
        best = self.pool[0]
        items = self.steps[at].step.batch[i]
        for count in _counts(items, len(best.design.items[at][i])):
            if self._over():
                break
            changed = _with_units(best.design, at, i, split_evenly(items, count))
            if self.add(changed, best) | self.add(self._rebalanced(changed), best):
                improved, best = True, self.pool[0]
        return improved

    def _scan_segments(self, i: int) -> bool:
        improved = False
        for count in range(1, most_segments(self.modules[i], self.ranks) + 1):
            if self._over():
                break
            segments = self._segments(self.pool[0].design)
            segments[i] = count
            for cuts in self._balanced(self.pool[0].design, segments):
                improved |= self.add(replace(self.pool[0].design, cuts=cuts), self.pool[0])
        return improved

    def _segments(self, design: Design) -> list[int]:
        return [(len(cuts) - 1) // self.ranks for cuts in design.cuts]

    def _all_units(self, design: Design) -> list[tuple[int, ...]]:
        """Sub-micro-batches of all steps together, by module."""
        return [tuple(n for items in design.items for n in items[i]) for i in range(len(self.modules))]

    def _balanced(self, design: Design, segments: Sequence[int]) -> list[Cuts]:
        placements = segment_placements(self.modules, self._all_units(design), segments, self.ranks)
        return [cuts_of(placement, self.ranks) for placement in placements]

    def _rebalanced(self, design: Design) -> Design:
        """The same numbers of segments, balanced for the design's sub-micro-batches."""
        return replace(design, cuts=self._balanced(design, self._segments(design))[0])

    # Random changes

    def _changed(self, design: Design) -> Design:
        move = self._rng.random()
        if move < 0.35:
            return self._change_counts(design)
        if move < 0.75:
            return self._move_layers(design)
        if move < 0.85:
            return self._rebalanced(design)
        segments = self._segments(design)
        i = int(self._rng.integers(len(segments)))
        most = most_segments(self.modules[i], self.ranks)
        segments[i] = int(np.clip(segments[i] + self._rng.choice((-1, 1)), 1, most))
        choices = self._balanced(design, segments)
        return replace(design, cuts=choices[int(self._rng.integers(len(choices)))])

    def _change_counts(self, design: Design) -> Design:
        """Other numbers of sub-micro-batches of one or several modules in one step."""
        at = int(self._rng.integers(len(self.steps)))
        batch = self.steps[at].step.batch
        active = [i for i in range(len(self.modules)) if batch[i]]
        share = 1.0 if self._rng.random() < 0.3 else 1 / len(active)
        chosen = [i for i in active if self._rng.random() < share] or [int(self._rng.choice(active))]
        aligned = len(design.items[at][int(self._rng.choice(active))]) if self._rng.random() < 0.2 else 0
        factor = float(np.exp(0.5 * self._rng.standard_normal()))
        for i in chosen:
            count = len(design.items[at][i])
            step = int(self._rng.choice(_NEAR)) if self._rng.random() < 0.6 else round(count * factor) - count
            count = min(max(aligned or count + step, 1), batch[i])
            design = _with_units(design, at, i, split_evenly(batch[i], count))
        return design

    def _move_layers(self, design: Design) -> Design:
        """Move a layer of a module to another part; often another module's layer goes the other way."""
        load = self._load_s(design)
        source, target = int(load.argmax()), int(load.argmin())
        if self._rng.random() < 0.6:
            source, target = (int(rank) for rank in self._rng.integers(self.ranks, size=2))
        moves = [(source, target)]
        if self._rng.random() < 0.4:
            moves.append((target, source))
        for a, b in moves:
            i = int(self._rng.integers(len(self.modules)))
            cuts = np.array(design.cuts[i])
            parts = np.arange(len(cuts) - 1)
            sources = parts[(parts % self.ranks == a) & (np.diff(cuts) > 0)]
            targets = parts[parts % self.ranks == b]
            if not len(sources) or a == b:
                continue
            moved = move_layer(cuts, int(self._rng.choice(sources)), int(self._rng.choice(targets)))
            if (np.diff(moved) >= 0).all():
                row = tuple(moved.tolist())
                design = replace(design, cuts=(*design.cuts[:i], row, *design.cuts[i + 1 :]))
        return design

    def _load_s(self, design: Design) -> np.ndarray:
        """Seconds of work of each rank in all steps."""
        load = np.zeros(self.ranks)
        for module, cuts, units in zip(self.modules, design.cuts, self._all_units(design), strict=True):
            layer_s = layer_seconds(module, units)
            weights = np.diff(np.concatenate([[0.0], np.cumsum(module.layers)])[list(cuts)])
            load += layer_s * weights.reshape(-1, self.ranks).sum(axis=0)
        return load


def _with_units(design: Design, at: int, i: int, units: tuple[int, ...]) -> Design:
    """The design with other sub-micro-batches of module ``i`` in step ``at``."""
    items = design.items[at]
    changed = (*items[:i], units, *items[i + 1 :])
    return replace(design, items=(*design.items[:at], changed, *design.items[at + 1 :]))


def _counts(items: int, now: int) -> Iterator[int]:
    """Numbers of sub-micro-batches to try beside ``now``, near ones first."""
    near = [now + step for step in _NEAR]
    if items <= _MAX_SCAN:
        tried = [*near, *range(1, items + 1)]
    else:
        tried = [*near, *(round(now * ratio) for ratio in _RATIOS), 1, items]
    for count in dict.fromkeys(tried):
        if 1 <= count <= items and count != now:
            yield count
