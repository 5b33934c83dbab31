"""What a body of ``/predict`` asks, and what of it was answered before: no waiting, safe in any thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from pydantic import BaseModel, ValidationError

from cdmpp.errors import CdmppError
from cdmpp.prediction import ErrorInfo
from cdmpp.predictor import LatencyPredictor
from cdmpp.programs.query_options import DEFAULT_PROTOCOL
from cdmpp_server.parse import check, parse_json
from cdmpp_server.predict.cache import ByteLru
from cdmpp_server.predict.devices import Devices, KnownDevice
from cdmpp_server.predict.programs import Known, Programs, words
from cdmpp_server.predict.render import Answer
from cdmpp_server.predict.schema import MAX_ID, Envelope, Item, request_model
from cdmpp_server.predict.strict import check_item, refusal
from cdmpp_server.problems import ProblemError
from cdmpp_server.settings import Settings

_FIELDS = frozenset(Item.model_fields)


@dataclass
class Open:
    """An item that was not answered before.

    ``known`` is None for TIR that has to be read, and for a hash that has to be looked up.
    """

    position: int
    item: Item
    device: KnownDevice
    wording: bytes
    known: Known | None

    def key(self, context: Any) -> Any:
        """What its answer depends on, and nothing else."""
        assert self.known is not None
        item = self.item
        return answer_key(self.known, self.device, item.protocol, item.framework, context)


@dataclass
class Reading:
    """A request as far as it can be answered at once."""

    predictor: LatencyPredictor
    levels: tuple[float, ...]
    strict: bool
    ids: list[str | None]
    #: The JSON of each result without its id; None while it is not known.
    results: list[str | None]
    #: Device and domain of each answer, in no order.
    kinds: list[tuple[str, str]] = field(default_factory=list)
    open: list[Open] = field(default_factory=list)
    #: Errors by position.
    failed: dict[int, tuple[Item, ErrorInfo]] = field(default_factory=dict)

    @property
    def context(self) -> Any:
        """What the answers of a whole request have in common."""
        return _context(self.predictor.model_id, self.levels)

    def answer(self, position: int, answer: Answer) -> None:
        """Note an item's answer."""
        self.results[position] = answer.text
        self.kinds.append(answer.kind)

    def fail(self, position: int, item: Item, error: ErrorInfo) -> None:
        """Note an item's error."""
        self.failed[position] = (item, error)

    def check_strict(self) -> None:
        """Raise for the first error of a strict request."""
        if self.strict and self.failed:
            position = min(self.failed)
            raise refusal(position, *self.failed[position])


@lru_cache(maxsize=256)
def _context(model_id: str, levels: tuple[float, ...]) -> Any:
    """One object for all requests that share it: every remembered answer holds on to it."""
    return (model_id, levels)


def answer_key(program: Known, device: KnownDevice, protocol: str, framework: str | None, context: Any) -> Any:
    """The key of an answer: program, device, backend, protocol, framework, quantiles and model."""
    return (program.identity, device.identity, protocol, framework, context)


class Reader:
    """Parses requests and finds what is known of them.

    Parameters
    ----------
    settings : Settings
    programs, devices, answers
        What was seen before.
    """

    def __init__(self, settings: Settings, programs: Programs, devices: Devices, answers: ByteLru[Answer]) -> None:
        self._programs, self._devices, self._answers = programs, devices, answers
        self._request_model = request_model(settings.max_items)
        self._max_items = settings.max_items

    def parse(self, body: bytes | bytearray) -> Envelope:
        """The request, its items unread.

        Raises
        ------
        ProblemError
            400 or 422.
        """
        value = parse_json(body)
        try:
            envelope = Envelope.model_validate(value)
        except ValidationError:
            envelope = None
        if envelope is None or not 1 <= len(envelope.items) <= self._max_items:
            raise self._refused(value)
        return envelope

    def read(
        self, envelope: Envelope, predictor: LatencyPredictor, admit: Callable[[], None] = lambda: None
    ) -> Reading:
        """Find the answers of items that were asked before, and programs and devices of the others.

        ``admit`` is called before the first item that has to be read, and may refuse the request.

        Raises
        ------
        ProblemError
            422: an item breaks the schema; with strict also the status of the first error.
        """
        items, strict = envelope.items, envelope.strict
        reading = Reading(predictor, tuple(envelope.quantiles), strict, [None] * len(items), [None] * len(items))
        context = reading.context
        admitted = False
        for position, raw in enumerate(items):
            if not strict:
                try:
                    found = self._before(raw, predictor, context)
                except (TypeError, ValueError, KeyError):
                    found = None  # not of the form that the models below describe
                if found is not None:
                    reading.ids[position] = raw.get("id")
                    reading.answer(position, found)
                    continue
            if not admitted:
                admit()
                admitted = True
            try:
                item = Item.model_validate(raw)
            except ValidationError:
                raise self._refused(_as_sent(envelope)) from None
            reading.ids[position] = item.id
            if strict:
                check_item(position, item)
            self._open(reading, position, item)
        reading.check_strict()
        return reading

    def _before(self, raw: Any, predictor: LatencyPredictor, context: Any) -> Answer | None:
        """The answer of an item that was asked before in these words; it was checked then.

        Protocol and framework are part of the key, so a value that is none has no answer.
        """
        if type(raw) is not dict or not raw.keys() <= _FIELDS:
            return None
        id = raw.get("id")
        if id is not None and (type(id) is not str or len(id) > MAX_ID):
            return None
        program = self._programs.worded(words(raw["program"]), raw.get("backend"))
        if program is None:
            return None
        device = self._devices.known(raw["device"], predictor.artifact)
        if device is None:
            return None
        protocol = raw.get("protocol", DEFAULT_PROTOCOL)
        return self._answers.get(answer_key(program, device, protocol, raw.get("framework"), context))

    def _open(self, reading: Reading, position: int, item: Item) -> None:
        try:
            sent = item.program if isinstance(item.program, dict) else item.program.model_dump()
            wording = words(sent)
            known = self._programs.worded(wording, item.backend)
            if known is None and isinstance(item.program, dict):
                known = self._programs.operator(sent, wording, item.backend)
            device = self._devices.find(item.device, reading.predictor.artifact)
        except CdmppError as error:
            reading.fail(position, item, ErrorInfo.of(error))
        else:
            reading.open.append(Open(position, item, device, wording, known))

    def _refused(self, value: Any) -> ProblemError:
        """What is wrong with a body, with the places; a second look, which only refusals pay for."""
        try:
            check(self._request_model, value)
        except ProblemError as error:
            return error
        raise AssertionError("two readings of one schema disagree")


def _as_sent(envelope: BaseModel) -> dict[str, Any]:
    return {name: getattr(envelope, name) for name in envelope.model_fields_set}
