"""Services of ``/predict`` and ``/programs``: a request body becomes a response body."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TypeVar

from anyio.to_thread import run_sync

from cdmpp.errors import CdmppError
from cdmpp.predict.bulk import FeatureQueries
from cdmpp.predict.prediction import DEFAULT_QUANTILES, ErrorInfo, Prediction, Query
from cdmpp.predict.predictor import LatencyPredictor, RowKey
from cdmpp.programs.program import TensorProgram
from cdmpp.programs.query_options import Backend
from cdmpp_server.body import INLINE_BYTES, parse
from cdmpp_server.concurrency import ConcurrencyLimiter, Deadline
from cdmpp_server.fields import ProgramValue, program_value, with_max_items
from cdmpp_server.models import Models
from cdmpp_server.observe.ids import Signer
from cdmpp_server.observe.store import ObservationStore
from cdmpp_server.observe.tables import StoreUnavailableError
from cdmpp_server.operate.metrics import Metrics
from cdmpp_server.predict.batcher import Batcher
from cdmpp_server.predict.lane import Ticket
from cdmpp_server.predict.programs import Devices, Programs, ResolvedProgram
from cdmpp_server.predict.reading import OpenItem, Reader, Reading, work_of
from cdmpp_server.predict.render import (
    ROWS_SHARE,
    AnswerCache,
    RenderedAnswer,
    answer_of,
    encode,
    error_fields,
    failure,
    response,
    result,
)
from cdmpp_server.predict.resolver import ProgramResolver, stored_form
from cdmpp_server.predict.schema import RegisterRequest
from cdmpp_server.problems import ProblemError, SchemaViolation, internal_error
from cdmpp_server.sandbox.sandbox import Sandbox
from cdmpp_server.settings import Settings

_log = logging.getLogger(__name__)
T = TypeVar("T")
#: Items that are processed in one turn of the event loop: 1 ms for new operators, 4 ms beside a computing thread.
CHUNK_ITEMS = 16
#: Predicted once at start; the service is ready when the prediction is sound.
GOLDEN = Query(TensorProgram.from_operator("linear:m=512,n=4096,k=1024,dtype=float16"), "t4")


class PredictionService:
    """Predicts requests with the loaded models. Belongs to one event loop.

    The batcher computes predictions that are not cached. The sandbox reads TVM JSON and TVMScript. Without a store,
    registered programs are known by hash while they are cached.
    """

    def __init__(
        self,
        models: Models,
        settings: Settings,
        batcher: Batcher,
        sandbox: Sandbox,
        metrics: Metrics,
        store: ObservationStore | None = None,
    ) -> None:
        self.models, self.batcher = models, batcher
        self.programs = Programs(settings.cache_bytes)
        self.devices = Devices()
        self._answers = AnswerCache(int((1 - ROWS_SHARE) * settings.answer_cache_bytes))
        self._metrics, self._store = metrics, store
        self._reader = Reader(settings, self.programs, self.devices, self._answers)
        self._max_items = settings.max_items
        self._threads = ConcurrencyLimiter(1, settings.max_queued)
        self._chunks = asyncio.Lock()
        self._resolver = ProgramResolver(self.programs, sandbox, store, self._threads)

    @property
    def predictor(self) -> LatencyPredictor:
        """The loaded model."""
        return self.models.base

    @property
    def signer(self) -> Signer | None:
        """Makes prediction ids; None before the database was opened."""
        return None if self._store is None else self._store.signer

    async def predict(self, body: bytes | bytearray, deadline: Deadline, on_items: Callable[[int], None]) -> bytes:
        """Response body of a request body; ``on_items`` is called with the number of items.

        Raises ProblemError: 400 or 422 for the envelope, 4xx for an item of a strict request, 503 or 504 under load,
        500 for a bug.
        """
        with bugs_hidden("/predict"):
            small = len(body) <= INLINE_BYTES
            envelope = await self.do(small, partial(self._reader.parse, body), deadline)
            on_items(len(envelope.items))
            predictor = await self.model(envelope.model)
            reading = self._reader.start(envelope, predictor)
            find = partial(self._reader.find_cached, envelope, reading)
            positions = range(len(envelope.items))
            # A sample predicts the work of all items, so that a request need not wait for its turn to be refused.
            sample = positions[:: -(-len(positions) // CHUNK_ITEMS)]
            find(sample)
            share = len(sample) / len(positions)
            self.batcher.learn(len(body), reading.work / share)
            with ExitStack() as stack:
                place: Ticket | None = None
                if reading.unread:
                    expected = math.ceil(len(reading.unread) / share), reading.work / share
                    place = stack.enter_context(self.batcher.admitted(*expected, deadline))
                rest = [position for position in positions if position % sample.step]
                await self._in_chunks(find, rest, small, deadline)
                known, unread = len(reading.kinds), sorted(reading.unread)
                if unread:
                    if place is None or place.rows < len(unread):  # more than the sample predicted
                        stack.close()
                        place = stack.enter_context(self.batcher.admitted(len(unread), reading.work, deadline))
                    await self._in_chunks(partial(self._reader.read, envelope, reading), unread, small, deadline)
                    await self._resolve(reading, deadline)
                    await self._compute(reading, deadline, place)
            self._metrics.cache("answers", known, len(envelope.items) - known)
            self._metrics.items(reading.kinds, [error.code for error in reading.failed.values()])
            # Not in the thread that reads bodies: a finished request must not wait for new ones.
            return _answer(reading, self.signer) if small else await run_sync(_answer, reading, self.signer)

    async def predict_features(
        self, body: bytes | bytearray, deadline: Deadline, on_items: Callable[[int], None]
    ) -> bytes:
        """The :class:`FeatureAnswers` body of a :class:`FeatureQueries` body: arrays, rows in the same order.

        One faulty row refuses the whole request.

        Raises ProblemError: 422 for an invalid body, 404 for an unknown model or device, 503 and 504 under load.
        """
        with bugs_hidden("/predict"):
            try:
                read = partial(FeatureQueries.from_bytes, body)
                queries = await self.do(len(body) <= INLINE_BYTES, read, deadline)
                if not 1 <= len(queries) <= self._max_items:
                    hint = f"send 1 to {self._max_items} rows in a request"
                    errors = [SchemaViolation(path="rows", message=hint)]
                    raise ProblemError("invalid_request", f"{len(queries)} rows", hint, errors=errors)
                on_items(len(queries))
                self.batcher.learn(len(body), len(queries))
                predictor = await self.model(queries.model)
                answers = await self.batcher.ask_features(predictor, queries, deadline)
            except CdmppError as error:
                status = 404 if error.code == "unknown_device" else 422
                raise ProblemError(error.code, error.message, error.hint, status=status) from None
            names = [device if isinstance(device, str) else device.name for device in queries.devices]
            self._metrics.items(zip((names[number] for number in queries.device.tolist()), answers.labels, strict=True))
            return answers.to_bytes()

    async def register(self, body: bytes | bytearray, deadline: Deadline, on_items: Callable[[int], None]) -> bytes:
        """Register programs; every worker with the same store then accepts the returned hashes.

        Raises ProblemError: 400 or 422 for the body, 503 or 504 under load or without the store.
        """
        with bugs_hidden("/programs"):
            model = with_max_items(RegisterRequest, "programs", self._max_items)
            request = await self.do(len(body) <= INLINE_BYTES, partial(parse, model, body), deadline)
            on_items(len(request.programs))
            forms = [program_value(program) for program in request.programs]
            registered = await self.read_programs([(form, None) for form in forms], deadline)
            named = {
                known.hash: stored_form(form, known)
                for form, known in zip(forms, registered, strict=True)
                if isinstance(known, ResolvedProgram)
            }
            if self._store is not None and named:
                try:
                    async with asyncio.timeout_at(deadline.at):
                        await run_sync(self._store.put_programs, named, abandon_on_cancel=True)
                except StoreUnavailableError as error:
                    raise ProblemError("store_unavailable", str(error), "retry later") from None
                except TimeoutError:
                    raise deadline.exceeded() from None
            return encode(
                {
                    "programs": [
                        {"hash": known.hash, "name": known.name}
                        if isinstance(known, ResolvedProgram)
                        else {"error": error_fields(ErrorInfo.of(known))}
                        for known in registered
                    ]
                }
            ).encode()

    async def model(self, model_id: str | None) -> LatencyPredictor:
        """The model with this identity; raises :class:`ProblemError` (404) where there is none."""
        loaded = self.models.in_memory(model_id)
        return loaded if loaded is not None else await run_sync(self.models.get, model_id)

    async def read_programs(
        self, sent: Sequence[tuple[ProgramValue, Backend | None]], deadline: Deadline
    ) -> list[ResolvedProgram | CdmppError]:
        """Programs from any of their forms, or the error of each; see :meth:`ProgramResolver.resolve`."""
        return await self._resolver.resolve(sent, deadline)

    async def do(self, here: bool, work: Callable[[], T], deadline: Deadline) -> T:
        """Run ``work`` in the event loop if ``here``, otherwise in a thread."""
        return await self._threads.run_unless(here, work, deadline)

    async def _in_chunks(
        self, work: Callable[[Sequence[int]], None], positions: Sequence[int], small: bool, deadline: Deadline
    ) -> None:
        """Process items of a small body in the event loop, in chunks; those of a large body in a thread.

        Between two chunks the event loop accepts connections and refuses requests. Only one request has chunks at a
        time: those of several would run in the same turn of the loop.
        """
        if not small or len(positions) <= CHUNK_ITEMS:
            return await self.do(small, partial(work, positions), deadline)
        try:
            async with asyncio.timeout_at(deadline.at), self._chunks:
                for start in range(0, len(positions), CHUNK_ITEMS):
                    work(positions[start : start + CHUNK_ITEMS])
                    await asyncio.sleep(0)
        except TimeoutError:
            raise deadline.exceeded() from None

    async def _resolve(self, reading: Reading, deadline: Deadline) -> None:
        """Resolve items whose program is not known yet: TIR in the sandbox, hashes in the store."""
        late = [unread for unread in reading.open if unread.known is None]
        if not late:
            return
        read = await self.read_programs(
            [(program_value(unread.item.program), unread.item.backend) for unread in late], deadline
        )
        for unread, known in zip(late, read, strict=True):
            if isinstance(known, ResolvedProgram):
                unread.known = known
            else:
                reading.failed[unread.position] = ErrorInfo.of(known)
        reading.open = [unread for unread in reading.open if unread.known is not None]
        reading.check_strict()

    async def _compute(self, reading: Reading, deadline: Deadline, place: Ticket) -> None:
        """Predict items without a cached answer, each distinct query once, and cache the answers."""
        groups: dict[tuple[RowKey, str], list[OpenItem]] = {}
        levels = reading.levels
        for open in reading.open:
            assert open.known is not None
            key, name = open.key(reading.predictor.model_id), open.known.name
            # An earlier request may have named the same program in another form.
            cached = self._answers.get(key, name, levels)
            if cached is None:
                groups.setdefault((key, name), []).append(open)
            else:
                reading.answer(open.position, cached)
        if not groups:
            return
        items = list(groups.items())
        answers: list[RenderedAnswer | None] = [None] * len(items)

        def keep(start: int, predictions: Sequence[Prediction]) -> None:
            # After each batch, not at the end: a request that missed its deadline continues when it is sent again.
            for position, prediction in enumerate(predictions, start):
                if prediction.error is None:
                    (key, name), group = items[position]
                    answer = answer_of(prediction, group[0].device.digest, self.signer)
                    if answer.signed:
                        self._answers.put(key, name, levels, answer)
                    answers[position] = answer

        queries = [_query(group[0]) for _, group in items]
        work = sum(work_of(reading.predictor, key) for (key, _), _ in items)
        predictions = await self.batcher.ask(reading.predictor, queries, levels, deadline, keep, (place, work))
        for (_, group), prediction, answer in zip(items, predictions, answers, strict=True):
            for open in group:
                if answer is not None:
                    reading.answer(open.position, answer)
                elif prediction.error is not None:
                    reading.failed[open.position] = prediction.error
        reading.check_strict()


def check_golden(predictor: LatencyPredictor) -> str:
    """Make the golden prediction; returns "" when it is sound, otherwise the fault."""
    try:
        (answer,) = predictor.predict_queries([GOLDEN], DEFAULT_QUANTILES)
    except Exception:
        _log.exception("the golden prediction failed")
        return "the golden prediction failed; see the service's log"
    if answer.error is not None:
        return answer.error.message
    figures = [answer.lower_s or 0.0, answer.latency_s or 0.0, answer.upper_s or 0.0]
    if not all(map(math.isfinite, figures)) or figures != sorted(figures) or figures[0] <= 0:
        return f"the golden prediction is not a latency with its bounds: {figures}"
    return ""


@contextmanager
def bugs_hidden(route: str) -> Iterator[None]:
    """Log unexpected errors and raise 500 in their place; :class:`ProblemError` passes."""
    try:
        yield
    except ProblemError:
        raise
    except Exception:
        _log.exception("unexpected error in %s", route)
        raise internal_error() from None


def _answer(reading: Reading, signer: Signer | None) -> bytes:
    receipts = [""] * len(reading.ids) if signer is None else signer.receipts(len(reading.ids))
    # A KeyError is a bug: an item has neither an answer nor an error.
    results = [
        failure(id, reading.failed[position]) if answer is None else result(id, answer, receipt)
        for position, (id, answer, receipt) in enumerate(zip(reading.ids, reading.results, receipts, strict=True))
    ]
    return response(reading.predictor.model_id, results)


def _query(open: OpenItem) -> Query:
    assert open.known is not None
    item = open.item
    return Query(open.known.program, open.device.spec, item.protocol, item.framework, item.implementation)
