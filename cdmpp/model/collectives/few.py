"""A model of collectives for one machine, from a few of its own measurements.

:func:`informative_rows` chooses measurements of a new device: those that reduce the model's uncertainty most, without
their latencies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import DataError, InvalidProgramError
from cdmpp.model.collectives.context import CollectiveContext, context_of
from cdmpp.model.collectives.model import CollectiveModel
from cdmpp.model.collectives.residual import NOISE, Correction, prior_covariance
from cdmpp.programs.collectives import Collective
from cdmpp.programs.operators import make_operator, parse_operator

Array = np.ndarray[Any, np.dtype[Any]]


def as_collective(program: Collective | Mapping[str, Any] | str) -> Collective:
    """A collective from its specification, fields or text."""
    if isinstance(program, str):
        spec: Any = parse_operator(program)
    else:
        spec = program if isinstance(program, Collective) else make_operator(program)
    if not isinstance(spec, Collective):
        raise InvalidProgramError(f"{spec.operator} is no collective", hint="all_reduce:bytes=1048576,ranks=2")
    return spec


def fit_collectives(
    base: CollectiveModel,
    rows: Sequence[tuple[Collective | Mapping[str, Any] | str, float]],
    device: DeviceSpec,
    *,
    protocol: str = "eager",
) -> CollectiveModel:
    """The model corrected by measurements (collective, seconds) of one machine.

    ``base``: the shipped model, ``LatencyPredictor.load().collectives``. ``protocol``: mode of collectives that state
    none. Raises DataError where there are no rows, or a latency is not a positive number.
    """
    if not rows:
        raise DataError("there are no measurements of collectives", hint="pass (collective, seconds) pairs")
    name = base.known_as(device) or device.name
    specs = [as_collective(program) for program, _ in rows]
    seconds = np.array([float(value) for _, value in rows])
    if not (np.isfinite(seconds).all() and (seconds > 0).all()):
        raise DataError(f"a latency of {seconds.min():g} s is no time", hint="seconds, above 0")
    contexts = [context_of(spec, device, protocol, name) for spec in specs]
    bytes_ = np.array([float(spec.bytes) for spec in specs])
    return base.corrected(Correction.fit(base, contexts, bytes_, seconds), device)


def collective_seconds(
    model: CollectiveModel,
    program: Collective | Mapping[str, Any] | str,
    device: DeviceSpec,
    *,
    protocol: str = "eager",
) -> float:
    """Predicted seconds of one collective."""
    spec = as_collective(program)
    context = context_of(spec, device, protocol, model.known_as(device))
    return float(np.exp(model.predict([context], np.zeros(1, dtype=np.int64), np.array([float(spec.bytes)])).point[0]))


#: Candidates that are drawn of all rows, for each row that is chosen and at least, and more of each context.
PER_CHOICE, CANDIDATES, PER_CONTEXT = 2, 400, 4


def informative_rows(
    model: CollectiveModel, contexts: Sequence[CollectiveContext], context: Array, bytes_: Array, k: int, seed: int = 0
) -> Array:
    """Positions of k rows, ascending.

    One row after the other is chosen: the one whose measurement leaves the smallest sum of variances over the
    candidates, under the covariance with which :class:`cdmpp.model.collectives.residual.Correction` is fitted.
    ``context``, ``bytes_``: (n,), index into ``contexts`` and bytes of the rows to choose from; ``k`` is at most n.
    ``seed``: of the draw of candidates.
    """
    rng = np.random.default_rng(seed)
    rows = np.arange(len(context))
    drawn = [rng.choice(rows, min(max(CANDIDATES, PER_CHOICE * k), len(rows)), replace=False)]
    for number in np.unique(context).tolist():
        members = rows[context == number]
        drawn.append(rng.choice(members, min(PER_CONTEXT, len(members)), replace=False))
    candidates = np.unique(np.concatenate(drawn))
    of_candidates = [contexts[i] for i in context[candidates].tolist()]
    size = np.log2(bytes_[candidates])
    left = prior_covariance(model, of_candidates, size, of_candidates, size)
    free = np.ones(len(candidates), dtype=np.bool_)
    for _ in range(k):
        total = np.diag(left) + NOISE**2
        best = int(np.where(free, (left**2).sum(axis=0) / total, -1.0).argmax())
        free[best] = False
        left = left - np.outer(left[:, best], left[best]) / total[best]
    return candidates[~free]
