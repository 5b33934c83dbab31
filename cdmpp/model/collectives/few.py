"""A model of collectives for one machine, from a few of its own measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import DataError, InvalidProgramError
from cdmpp.model.collectives.context import context_of
from cdmpp.model.collectives.correction import Correction
from cdmpp.model.collectives.model import CollectiveModel
from cdmpp.programs.collectives import Collective
from cdmpp.programs.operators import make_operator, parse_operator


def as_collective(program: Collective | Mapping[str, Any] | str) -> Collective:
    """A collective from its specification, fields or text.

    Raises
    ------
    InvalidProgramError, UnsupportedOperatorError
        It is no collective, or not a valid one.
    """
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
    """The model corrected by measurements of one machine.

    Parameters
    ----------
    base : CollectiveModel
        The shipped model: ``LatencyPredictor.load().collectives``.
    rows : sequence of (collective, seconds)
    device : DeviceSpec
    protocol : str
        Mode of collectives that state none.

    Raises
    ------
    DataError
        There are no rows, or a latency is not a positive number.
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
