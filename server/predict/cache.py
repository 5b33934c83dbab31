"""Programs seen before, by the exact JSON that named them, within a bound of bytes."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from typing import Any

from cdmpp.frontends.request import program_from_request
from cdmpp.programs.program import TensorProgram
from cdmpp.programs.question import Backend
from server.predict.wire import TvmJsonProgram, TvmScriptProgram

#: What an operator's specification and its place in the dictionary take, roughly.
_OPERATOR_BYTES = 2048


class ProgramCache:
    """Turns a program as sent into a :class:`TensorProgram`, once.

    Checking an operator and hashing TIR cost far more than finding them here. Safe between threads.
    """

    def __init__(self, max_bytes: int) -> None:
        self._free = max_bytes
        self._max_bytes = max_bytes
        self._items: OrderedDict[tuple[str | None, str], tuple[TensorProgram, int]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._items)

    def get(
        self, sent: dict[str, Any] | TvmJsonProgram | TvmScriptProgram, backend: Backend | None
    ) -> TensorProgram:
        """The program; raises what :func:`program_from_request` raises.

        Failures are not remembered: they are cheap, and whether TVM is installed may change.
        """
        fields = sent if isinstance(sent, dict) else sent.model_dump()
        # As text, for 1, 1.0 and true are equal keys but not equal programs.
        key = (backend, json.dumps(fields))
        with self._lock:
            found = self._items.get(key)
            if found is not None:
                self._items.move_to_end(key)
                return found[0]
        program = program_from_request(fields, backend)
        _ = program.hash  # computed here once; an unreadable program fails here too
        size = _OPERATOR_BYTES + 2 * len(key[1]) + 2 * len(program.tvm_json or "")
        with self._lock:
            if key not in self._items and size <= self._max_bytes:
                self._items[key] = (program, size)
                self._free -= size
                while self._free < 0:
                    self._free += self._items.popitem(last=False)[1][1]
        return program
