"""Exact minima of sums of small tables, by eliminating one variable after the other (bucket elimination,
Dechter 1999), and lower bounds where a joined table would be too large (mini-buckets).

An operator's type meets its neighbours' types alone, so most networks need tables of a few dozen entries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

#: Entries of a joined table above which a bucket is split.
MAX_ENTRIES = 4096
Scope = tuple[int, ...]
_Index = tuple[slice | None, ...]


@dataclass(frozen=True)
class _Group:
    """Tables that are added and minimised together: (number, axes order, broadcast) of each."""

    tables: list[tuple[int, tuple[int, ...], _Index]]
    out: int | None
    rest: Scope


@dataclass(frozen=True)
class _Bucket:
    variable: int
    #: Every table that mentions the variable when its turn comes, with its scope.
    members: list[tuple[int, Scope]]
    groups: list[_Group]


class Elimination:
    """A fixed order and layout for tables of fixed scopes, used for many fillings.

    Parameters
    ----------
    sizes : sequence of int
        Values of each variable.
    scopes : sequence of tuple of int
        The variables of each table, in the order of its axes; every variable occurs in one at least.
    """

    def __init__(self, sizes: Sequence[int], scopes: Sequence[Scope], max_entries: int = MAX_ENTRIES) -> None:
        self.sizes = list(sizes)
        self.exact = True
        self._inputs = len(scopes)
        alive: dict[int, Scope] = dict(enumerate(scopes))
        near: dict[int, set[int]] = {v: set() for v in range(len(sizes))}
        for scope in scopes:
            for v in scope:
                near[v].update(set(scope) - {v})
        mentions: dict[int, set[int]] = {v: set() for v in near}
        for number, scope in alive.items():
            for v in scope:
                mentions[v].add(number)
        self._buckets: list[_Bucket] = []
        made = len(scopes)
        left = set(near)
        while left:
            # Fewest neighbours first; ties by number, so that the order is always the same.
            variable = min(left, key=lambda v: (len(near[v]), v))
            members = [(number, alive[number]) for number in sorted(mentions[variable])]
            groups = []
            for chosen in self._split(members, max_entries):
                rest = tuple(sorted({v for _, scope in chosen for v in scope} - {variable}))
                laid = [(number, *_layout(scope, (variable, *rest))) for number, scope in chosen]
                out = None
                if rest:
                    out, made = made, made + 1
                    alive[out] = rest
                    for v in rest:
                        mentions[v].add(out)
                        near[v].update(set(rest) - {v})
                groups.append(_Group(laid, out, rest))
            self.exact = self.exact and len(groups) == 1
            for number, scope in members:
                for v in scope:
                    mentions[v].discard(number)
                del alive[number]
            for v in near[variable]:
                near[v].discard(variable)
            left.discard(variable)
            self._buckets.append(_Bucket(variable, members, groups))
        self._made = made

    def _split(self, members: list[tuple[int, Scope]], max_entries: int) -> list[list[tuple[int, Scope]]]:
        groups: list[tuple[set[int], list[tuple[int, Scope]]]] = []
        for member in sorted(members, key=lambda one: (-len(one[1]), one[0])):
            for scope, chosen in groups:
                joined = scope | set(member[1])
                if np.prod([float(self.sizes[v]) for v in joined]) <= max_entries:
                    scope.update(member[1])
                    chosen.append(member)
                    break
            else:
                groups.append((set(member[1]), [member]))
        return [chosen for _, chosen in groups]

    def minimise(self, tables: Sequence[np.ndarray]) -> tuple[float, list[int], Messages]:
        """Lower bound of the sum (its minimum where :attr:`exact`), and values that reach or approach it.

        Parameters
        ----------
        tables : sequence of ndarray
            One for each scope.

        Returns
        -------
        bound : float
        values : list of int
        messages : Messages
            For :meth:`enumerate`.
        """
        known: Messages = [*tables, *([_NOTHING] * (self._made - self._inputs))]
        bound = 0.0
        for bucket in self._buckets:
            for group in bucket.groups:
                total: np.ndarray | None = None
                for number, axes, index in group.tables:
                    laid = known[number].transpose(axes)[index]
                    total = laid if total is None else total + laid
                assert total is not None
                least = total.min(axis=0)
                if group.out is None:
                    bound += float(least)
                else:
                    known[group.out] = least
        values = [0] * len(self.sizes)
        for bucket in reversed(self._buckets):
            values[bucket.variable] = int(np.argmin(self._row(bucket, known, values)))
        return bound, values, known

    def enumerate(
        self,
        known: Messages,
        bound: float,
        below: Callable[[], float],
        visit: Callable[[list[int]], object],
        go_on: Callable[[], bool],
    ) -> bool:
        """Visit every choice of values whose sum may be below a threshold, the promising ones first.

        Parameters
        ----------
        known, bound
            From :meth:`minimise`.
        below : callable
            The threshold; may fall on the way.
        visit : callable
        go_on : callable
            PriceRequest at every step; False ends the walk.

        Returns
        -------
        bool
            Whether the walk is complete: nothing below the threshold is left.
        """
        order = list(reversed(self._buckets))
        values = [0] * len(self.sizes)
        # Depth-first with a stack of (depth, value to set before it, bound of what is set).
        stack: list[tuple[int, int, float]] = [(0, -1, bound)]
        while stack:
            if not go_on():
                return False
            depth, value, reached = stack.pop()
            if reached >= below():
                continue
            if depth:
                values[order[depth - 1].variable] = value
            if depth == len(order):
                visit(list(values))
                continue
            bucket = order[depth]
            row = self._row(bucket, known, values)
            sent = sum(
                float(known[group.out][tuple(values[v] for v in group.rest)])
                if group.out is not None
                else float(self._alone(group, known))
                for group in bucket.groups
            )
            for choice in np.argsort(-row, kind="stable"):
                stack.append((depth + 1, int(choice), reached + float(row[choice]) - sent))
        return True

    def _row(self, bucket: _Bucket, known: Messages, values: list[int]) -> np.ndarray:
        row = np.zeros(self.sizes[bucket.variable])
        for number, scope in bucket.members:
            at = tuple(slice(None) if v == bucket.variable else values[v] for v in scope)
            row = row + known[number][at]
        return row

    @staticmethod
    def _alone(group: _Group, known: Messages) -> float:
        return float(sum(known[number] for number, _, _ in group.tables).min())  # type: ignore[union-attr]


Messages = list[np.ndarray]
_NOTHING = np.zeros(0)


def _layout(scope: Scope, target: Scope) -> tuple[tuple[int, ...], _Index]:
    """Axes of a table in the target's order, and the index that spreads them over the target's axes."""
    axes = tuple(scope.index(v) for v in target if v in scope)
    index = tuple(slice(None) if v in scope else None for v in target)
    return axes, index
