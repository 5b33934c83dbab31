"""Programs of requests from any of their forms: operator, TIR text, or hash."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from anyio.to_thread import run_sync

from cdmpp.errors import CdmppError, OverloadedError
from cdmpp.features.encode import EncodedProgram
from cdmpp.programs.program import TensorProgram
from cdmpp.programs.query_options import Backend
from cdmpp_server.concurrency import ConcurrencyLimiter, Deadline
from cdmpp_server.fields import ProgramValue
from cdmpp_server.observe.store import ObservationStore
from cdmpp_server.observe.tables import StoreUnavailableError
from cdmpp_server.predict.programs import Programs, ResolvedProgram, exact_key, unknown_program
from cdmpp_server.problems import ProblemError
from cdmpp_server.sandbox.sandbox import Sandbox, TirText

#: :func:`exact_key` of a program, and its backend where the item names one.
_Key = tuple[bytes, Backend | None]
#: Up to this number of items is processed in the event loop.
_INLINE_ITEMS = 256


class ProgramResolver:
    """Resolves programs with the cache, the sandbox and the store. Belongs to one event loop.

    The sandbox reads TVM JSON and TVMScript, the store has the registered programs, and ``threads`` run the work for
    large requests.
    """

    def __init__(
        self, programs: Programs, sandbox: Sandbox, store: ObservationStore | None, threads: ConcurrencyLimiter
    ) -> None:
        self._programs, self._sandbox, self._store, self._threads = programs, sandbox, store, threads

    async def resolve(
        self, sent: Sequence[tuple[ProgramValue, Backend | None]], deadline: Deadline
    ) -> list[ResolvedProgram | CdmppError]:
        """Return a program or an error for each sent form, in order.

        Raises ProblemError: 503, 504.
        """
        keyed, cached = await self._threads.run_unless(len(sent) <= _INLINE_ITEMS, partial(self._read, sent), deadline)
        missing = {
            keyed[i][1:]: form
            for i, known in enumerate(cached)
            if known is None and not isinstance(form := keyed[i][0], str)
        }
        looked_up = await self._look_up(missing, deadline) if missing else {}
        return [known if known is not None else looked_up[keyed[i][1:]] for i, known in enumerate(cached)]

    def _read(
        self, sent: Sequence[tuple[ProgramValue, Backend | None]]
    ) -> tuple[list[tuple[ProgramValue, bytes, Backend | None]], list[ResolvedProgram | CdmppError | None]]:
        """Forms with their keys, and the cached program, new operator or error; None for new TIR and hashes."""
        keyed = [(fields, exact_key(fields), backend) for fields, backend in sent]
        cached: list[ResolvedProgram | CdmppError | None] = []
        for fields, wording, backend in keyed:
            known: ResolvedProgram | CdmppError | None = self._programs.known(wording, backend)
            if known is None and (isinstance(fields, str) or "operator" in fields):
                try:
                    known = self._programs.operator(fields, wording, backend)
                except CdmppError as error:
                    known = error
            cached.append(known)
        return keyed, cached

    async def _look_up(
        self, missing: Mapping[_Key, Mapping[str, Any]], deadline: Deadline
    ) -> dict[_Key, ResolvedProgram | CdmppError]:
        """Resolve programs given as TIR or hash; returns them by key and backend."""
        known_programs: dict[_Key, ResolvedProgram | CdmppError] = {}
        texts: dict[_Key, TirText] = {}
        hashes: dict[str, list[_Key]] = {}
        for key, fields in missing.items():
            if "hash" in fields:
                hashes.setdefault(fields["hash"], []).append(key)
            else:
                texts[key] = _tir(fields, key[1])
        for hash in list(hashes):
            cached = self._programs.hashed(hash)
            if cached is not None:
                for key in hashes.pop(hash):
                    known_programs[key] = cached.run_by(key[1])
        try:
            async with asyncio.timeout_at(deadline.at):
                stored = await self._stored(list(hashes))
                work = partial(_registered, hashes, stored)
                stored_programs, stored_texts = await self._threads.run_unless(
                    len(stored) <= _INLINE_ITEMS, work, deadline
                )
                known_programs |= stored_programs
                texts |= stored_texts
                if texts:
                    encoded = await self._sandbox.encode_tirs(list(texts.values()))
                    for key, program in zip(texts, encoded, strict=True):
                        known_programs[key] = (
                            ResolvedProgram.of(program) if isinstance(program, EncodedProgram) else program
                        )
        except TimeoutError:
            raise deadline.exceeded() from None
        except OverloadedError as error:
            raise ProblemError("overloaded", error.message, error.hint, headers={"retry-after": "1"}) from None
        for (wording, backend), known in known_programs.items():
            if isinstance(known, ResolvedProgram):
                self._programs.remember(known, wording, backend)
        return known_programs

    async def _stored(self, hashes: list[str]) -> dict[str, dict[str, Any]]:
        if not hashes or self._store is None:
            return {}
        try:
            return await run_sync(self._store.get_programs, hashes, abandon_on_cancel=True)
        except StoreUnavailableError as error:
            raise ProblemError("store_unavailable", str(error), "retry later, or send the program itself") from None


def stored_form(form: ProgramValue, known: ResolvedProgram) -> dict[str, Any]:
    """The object that the store keeps: it has no texts of operators."""
    if not isinstance(form, str):
        return form
    assert isinstance(known.program, TensorProgram) and known.program.operator is not None
    return known.program.operator.model_dump()


def _operator(form: Mapping[str, Any], backend: Backend | None) -> ResolvedProgram | CdmppError:
    """A stored operator; another version of the service may have stored operators that this version lacks."""
    try:
        return ResolvedProgram.of(TensorProgram.from_operator(form, backend or "library"))
    except CdmppError as error:
        return error


def _registered(
    hashes: Mapping[str, Sequence[_Key]], stored: Mapping[str, Mapping[str, Any]]
) -> tuple[dict[_Key, ResolvedProgram | CdmppError], dict[_Key, TirText]]:
    """Programs from the store, and the TIR texts among them, which the sandbox reads."""
    programs: dict[_Key, ResolvedProgram | CdmppError] = {}
    texts: dict[_Key, TirText] = {}
    for hash, keys in hashes.items():
        for key in keys:
            form = stored.get(hash)
            if form is None:
                programs[key] = unknown_program(hash)
            elif "operator" in form:
                programs[key] = _operator(form, key[1])
            else:
                texts[key] = _tir(form, key[1])
    return programs, texts


def _tir(form: Mapping[str, Any], backend: Backend | None) -> TirText:
    if "tvm_json" in form:
        return TirText("tvm_json", form["tvm_json"], backend or "tvm")
    return TirText("tvmscript", form["tvmscript"], backend or "tvm")
