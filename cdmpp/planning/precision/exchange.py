"""When an iteration ends: the gradients' exchange behind the backward pass, across unlike devices.

QSync's rule for a communication node on devices A and B: it starts on each where that one is ready
(s = max(end of its last exchange, ready)), and lasts until the other is ready too, plus the longer of the two
durations. So it ends everywhere at max(s_A, s_B) + duration, and after the last of them
end = max over devices and buckets of (ready + the durations of this bucket and all later ones): a set of
limits that each device meets or breaks on its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from cdmpp.errors import FieldError
from cdmpp.planning.precision.forms import ExchangeForm, OperatorForm
from cdmpp.replay.build import read_link
from cdmpp.replay.links import collective_s

_GRADIENT_BYTES = 4.0


def buckets(
    form: ExchangeForm | None, operators: Sequence[OperatorForm], place: Mapping[str, int], workers: int
) -> list[tuple[int, float]]:
    """Exchanges in the order in which they get ready.

    Parameters
    ----------
    form : ExchangeForm or None
    operators : sequence of OperatorForm
        In topological order.
    place : mapping of str to int
        Operator -> its place in that order.
    workers : int
        In all.

    Returns
    -------
    list of (int, float)
        Slot of the queue after which the last gradient of a bucket is there, and the seconds of its exchange.

    Raises
    ------
    FieldError
    """
    if form is None or (workers == 1 and form.buckets is None):
        return []
    link = read_link(form.link, "communication.link") if form.link is not None else None
    count = len(operators)

    def exchange_s(size: float, path: str) -> float:
        if link is None:
            raise FieldError(
                f"{path}: seconds of an exchange need a link",
                path=path,
                hint="give communication.link, or duration_s of each bucket",
            )
        try:
            return collective_s("all_reduce", workers, size, link) if workers > 1 else 0.0
        except FieldError as error:
            path = "communication.link.table"
            raise FieldError(f"{path}: {error.message}", path=path, hint=error.hint) from None

    out: list[tuple[int, float]] = []
    if form.buckets is None:
        filled, last = 0.0, 0
        for i in reversed(range(count)):
            size = _GRADIENT_BYTES * operators[i].weight_elements
            if size:
                filled, last = filled + size, 2 * count - 1 - i
            if filled and (filled >= form.bucket_bytes or i == 0):
                out.append((last, exchange_s(filled, "communication.link")))
                filled = 0.0
        return out
    seen: set[str] = set()
    for b, bucket in enumerate(form.buckets):
        for k, name in enumerate(bucket.operators):
            path = f"communication.buckets.{b}.operators.{k}"
            if name not in place:
                raise FieldError(f"{path}: no operator is called {name!r}", path=path)
            if name in seen:
                raise FieldError(f"{path}: {name!r} is in a bucket already", path=path)
            seen.add(name)
        ready = max(2 * count - 1 - place[name] for name in bucket.operators)
        seconds = bucket.duration_s
        if seconds is None:
            size = sum(_GRADIENT_BYTES * operators[place[name]].weight_elements for name in bucket.operators)
            seconds = exchange_s(size, f"communication.buckets.{b}.duration_s")
        out.append((ready, seconds))
    return sorted(out, key=lambda one: one[0])


def limits(
    exchanges: Sequence[tuple[int, float]], count: int, update_s: float, slowest_update_s: float
) -> tuple[np.ndarray, np.ndarray]:
    """Slots and what follows them (``after`` and ``tail_s`` of a device's costs).

    Parameters
    ----------
    exchanges : sequence of (int, float)
        Of :func:`buckets`.
    count : int
        Operators.
    update_s, slowest_update_s : float
        Optimizer step of this device, and the longest of all devices.
    """
    seconds = np.array([duration for _, duration in exchanges], dtype=np.float64)
    tails = np.cumsum(seconds[::-1])[::-1] + slowest_update_s
    after = np.array([*(slot for slot, _ in exchanges), 2 * count - 1], dtype=np.int64)
    return after, np.append(tails, update_s)
