"""End of an iteration: exchanges of gradients during the backward pass, across unlike devices.

QSync's rule for an exchange between devices A and B: it starts on each device when that device is ready
(s = max(end of its last exchange, ready)). It lasts until the other device is ready too, plus the longer of the
two durations. So it ends on both at max(s_A, s_B) + duration. The last exchange therefore ends at the maximum,
over devices and buckets, of (ready + durations of this bucket and all later ones). This is a set of limits that
can be checked for each device alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from cdmpp.errors import FieldError
from cdmpp.plan.precision.schema import ExchangeForm, OperatorForm
from cdmpp.simulate.replay.build import read_link
from cdmpp.simulate.replay.links import Algorithm, collective_s

_GRADIENT_BYTES = 4.0


def buckets(
    form: ExchangeForm | None, operators: Sequence[OperatorForm], index: Mapping[str, int], workers: int
) -> list[tuple[int, float]]:
    """Exchanges in the order in which their gradients are ready.

    Parameters
    ----------
    form : ExchangeForm or None
    operators : sequence of OperatorForm
        In topological order.
    index : mapping of str to int
        Index of each operator in that order, by id.
    workers : int
        Workers of all devices.

    Returns
    -------
    list of (int, float)
        Slot after which the last gradient of a bucket is ready, and the seconds of its exchange.

    Raises
    ------
    FieldError
        A duration or a link is missing, or a bucket names an operator that is unknown or in another bucket.
    """
    if form is None or (workers == 1 and form.buckets is None):
        return []
    collective = None if form.link is None else form.link.collective
    if collective is not None and collective.ranks != workers:
        path = "communication.link.collective.ranks"
        raise FieldError(
            f"{path}: {collective.ranks} ranks, and the devices have {workers} workers",
            path=path,
            hint="give the same number",
        )
    link = read_link(form.link, "communication.link") if form.link is not None else None
    count = len(operators)

    def exchange_s(size: float, path: str) -> float:
        if link is None:
            raise FieldError(
                f"{path}: the seconds of an exchange depend on a link",
                path=path,
                hint="give communication.link, or duration_s of each bucket",
            )
        try:
            algorithm: Algorithm = "ring" if collective is None else "measured"
            return collective_s("all_reduce", workers, size, link, algorithm) if workers > 1 else 0.0
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
            if name not in index:
                raise FieldError(f"{path}: no operator is called {name!r}", path=path)
            if name in seen:
                raise FieldError(f"{path}: {name!r} is already in a bucket", path=path)
            seen.add(name)
        ready = max(2 * count - 1 - index[name] for name in bucket.operators)
        seconds = bucket.duration_s
        if seconds is None:
            size = sum(_GRADIENT_BYTES * operators[index[name]].weight_elements for name in bucket.operators)
            seconds = exchange_s(size, f"communication.buckets.{b}.duration_s")
        out.append((ready, seconds))
    return sorted(out, key=lambda exchange: exchange[0])


def limits(
    exchanges: Sequence[tuple[int, float]], count: int, update_s: float, slowest_update_s: float
) -> tuple[np.ndarray, np.ndarray]:
    """Slots that are followed by exchanges or the update (``after`` and ``tail_s`` of a device's costs).

    Parameters
    ----------
    exchanges : sequence of (int, float)
        Result of :func:`buckets`.
    count : int
        Number of operators.
    update_s, slowest_update_s : float
        Seconds of the optimizer step on this device, and the longest of all devices.

    Returns
    -------
    after : ndarray of int, shape (exchanges + 1,)
    tail_s : ndarray, shape (exchanges + 1,)
    """
    seconds = np.array([duration for _, duration in exchanges], dtype=np.float64)
    tails = np.cumsum(seconds[::-1])[::-1] + slowest_update_s
    after = np.array([*(slot for slot, _ in exchanges), 2 * count - 1], dtype=np.int64)
    return after, np.append(tails, update_s)
