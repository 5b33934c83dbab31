"""Programs of observations, stored so that an observation can become a record to adapt to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cdmpp.programs.program import TensorProgram
from cdmpp.utils.lru import Lru
from cdmpp_server.observe.routes import ObservedProgram, ObserveRequest
from cdmpp_server.observe.store import Observation, ObservationStore
from cdmpp_server.predict.programs import Programs

#: Memory of the hashes that are known to be stored, and of one of them.
_MEMORY_BYTES, _HASH_BYTES = 16 * 2**20, 200


class ObservedPrograms:
    """Stores the program of each observation once, if the program is known.

    A ``prediction_id`` contains only a hash. The program behind it is known to the worker that predicted it, while it
    is cached there, and to every worker if it is stored. Safe between threads.

    ``programs``: programs that this worker has cached.
    """

    def __init__(self, store: ObservationStore, programs: Programs) -> None:
        self._store, self._programs = store, programs
        self._stored: Lru[bool] = Lru(_MEMORY_BYTES)

    def keep(self, request: ObserveRequest, results: Sequence[Observation | dict[str, str]]) -> None:
        """Store the programs of the accepted observations of a request; raises ``StoreUnavailableError``."""
        forms: dict[str, dict[str, Any]] = {}
        for observed, result in zip(request.observations, results, strict=True):
            if not isinstance(result, Observation):
                continue
            hash = result.predicted.program_hash
            if hash in forms or self._stored.get(hash):
                continue
            form = self._form(hash, observed.program if isinstance(observed, ObservedProgram) else None)
            if form is not None:
                forms[hash] = form
        self._store.put_programs(forms)
        for hash in forms:
            self._stored.put(hash, True, _HASH_BYTES)

    def _form(self, hash: str, sent: Any) -> dict[str, Any] | None:
        known = self._programs.hashed(hash)
        if known is not None and isinstance(known.program, TensorProgram) and known.program.operator is not None:
            return known.program.operator.model_dump()
        value = None if sent is None or isinstance(sent, str | dict) else sent.model_dump()
        return value if value is not None and "hash" not in value else None
