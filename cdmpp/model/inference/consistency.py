"""Predictions that agree across measuring protocols and element types.

The network predicts each query independently, also queries without training rows. Such predictions may
contradict others: a kernel longer than the call that contains it, int8 slower than fp16. Rules, for one program on
one device:

1. ``kernel`` <= ``graph`` <= ``eager``. Protocols that training had of the operator on this device under the query's
   framework are unchanged; the others are limited by them.
2. A type that was never trained for the operator is predicted as the 16-bit prediction times the ratio of the
   rooflines, each with the launch cost.
   A 16-bit convolution on a device without 16-bit units follows the float32 prediction in the same way.
3. A narrow type without scales (int8, float8, float4) is not slower than the 16-bit type where the device's peak for
   it is higher, unless training had that type of the operator on this device with the protocol and the framework of
   the query. (Measured fp8 products of less than 1e9 operations are slower than the best 16-bit ones: a query that
   states the framework gets what was measured of it, one that does not is ordered by peak.)

Rules 1 and 3 hold for the point and for each quantile. A trained query needs no other prediction. Any other query is
computed together with the queries that limit it, in one pass of the network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import InvalidProgramError
from cdmpp.features.encode import TIR
from cdmpp.model.domain.calibration import scale_quantiles
from cdmpp.model.domain.evidence import NARROW, Evidence, QueryKind
from cdmpp.model.nn.config import LEVELS
from cdmpp.model.nn.figures import stack_devices
from cdmpp.model.nn.inputs import floor_s, roofline_s
from cdmpp.model.nn.rows import QueryBatch, QueryRows, concatenate, distinct_rows
from cdmpp.model.raw_predictions import RawPredictions
from cdmpp.programs.query_options import BACKENDS, PROTOCOLS, framework_name

Array = np.ndarray[Any, np.dtype[Any]]

#: Codes of :attr:`RawPredictions.adjusted`: limited by another protocol, by the 16-bit type, or following that type;
#: the device's status, for which a prediction is not "in" the domain; answered by another engine's kernel; and limited
#: by physics (:mod:`cdmpp.model.inference.limits`).
ADJUSTMENTS = {"protocol": 1, "type": 2, "follows": 4, "stand-in": 8, "unreleased": 16, "engine": 32, "limit": 64}
#: The device has no units for the type (:meth:`Evidence.lacks_units`): the label is "out", whatever the coverage.
NO_UNITS = 128
#: Codes that keep a prediction out of "in".
REPLACED = ADJUSTMENTS["engine"] | ADJUSTMENTS["limit"]
REASONS = {
    1: "adjusted to the prediction of another protocol of {operator}, which training covers better, so that "
    "kernel <= graph <= eager",
    2: "capped at the {half} prediction: the device computes {half} at a lower peak rate",
    4: "training had no such type of {operator}: the {half} prediction times the ratio of the rooflines",
    8: "the figures of the device are of a card that stands in for a board which its measurements do not name",
    16: "the device is unreleased: its figures are not final",
    32: "no {operator} of this type was measured under this framework: the kernel of one under which it was",
    NO_UNITS: "the device has no units for {dtype}, and training had no measurement of it there",
    64: "limited to what arithmetic, bandwidth and measured kernels of its kind allow {operator}",
}
#: In place of the last for a program given as TIR.
ISSUE_REASON = "limited to the rate at which cores issue instructions, call the C library and start threads"
_MEDIAN = LEVELS.index(0.5)
_KERNEL, _GRAPH = PROTOCOLS.index("kernel"), PROTOCOLS.index("graph")


@dataclass(frozen=True)
class Recipe:
    """Predictions that a kind of query depends on, as protocols in the order in which they limit each other."""

    protocol: int  # the protocol of the query, as an index into PROTOCOLS
    # protocols of the program itself; empty if its prediction is derived from its 16-bit form
    protocols: tuple[int, ...]
    half_protocols: tuple[int, ...]  # protocols of its 16-bit form
    shrinks: bool  # whether the type may not be slower than its 16-bit form

    @property
    def is_independent(self) -> bool:
        """Whether the network's own prediction is the answer."""
        return self.protocols == (self.protocol,) and not self.half_protocols


@dataclass(frozen=True)
class Values:
    """Log point (n,) and scaled log quantiles (n, len(LEVELS)) of predictions."""

    point: Array
    levels: Array

    def limited(self, below: Values | None, above: Values | None) -> Values:
        """Not less than ``below`` and not more than ``above``, where given; below <= above."""
        point, levels = self.point, self.levels
        if below is not None:
            point, levels = np.maximum(point, below.point), np.maximum(levels, below.levels)
        if above is not None:
            point, levels = np.minimum(point, above.point), np.minimum(levels, above.levels)
        return Values(point, levels)

    def followed(self, log_ratio: Array, wider: Array) -> Values:
        """The predictions times a ratio, with wider intervals."""
        median = self.levels[:, _MEDIAN : _MEDIAN + 1]
        levels = median + (self.levels - median) * wider[:, None]
        return Values(self.point + log_ratio, levels + log_ratio[:, None])

    def differ(self, other: Values) -> Array:
        """Rows in which two predictions differ, (n,) bool."""
        return np.asarray((self.point != other.point) | (self.levels != other.levels).any(axis=1))


def neighbours(order: Sequence[int], protocol: int) -> tuple[int | None, int | None]:
    """The nearest protocols of higher rank below and above a protocol."""
    better = order[: list(order).index(protocol)]
    below, above = [p for p in better if p < protocol], [p for p in better if p > protocol]
    return max(below, default=None), min(above, default=None)


@lru_cache(maxsize=64)
def needed(order: tuple[int, ...], protocol: int) -> tuple[int, ...]:
    """The protocols that the prediction of ``protocol`` depends on, in order; the last is ``protocol`` itself."""
    closure, open_ = set[int](), [protocol]
    while open_:
        closure.add(last := open_.pop())
        open_ += [p for p in neighbours(order, last) if p is not None and p not in closure]
    return tuple(p for p in order if p in closure)


def chain(order: Sequence[int], values: dict[int, Values]) -> dict[int, Values]:
    """Limit the prediction of each protocol by its neighbours of higher rank."""
    final: dict[int, Values] = {}
    for protocol in order:
        below, above = neighbours(order, protocol)
        final[protocol] = values[protocol].limited(
            None if below is None else final[below], None if above is None else final[above]
        )
    return final


class DomainParts(Protocol):
    """Parts of the domain score of queries, as in :class:`RawPredictions`, without peers."""

    def distance(self, batch: QueryBatch) -> Array:
        """Distance of the queries' programs from the training programs."""

    def steps(self, batch: QueryBatch) -> Array:
        """Step for contexts that training did not have."""

    def factor(self, coverage: Array) -> Array:
        """Factor on the width of the intervals."""


class Consistency:
    """Network rows of a batch whose predictions limit each other.

    ``recipe``: (n,) int, index into ``recipes`` for each row. Attribute ``batch`` has one row for each query, in order,
    and the further rows that they need. Raises InvalidProgramError where a query needs its 16-bit form, which the batch
    lacks.
    """

    def __init__(self, batch: QueryBatch, recipes: Sequence[Recipe], recipe: Array) -> None:
        self._queries = batch
        self._groups: list[tuple[Recipe, Array, dict[tuple[bool, int], Array]]] = []
        program = batch.rows.program.copy()
        parts, rows = [batch.rows], len(batch.rows)
        for number, made in enumerate(recipes):
            if made.is_independent:
                continue
            members = np.flatnonzero(recipe == number)
            halves = self._halves(members) if made.half_protocols else None
            first = (not made.protocols, made.protocol)
            if not made.protocols:
                program[members] = halves
            rows_of = {first: members}
            for is_half, protocols in ((False, made.protocols), (True, made.half_protocols)):
                for protocol in protocols:
                    if (is_half, protocol) == first:
                        continue
                    part = with_protocol(batch.rows.take(members), protocol)
                    parts.append(replace(part, program=halves) if is_half and halves is not None else part)
                    rows_of[is_half, protocol] = np.arange(rows, rows + len(members))
                    rows += len(members)
            self._groups.append((made, members, rows_of))
        parts[0] = replace(batch.rows, program=program)
        self.batch = replace(batch, rows=concatenate(parts))

    def _halves(self, members: Array) -> Array:
        """Program keys of the 16-bit forms."""
        batch, programs = self._queries, self._queries.rows.program[members]
        halves = np.full(len(members), -1) if batch.half is None else batch.half[programs]
        if (halves < 0).any():
            lacking = int(members[(halves < 0).argmax()])
            operator, dtype = batch.kinds[batch.kind[batch.rows.program[lacking]]]
            raise InvalidProgramError(
                f"row {lacking}: the prediction of {operator} with {dtype} depends on that of its 16-bit form, whose "
                "features are not given",
                hint="send the operator instead of its features",
            )
        return halves

    def apply(self, output: RawPredictions, coverage: DomainParts) -> RawPredictions:
        """Predictions of the queries from the network's output for :attr:`batch`."""
        count = len(self._queries.rows)
        names = ("point", "levels", "distance", "step", "factor")
        columns = {name: getattr(output, name)[:count].copy() for name in names}
        adjusted = np.zeros(count, dtype=np.int8)
        for recipe, members, rows_of in self._groups:
            raw = {
                key: Values(output.point[rows], scale_quantiles(output.levels[rows], output.factor[rows]))
                for key, rows in rows_of.items()
            }
            halves = chain(recipe.half_protocols, {p: raw[True, p] for p in recipe.half_protocols})
            if recipe.protocols:
                independent = raw[False, recipe.protocol]
                final = chain(recipe.protocols, {p: raw[False, p] for p in recipe.protocols})[recipe.protocol]
                adjusted[members] += np.int8(ADJUSTMENTS["protocol"]) * independent.differ(final)
                if recipe.half_protocols:
                    limited = final.limited(None, halves[recipe.protocol])
                    adjusted[members] += np.int8(ADJUSTMENTS["type"]) * final.differ(limited)
                    final = limited
                changed = independent.differ(final)
            else:
                batch = replace(self._queries, rows=self._queries.rows.take(members))
                distance = coverage.distance(batch)
                values = {}
                for protocol in recipe.half_protocols:
                    half_rows = rows_of[True, protocol]
                    with_other_protocol = replace(batch, rows=with_protocol(batch.rows, protocol))
                    step = np.maximum(coverage.steps(with_other_protocol), output.step[half_rows])
                    wider = coverage.factor(distance + step)
                    wider /= coverage.factor(output.distance[half_rows] + output.step[half_rows])
                    ratio = self._log_ratio(with_other_protocol, recipe.shrinks)
                    values[protocol] = halves[protocol].followed(ratio, wider)
                    if protocol == recipe.protocol:
                        columns["distance"][members], columns["step"][members] = distance, step
                final = chain(recipe.half_protocols, values)[recipe.protocol]
                adjusted[members] += np.int8(ADJUSTMENTS["follows"])
                changed = np.ones(len(members), dtype=bool)
            rows = members[changed]
            columns["point"][rows], columns["levels"][rows] = final.point[changed], final.levels[changed]
            columns["factor"][rows] = 1.0
        return replace(output, **columns, reference=output.reference[:count], view=None, peers=None, adjusted=adjusted)

    @staticmethod
    def _log_ratio(batch: QueryBatch, shrinks: bool) -> Array:
        """log(roofline / roofline of the 16-bit form) of each row, both with the launch cost."""
        assert batch.half is not None
        rows = batch.rows
        matrix = stack_devices(batch.specs)[rows.device]
        # Inside the device both protocols launch alike; with one cost the ratio keeps the order of the protocols.
        inside = np.maximum(*(floor_s(matrix, np.full(len(rows), p)) for p in (_KERNEL, _GRAPH)))
        launch = np.maximum(floor_s(matrix, rows.protocol), inside)
        roofline, half_roofline = (
            np.maximum(*roofline_s(batch.store.summary[keys], matrix)) + launch
            for keys in (rows.program, batch.half[rows.program])
        )
        ratio: Array = np.log(roofline / half_roofline)
        return np.minimum(ratio, 0.0) if shrinks else ratio


def with_protocol(rows: QueryRows, protocol: int) -> QueryRows:
    """The same queries with another protocol."""
    return replace(rows, protocol=np.full(len(rows), protocol, dtype=rows.protocol.dtype))


class Rules:
    """Chooses the recipe of each kind of query."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self._recipes: dict[tuple[QueryKind, int, str, bool, bool], Recipe] = {}

    def consistency(self, batch: QueryBatch, names: Sequence[str]) -> Consistency | None:
        """Further predictions that the queries of a batch depend on; None if there are none.

        ``names``: the devices' names in the evidence, "" where training did not have them.
        """
        if not len(batch.rows):
            return None
        rows = batch.rows
        columns = [rows.device, batch.kind[rows.program], rows.protocol, rows.backend, rows.framework]
        first, inverse = distinct_rows(columns)
        recipes: dict[Recipe, int] = {}
        numbers = []
        for device, number, protocol, backend, framework in np.stack([c[first] for c in columns], axis=1).tolist():
            operator, dtype = batch.kinds[number]
            kind = QueryKind(names[device], operator, dtype, BACKENDS[backend])
            launcher = framework_name(framework)
            recipe = self._recipe(kind, protocol, launcher, batch.specs[device])
            numbers.append(recipes.setdefault(recipe, len(recipes)))
        if all(recipe.is_independent for recipe in recipes):
            return None
        return Consistency(batch, list(recipes), np.array(numbers)[inverse])

    def _recipe(self, kind: QueryKind, protocol: int, framework: str, device: DeviceSpec) -> Recipe:
        evidence, (name, operator, dtype, backend, _) = self._evidence, kind
        emulated = evidence.emulated(kind, device)
        half = "float32" if emulated else evidence.half_type(operator, backend, dtype)
        faster = dtype in NARROW and device.peak(dtype, matrix=True) > device.peak(half, matrix=True)
        key = (kind, protocol, framework, faster, emulated)
        if key not in self._recipes:
            order = evidence.protocol_order(kind, framework)
            half_order = evidence.protocol_order(QueryKind(name, operator, half, backend), framework)
            follows = emulated or evidence.follows(kind)
            limited = faster and operator != TIR and not evidence.was_trained_as(kind, PROTOCOLS[protocol], framework)
            has_rows = evidence.has_rows(kind, PROTOCOLS[protocol], framework)
            self._recipes[key] = Recipe(
                protocol,
                () if follows else (protocol,) if has_rows else needed(order, protocol),
                needed(half_order, protocol) if follows or limited else (),
                faster,
            )
        return self._recipes[key]
