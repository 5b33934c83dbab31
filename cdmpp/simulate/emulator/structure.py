"""The passes of a step as numbered tasks, with their orders and dependencies, without costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from cdmpp.errors import FieldError
from cdmpp.simulate.emulator.orders import Orders, Pass
from cdmpp.simulate.emulator.stages import BACKWARD, FORWARD, IN, KINDS, OUT, WEIGHT, Floats, Ints

_NUMBER = {"F": FORWARD, "B": BACKWARD, "W": WEIGHT}
_MOST_NAMED = 6


@dataclass(frozen=True)
class Structure:
    """Orders and dependencies of numbered tasks.

    A task's number is (kind x stages + stage) x micro-batches + micro-batch, with the kinds of
    :data:`cdmpp.simulate.emulator.stages.KINDS`.
    """

    ranks: int
    stages: int
    micro_batches: int
    rank_of: Ints  # (stages,)
    # As :func:`cdmpp.simulate.emulator.evaluate.evaluate` takes them. Rows from ``ranks`` on are the ranks' host links,
    # where something is offloaded.
    order: Ints
    begin: Ints
    deps: Ints  # (tasks, 3), as in :func:`cdmpp.simulate.emulator.evaluate.evaluate`
    # (tasks, 3): between which stages the dependence's data travel: cut c lies behind stage c; -1 within a rank.
    cut: Ints
    split: NDArray[np.bool_]  # (stages, micro_batches): whether the weight gradients are a pass of their own

    @property
    def tasks(self) -> int:
        """Number of task numbers; not every task is in an order."""
        return len(self.deps)

    @property
    def nbytes(self) -> int:
        """Memory of its arrays."""
        return self.order.nbytes + self.deps.nbytes + self.cut.nbytes + self.split.nbytes

    @cached_property
    def any_split(self) -> bool:
        """Whether any backward pass is split."""
        return bool(self.split.any())

    @cached_property
    def crosses(self) -> Floats:
        """1 where the data of a dependence travel between ranks, else 0; float64, shape (tasks, 3)."""
        return (self.cut >= 0).astype(np.float64)

    def name(self, task: int) -> tuple[str, int, int]:
        """Kind, stage and micro-batch of a task."""
        rest, micro_batch = divmod(int(task), self.micro_batches)
        kind, stage = divmod(rest, self.stages)
        return KINDS[kind], stage, micro_batch


def build(
    orders: Orders, stages: int, micro_batches: int, offloaded: Sequence[bool] = (), path: str = "schedule"
) -> Structure:
    """Number the passes of given orders.

    ``offloaded``: by stage, whether its activations travel over the host link of its rank. ``path``: the request's
    field that the orders come from, for messages.
    Raises FieldError: a pass is unknown, missing or there twice, or a stage is on two ranks.
    """
    size = stages * micro_batches
    rows = [_numbers(passes, stages, micro_batches, f"{path}.{rank}") for rank, passes in enumerate(orders)]
    rank_of = _check(rows, orders, stages, micro_batches, path)
    there = np.zeros(3 * size, bool)
    there[np.concatenate(rows)] = True
    split = there[WEIGHT * size :].reshape(stages, micro_batches)

    copies = any(offloaded)
    deps = np.full(((len(KINDS) if copies else 3) * size, 3), -1, np.int32)
    cut = np.full_like(deps, -1)
    number = np.arange(size, dtype=np.int32)
    forward, backward, weight = (deps[kind * size : (kind + 1) * size] for kind in (FORWARD, BACKWARD, WEIGHT))
    forward[micro_batches:, 0] = number[:-micro_batches]
    backward[:, 0] = number
    backward[:-micro_batches, 1] = number[micro_batches:] + BACKWARD * size
    weight[:, 0] = number + BACKWARD * size
    travels = np.where(rank_of[1:] != rank_of[:-1], np.arange(stages - 1), -1).repeat(micro_batches)
    cut[micro_batches:size, 0] = travels
    cut[BACKWARD * size : (BACKWARD + 1) * size - micro_batches, 1] = travels
    if copies:
        rows += [_link(row, offloaded, size, micro_batches, deps, cut) for row in rows]
    begin = np.concatenate(([0], np.cumsum([len(row) for row in rows]))).astype(np.int32)
    return Structure(len(orders), stages, micro_batches, rank_of, np.concatenate(rows), begin, deps, cut, split)


def deadlock(structure: Structure, end: Floats, path: str = "schedule") -> FieldError:
    """The error for orders that wait for each other."""
    stuck = []
    for rank in range(structure.ranks):
        row = structure.order[structure.begin[rank] : structure.begin[rank + 1]]
        late = np.flatnonzero(end[row] < 0)
        if not len(late):
            continue
        task = row[late[0]]
        waits = next(d for d in structure.deps[task] if d >= 0 and end[d] < 0)
        stuck.append((rank, int(late[0]), _words(structure.name(task)), _words(structure.name(waits))))
    waiting = "; ".join(
        f"rank {rank} at position {at} has {what}, which waits for {for_what}"
        for rank, at, what, for_what in stuck[:_MOST_NAMED]
    )
    more = f"; and {len(stuck) - _MOST_NAMED} more ranks" if len(stuck) > _MOST_NAMED else ""
    rank, at = stuck[0][:2]
    return FieldError(
        f"{path}: the orders wait for each other: {waiting}{more}",
        path=f"{path}.{rank}.{at}",
        hint="move what is waited for before what waits, on its own rank",
    )


def _words(name: tuple[str, int, int]) -> str:
    return f"{name[0]} of micro-batch {name[2]} in stage {name[1]}"


def _numbers(passes: list[Pass], stages: int, micro_batches: int, path: str) -> Ints:
    for at, (_, stage, micro_batch) in enumerate(passes):
        if not (0 <= stage < stages and 0 <= micro_batch < micro_batches):
            raise FieldError.at(
                f"{path}.{at}",
                f"there is no micro-batch {micro_batch} in stage {stage}",
                hint=f"there are stages 0 to {stages - 1} and micro-batches 0 to {micro_batches - 1}",
            )
    return np.array([(_NUMBER[kind] * stages + stage) * micro_batches + m for kind, stage, m in passes], np.int32)


def _check(rows: list[Ints], orders: Orders, stages: int, micro_batches: int, path: str) -> Ints:
    """Check that F and B occur once, W at most once, each stage on one rank; return the rank of each stage."""
    rank_of = np.full(stages, -1, np.int32)
    seen = np.zeros(3 * stages * micro_batches, bool)
    for rank, (row, passes) in enumerate(zip(rows, orders, strict=True)):
        home = row // micro_batches % stages
        for at in np.flatnonzero((rank_of[home] >= 0) & (rank_of[home] != rank)):
            raise FieldError.at(
                f"{path}.{rank}.{at}",
                f"stage {passes[at].stage} is on rank {rank_of[home[at]]} already",
                hint="all passes of a stage run on one rank",
            )
        rank_of[home] = rank
        once = np.zeros(len(row), bool)
        once[np.unique(row, return_index=True)[1]] = True
        for at in np.flatnonzero(~once | seen[row]):
            raise FieldError.at(f"{path}.{rank}.{at}", f"{_words(passes[at])} is there twice")
        seen[row] = True
    missing = np.flatnonzero(~seen[: 2 * stages * micro_batches])
    if len(missing):
        first = divmod(int(missing[0]), micro_batches)
        name = ("FB"[first[0] // stages], first[0] % stages, first[1])
        raise FieldError.at(
            path,
            f"{_words(name)} is missing" + (f", and {len(missing) - 1} more" if missing[1:].size else ""),
            hint="every micro-batch passes every stage forward and backward",
        )
    return rank_of


def _link(row: Ints, offloaded: Sequence[bool], size: int, micro_batches: int, deps: Ints, cut: Ints) -> Ints:
    """The copies of one rank in the order of its host link; passes that wait for them are put into ``deps``.

    Activations leave when their forward pass has ended. They come back while the pass before their backward
    pass runs: earlier would take the memory that the copy is to save. So the copy waits for everything that this pass
    waits for: the pass before it on the rank, and its input from another rank.
    """
    moves = np.array(offloaded)[row // micro_batches % (size // micro_batches)]
    kind = row // size
    place = {int(task): at for at, task in enumerate(row)}
    cycle: list[int] = []
    for at, task in enumerate(row.tolist()):
        following = at + 1
        if following < len(row) and moves[following] and kind[following] == BACKWARD:
            cell = int(row[following]) % size
            if place[cell] < at:
                cycle.append(IN * size + cell)
                deps[IN * size + cell, 0] = row[at - 1]
                if kind[at] != WEIGHT:
                    arrives = int(kind[at] == BACKWARD)
                    deps[IN * size + cell, 1] = deps[task, arrives]
                    cut[IN * size + cell, 1] = cut[task, arrives]
                deps[BACKWARD * size + cell, 2] = IN * size + cell
        # Activations that are needed at once are not copied.
        if moves[at] and kind[at] == FORWARD and place[BACKWARD * size + task] > following:
            cycle.append(OUT * size + task)
            deps[OUT * size + task, 0] = task
    return np.array(cycle, np.int32)
