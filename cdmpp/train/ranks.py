"""The processes of a training run, started by torchrun or alone.

A run of several processes computes the loss of the same batch as one process. Every rank draws the whole batch,
computes its own rows of it, and the gradients are added. Losses that couple rows (the ranking loss and the distance to
the unlabelled target) use the predictions or latents of the whole batch: every rank gets those of the other ranks as
constants, and the sum of the gradients is that of one process.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from cdmpp.errors import CdmppError, DataError, ServiceError

T = TypeVar("T")


class Stopped(Exception):  # noqa: N818  an end on request, not an error
    """SIGTERM ended the run after ``step`` steps; its checkpoint is written."""

    def __init__(self, step: int) -> None:
        super().__init__(f"training stopped after step {step}")
        self.step = step


class Ranks:
    """One process of a run: ``rank`` is its index among ``size``."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size
        self._terminated = False

    @property
    def first(self) -> bool:
        """Whether this process writes files and reports."""
        return self.rank == 0

    def own(self, rows: int) -> slice:
        """This rank's rows of a batch: every ``size``-th, so that ranks get equally long programs of sorted rows."""
        if rows < self.size:
            raise DataError(
                f"a batch of {rows} rows cannot be divided among {self.size} processes",
                hint="raise optimiser.batch_rows (domain.rows), or start fewer processes",
            )
        return slice(self.rank, None, self.size)

    def whole(self, rank_values: Tensor, rows: int) -> Tensor:
        """Values of all rows of a batch, (rows, ...); only this rank's own rows have a gradient."""
        if self.size == 1:
            return rank_values
        values = rank_values.new_zeros((rows, *rank_values.shape[1:]))
        values[self.own(rows)] = rank_values.detach()
        self._add(values)
        index = torch.arange(rows, device=rank_values.device)[self.own(rows)]
        return values.index_copy(0, index, rank_values)

    def shared(self, term: Tensor) -> Tensor:
        """A term that every rank computes of the whole batch: with its gradient, and this rank's part of its value."""
        return term if self.size == 1 else term - term.detach() * (1 - 1 / self.size)

    def sum_gradients(self, parameters: Sequence[Tensor], loss: Tensor) -> tuple[float, bool]:
        """Add the gradients of all ranks; returns the loss of the whole batch, and whether any rank got SIGTERM.

        A parameter without a gradient on any rank keeps none, as in one process: the optimiser then skips it.
        """
        if self.size == 1:
            return float(loss.detach()), self._terminated
        present = [parameter.grad is not None for parameter in parameters]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        tail = loss.new_tensor([*present, float(loss.detach()), self._terminated])
        flat = torch.cat([*(gradient.flatten() for gradient in gradients), tail])
        self._add(flat)
        *parts, tail = torch.split(flat, [*(gradient.numel() for gradient in gradients), len(tail)])
        for parameter, part, count in zip(parameters, parts, tail.tolist(), strict=False):
            parameter.grad = part.view_as(parameter).clone() if count else None
        return float(tail[-2]), bool(tail[-1])

    def from_first(self, compute: Callable[[], T]) -> T:
        """Value that the first rank computes; its :class:`CdmppError` is raised on every rank."""
        if self.size == 1:
            return compute()
        outcome: list[Any] = [None]
        if self.first:
            try:
                outcome = [compute()]
            except CdmppError as error:
                outcome = [error]
        with _lost():
            dist.broadcast_object_list(outcome)
        if isinstance(outcome[0], CdmppError):
            raise outcome[0]
        value: T = outcome[0]
        return value

    def check_same(self, identity: object) -> None:
        """Raise :class:`DataError` on every rank unless all ranks have the same configuration and data."""
        if self.size == 1:
            return
        others: list[Any] = [None] * self.size
        with _lost():
            dist.all_gather_object(others, identity)
        if any(other != others[0] for other in others):
            raise DataError(
                "the processes of the run have different configurations or data",
                hint="give every process the same --config, --records and public tables",
            )

    @contextmanager
    def stoppable(self) -> Iterator[None]:
        """SIGTERM is noted, and reported by the next :meth:`sum_gradients`, if torchrun started this process."""
        if not _started_by_torchrun() or threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(*_: object) -> None:
            self._terminated = True

        self._terminated = False
        before = signal.signal(signal.SIGTERM, note)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def _add(self, values: Tensor) -> None:
        with _lost():
            dist.all_reduce(values)


#: A run of one process.
ALONE = Ranks()


@contextmanager
def process_group() -> Iterator[Ranks]:
    """The ranks of this run: those of torchrun's process group, or this process alone.

    Without WORLD_SIZE in the environment, ``torch.distributed`` is not touched.
    """
    if not _started_by_torchrun():
        yield Ranks()
        return
    dist.init_process_group("gloo")
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()


def _started_by_torchrun() -> bool:
    return "WORLD_SIZE" in os.environ and dist.is_available()


@contextmanager
def _lost() -> Iterator[None]:
    """Turn a lost connection to another rank into an error that says what to do."""
    try:
        yield
    except RuntimeError as error:
        # gloo's messages begin with the place in its source, in brackets.
        reason = str(error).splitlines()[0].rpartition("] ")[2] if str(error) else "no message"
        raise ServiceError(
            f"another process of the run ended: {reason[:200]}",
            hint="its own message has the cause; the same command resumes from the last checkpoint",
        ) from None
