"""Reading ``/predict`` requests: validated items with their programs, devices and cached answers, or their errors.

Safe in any thread; nothing here waits.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from pydantic import ValidationError

from cdmpp.errors import CdmppError, DataError, InvalidDeviceError, InvalidProgramError
from cdmpp.predict.prediction import ErrorInfo
from cdmpp.predict.predictor import LatencyPredictor, RowKey
from cdmpp.programs.query_options import DEFAULT_PROTOCOL
from cdmpp_server.body import check, parse_json
from cdmpp_server.fields import program_value, with_max_items
from cdmpp_server.predict.admission import CACHED_WORK
from cdmpp_server.predict.programs import Devices, Programs, ResolvedDevice, ResolvedProgram, exact_key
from cdmpp_server.predict.render import AnswerCache, RenderedAnswer
from cdmpp_server.predict.schema import MAX_ID, Envelope, Item
from cdmpp_server.predict.strict import check_item, refusal
from cdmpp_server.problems import ProblemError, SchemaViolation
from cdmpp_server.schema_base import violations
from cdmpp_server.settings import Settings

#: Codes by field; a fault of any other field has the code that it has in Python.
_CODES = {"program": InvalidProgramError.code, "device": InvalidDeviceError.code}
_HINT = "Item in GET /openapi.json has the schema of an item"


def sent_id(raw: Any) -> str | None:
    """The id of an item that may be invalid; None where it has no valid id."""
    id = raw.get("id") if isinstance(raw, dict) else None
    return id if isinstance(id, str) and len(id) <= MAX_ID else None


def item_error(error: ValidationError, raw: Any) -> ErrorInfo:
    """The error of an item that violates the schema.

    ``error``: the violations. ``raw``: the item.
    """
    line, places = violations(error, raw)
    field = places[0][0]
    if not isinstance(raw, dict):
        return ErrorInfo(DataError.code, f"an item should be an object; it is {_text(raw)}", _HINT)
    # A value inside a program or a device is identified by its path.
    value = f"; it is {_text(raw[field])}" if field in raw else ""
    return ErrorInfo(_CODES.get(field.partition(".")[0], DataError.code), line + value, _HINT)


def _text(value: Any) -> str:
    return "null" if value is None else reprlib.repr(value)


def item_refusal(position: int, error: ValidationError, raw: Any) -> ProblemError:
    """The problem of a strict request with an item that violates the schema (422)."""
    prefix = f"items.{position}"
    fault = item_error(error, raw)
    places = [(f"{prefix}.{path}".rstrip("."), message) for path, message in violations(error, raw)[1]]
    return ProblemError(
        "invalid_request",
        f"{prefix}: {fault.message}",
        fault.hint,
        errors=[SchemaViolation(path=path, message=message) for path, message in places],
        item=position,
        id=sent_id(raw),
    )


_FIELDS = frozenset(Item.model_fields)


def row_key(
    model_id: str,
    program: ResolvedProgram,
    device: ResolvedDevice,
    protocol: str,
    framework: str | None,
    implementation: str | None,
) -> RowKey:
    """The key of a query in the caches of the predictor and of answers."""
    options = (protocol, framework, implementation)
    return model_id, program.hash, program.backend, device.cache_key, device.spec.name, *options


def work_of(predictor: LatencyPredictor, key: RowKey) -> float:
    """Cost of a query without a cached answer, in rows of a new operator."""
    return CACHED_WORK if predictor.is_cached(key) else 1.0


@dataclass
class OpenItem:
    """An item without a cached answer.

    ``known`` is None for TIR that has to be read, and for a hash that has to be looked up.
    """

    position: int
    item: Item
    device: ResolvedDevice
    known: ResolvedProgram | None

    def key(self, model_id: str) -> RowKey:
        """The key of its answer."""
        assert self.known is not None
        item = self.item
        return row_key(model_id, self.known, self.device, item.protocol, item.framework, item.implementation)


@dataclass
class Reading:
    """A request and its results so far."""

    predictor: LatencyPredictor
    levels: tuple[float, ...]
    strict: bool
    ids: list[str | None]
    #: The answer of each item; None where there is none yet.
    results: list[RenderedAnswer | None]
    #: Device and domain of each answer, in no order.
    kinds: list[tuple[str, str]] = field(default_factory=list)
    #: Positions without a cached answer, and their cost in rows of a new operator.
    unread: list[int] = field(default_factory=list)
    work: float = 0.0
    open: list[OpenItem] = field(default_factory=list)
    #: Errors by position.
    failed: dict[int, ErrorInfo] = field(default_factory=dict)

    def answer(self, position: int, answer: RenderedAnswer) -> None:
        """Set an item's answer."""
        self.results[position] = answer
        self.kinds.append(answer.kind)

    def check_strict(self) -> None:
        """Raise the first error of a strict request."""
        if self.strict and self.failed:
            position = min(self.failed)
            raise refusal(position, self.ids[position], self.failed[position])


class Reader:
    """Parses requests and finds what is cached for them.

    ``programs``, ``devices``, ``answers``: caches of earlier requests.
    """

    def __init__(self, settings: Settings, programs: Programs, devices: Devices, answers: AnswerCache) -> None:
        self._programs, self._devices, self._answers = programs, devices, answers
        self._envelope_model = with_max_items(Envelope, "items", settings.max_items)

    def parse(self, body: bytes | bytearray) -> Envelope:
        """The request; its items are not validated yet.

        Raises ProblemError: 400 or 422.
        """
        return check(self._envelope_model, parse_json(body))

    def start(self, envelope: Envelope, predictor: LatencyPredictor) -> Reading:
        """A request without results yet."""
        levels, count = _interned(tuple(envelope.quantiles)), len(envelope.items)
        return Reading(predictor, levels, envelope.strict, [None] * count, [None] * count)

    def find_cached(self, envelope: Envelope, reading: Reading, positions: Sequence[int]) -> None:
        """Find cached answers of these items; a strict request is validated first, by :meth:`read`."""
        if envelope.strict:
            reading.unread += positions
            reading.work += len(positions)
            return
        for position in positions:
            raw = envelope.items[position]
            try:
                cached = self._cached(raw, reading.predictor, reading.levels)
            except (TypeError, ValueError, KeyError):
                cached = None  # Item.model_validate reports what is wrong
            if isinstance(cached, RenderedAnswer):
                reading.ids[position] = raw.get("id")
                reading.answer(position, cached)
            else:
                reading.unread.append(position)
                reading.work += 1.0 if cached is None else cached

    def read(self, envelope: Envelope, reading: Reading, positions: Sequence[int]) -> None:
        """Find programs and devices of these items, which have no cached answer.

        Raises ProblemError: with strict, the status of the first error.
        """
        for position in positions:
            raw = envelope.items[position]
            try:
                item = Item.model_validate(raw)
            except ValidationError as error:
                reading.ids[position] = sent_id(raw)
                if envelope.strict:
                    raise item_refusal(position, error, raw) from None
                reading.failed[position] = item_error(error, raw)
                continue
            reading.ids[position] = item.id
            if envelope.strict:
                check_item(position, item)
            self._open(reading, position, item)
        reading.check_strict()

    def _cached(
        self, raw: Any, predictor: LatencyPredictor, levels: tuple[float, ...]
    ) -> RenderedAnswer | float | None:
        """The cached answer of an item that was validated when an earlier request sent it.

        Without one, the cost of the item if its figures are cached, and None if nothing is.

        Protocol, framework and implementation are part of the key, so an invalid value has no answer. This look-up is
        here because validation by pydantic alone has 0.67 of the throughput for 256 cached items (4.3 ms instead of
        2.9 ms of processor time per request); for one cached item it has 0.97, for new items 0.98 to 1.00.
        """
        if type(raw) is not dict or not raw.keys() <= _FIELDS:
            return None
        id = raw.get("id")
        if id is not None and (type(id) is not str or len(id) > MAX_ID):
            return None
        program = self._programs.known(exact_key(raw["program"]), raw.get("backend"))
        if program is None:
            return None
        device = self._devices.known(raw["device"], predictor.artifact)
        if device is None:
            return None
        protocol, framework = raw.get("protocol", DEFAULT_PROTOCOL), raw.get("framework")
        key = row_key(predictor.model_id, program, device, protocol, framework, raw.get("implementation"))
        answer = self._answers.get(key, program.name, levels)
        return answer if answer is not None else work_of(predictor, key)

    def _open(self, reading: Reading, position: int, item: Item) -> None:
        try:
            sent = program_value(item.program)
            key = exact_key(sent)
            known = self._programs.known(key, item.backend)
            if known is None and isinstance(item.program, str | dict):
                known = self._programs.operator(sent, key, item.backend)
            device = self._devices.find(item.device, reading.predictor.artifact)
        except CdmppError as error:
            reading.failed[position] = ErrorInfo.of(error)
        else:
            reading.open.append(OpenItem(position, item, device, known))


@lru_cache(maxsize=256)
def _interned(levels: tuple[float, ...]) -> tuple[float, ...]:
    """One object for equal levels: every cached answer refers to it."""
    return levels
