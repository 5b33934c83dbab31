"""Predictions that nothing measured supports, limited by what was measured of like kernels.

A query whose operator and type training did not have on the device under the framework is compared with

- the other serving engines on this device: engines' kernels of one program are rarely more than three times apart
  (0.1 % of the measured bf16 products). An engine that was measured on the device limits it from both sides; without
  one, it is at most three times the fastest engine;
- a sibling: a device of the same architecture of which no figure is less, or none is more, with rows of the operator,
  at best of the type. A larger device is not slower than a smaller one. (Measured ones can be: these are not limited.)

A query that training had needs no other prediction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from cdmpp.devices.spec import DeviceSpec
from cdmpp.features.encode import TIR
from cdmpp.model.domain.evidence import NARROW, Evidence, QueryKind, kinds_of
from cdmpp.model.inference.limits import between
from cdmpp.model.nn.rows import QueryBatch, QueryRows, concatenate
from cdmpp.model.raw_predictions import RawPredictions
from cdmpp.programs.query_options import SERVING_ENGINES, framework_code

Array = np.ndarray[Any, np.dtype[Any]]

#: Log ratios that are not exceeded: between engines, and of a larger device to a smaller one.
ENGINES, LARGER = float(np.log(2.9)), float(np.log(1.03))
#: Kinds of queries whose limits are remembered.
MAX_REMEMBERED = 4096
_PEAKS = ("float32", "float16", "bfloat16", "int8", "float8_e4m3", "float4_e2m1")


@dataclass(frozen=True)
class Limit:
    """One further prediction, and how it limits that of the query."""

    device: DeviceSpec | None  # None: the device of the query
    framework: int | None  # None: the framework of the query
    # The query's log latency is at least the other less ``below``, and at most the other plus ``above``.
    below: float
    above: float


class Comparison:
    """Further rows of a batch, and the positions of the queries that each limit is for."""

    def __init__(self, queries: QueryBatch, limits: Sequence[tuple[Array, Limit]]) -> None:
        specs, parts = list(queries.specs), list[QueryRows]()
        for members, made in limits:
            part = queries.rows.take(members)
            if made.framework is not None:
                part = replace(part, framework=np.full_like(part.framework, made.framework))
            if made.device is not None:
                part = replace(part, device=np.full_like(part.device, len(specs)))
                specs.append(made.device)
            parts.append(part)
        self._limits = limits
        self.batch = replace(queries, specs=specs, rows=concatenate(parts))

    def apply(self, output: RawPredictions, others: RawPredictions) -> RawPredictions:
        """The queries' predictions within what ``others``, those of :attr:`batch`, allow."""
        low, high, start = np.full(len(output), -np.inf), np.full(len(output), np.inf), 0
        for members, made in self._limits:
            other = others.point[start : start + len(members)]
            low[members] = np.maximum(low[members], other - made.below)
            high[members] = np.minimum(high[members], other + made.above)
            start += len(members)
        # Of two that contradict each other, the lower one holds: it is nearer to the physical bound.
        return between(output, np.minimum(low, high), high)


class Alike:
    """Finds what limits queries that training did not have."""

    def __init__(self, evidence: Evidence, devices: Sequence[DeviceSpec]) -> None:
        self._evidence, self._devices = evidence, [spec for spec in devices if spec.kind == "gpu"]
        self._remembered: dict[tuple[QueryKind, str, DeviceSpec], list[Limit]] = {}

    def of(self, batch: QueryBatch, names: Sequence[str]) -> Comparison | None:
        """Further predictions that limit those of a batch; None if there are none.

        ``names``: the devices' names in the evidence, "" where training did not have them.
        """
        kinds, row = kinds_of(batch, names)
        limits = []
        for group, (kind, framework) in enumerate(kinds):
            members = np.flatnonzero(row == group)
            key = (kind, framework, batch.specs[batch.rows.device[members[0]]])
            of_kind = self._remembered.get(key)
            if of_kind is None:
                if len(self._remembered) > MAX_REMEMBERED:
                    self._remembered.clear()
                of_kind = self._remembered[key] = self._limits(*key)
            limits += [(members, made) for made in of_kind]
        return Comparison(batch, limits) if limits else None

    def _limits(self, kind: QueryKind, framework: str, device: DeviceSpec) -> list[Limit]:
        if kind.operator == TIR or device.kind != "gpu" or self._evidence.was_measured(kind, framework):
            return []
        return [*self._engines(kind, framework), *self._siblings(kind, framework, device)]

    def _engines(self, kind: QueryKind, framework: str) -> list[Limit]:
        """Limits by the other engines: those measured on the device, else all."""
        if framework not in SERVING_ENGINES:
            return []
        engines = [name for name in self._evidence.engines_of(kind) if name != framework]
        measured = [name for name in engines if self._evidence.was_measured(kind, name)]
        below = ENGINES if measured and _is_raised(kind) else np.inf
        return [Limit(None, framework_code(name), below, ENGINES) for name in measured or engines]

    def _siblings(self, kind: QueryKind, framework: str, device: DeviceSpec) -> list[Limit]:
        """Limits by smaller and larger devices."""
        evidence = self._evidence
        known = [spec for spec in self._devices if spec.name != kind.device]
        on_it = [spec for spec in known if not evidence.lacks(kind._replace(device=spec.name), framework)]
        measured_on = [spec for spec in on_it if evidence.was_measured(kind._replace(device=spec.name), framework)]
        # A device that training had without the operator says less than one of which it had rows, also of other types.
        levels = [measured_on, on_it, *([known] if evidence.lacks(kind, framework) else [])]
        smaller = [nearest(device, [spec for spec in specs if is_larger(device, spec)]) for specs in levels]
        # Of two with the same figures and without a measurement of the type, the lower prediction holds for both.
        apart = [spec for spec in on_it if not is_larger(device, spec)]
        larger = [
            nearest(device, [spec for spec in specs if is_larger(spec, device)]) for specs in (measured_on, apart)
        ]
        below, above = _first(smaller), _first(larger)
        limits = []
        if below < len(smaller) and below <= above:
            limits += [Limit(spec, None, np.inf, LARGER) for spec in smaller[below]]
        if above < len(larger) and _is_raised(kind):
            limits += [Limit(spec, None, LARGER, np.inf) for spec in larger[above]]
        return limits


def _is_raised(kind: QueryKind) -> bool:
    """Whether a lower limit may act: a narrow type is limited by its 16-bit form, and is not raised above it."""
    return kind.dtype not in NARROW


@lru_cache(maxsize=65536)
def is_larger(device: DeviceSpec, other: DeviceSpec) -> bool:
    """Whether ``device`` is of the architecture of ``other``, and has no figure that is less."""
    return device.arch == other.arch and all(a >= b for a, b in zip(_figures(device), _figures(other), strict=True))


def nearest(device: DeviceSpec, others: Sequence[DeviceSpec]) -> list[DeviceSpec]:
    """The devices of most similar figures: several where they are equal, none of none."""
    log = np.log(_figures(device))
    gaps = [float(np.abs(np.log(_figures(spec)) - log).sum()) for spec in others]
    return [spec for spec, gap in zip(others, gaps, strict=True) if gap == min(gaps)]


def _first(choices: Sequence[list[DeviceSpec]]) -> int:
    """Position of the first list that is not empty; their number if all are."""
    return next((number for number, devices in enumerate(choices) if devices), len(choices))


def _figures(device: DeviceSpec) -> tuple[float, ...]:
    rates = (device.clock_hz, device.mem_bandwidth_bytes_per_s, device.peak("float32", matrix=False))
    return (device.compute_units, device.l2_bytes or 1.0, *rates, *(device.peak(t, matrix=True) for t in _PEAKS))
