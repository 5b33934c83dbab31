"""Candidates of a search -> features, each distinct program once."""

from __future__ import annotations

import gc
import logging
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from cdmpp.errors import CdmppError, InvalidProgramError
from cdmpp.features.encode import EncodedPrograms, encode_tvm_json
from cdmpp.integrations.needed import tvm, tvm_ffi

logger = logging.getLogger(__name__)

#: Programs whose features are kept, some ten kilobytes each: a round of TVM's default search asks of 2,560.
KEPT = 6_000


class CandidateEncoder:
    """Features of scheduled modules, remembered by TVM's structural hash.

    Attributes
    ----------
    failed : int
        Distinct programs that could not be encoded.
    """

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._found: OrderedDict[int, EncodedPrograms | None] = OrderedDict()
        self.failed = 0

    def encode(self, modules: Sequence[Any]) -> list[EncodedPrograms | None]:
        """Features of each module's PrimFunc with its schedule's columns; None for one that has none."""
        found: list[EncodedPrograms | None] = []
        with _no_collection():
            for module in modules:
                try:
                    function = prim_func(module)
                except InvalidProgramError as error:
                    self._refuse(error)
                    found.append(None)
                    continue
                key = int(tvm_ffi.structural_hash(function))
                if key in self._found:
                    self._found.move_to_end(key)
                else:
                    self._found[key] = self._features(function)
                found.append(self._found[key])
        while len(self._found) > self._kept:
            self._found.popitem(last=False)
        return found

    def _features(self, function: Any) -> EncodedPrograms | None:
        try:
            return encode_tvm_json(str(tvm.ir.save_json(function)), schedule=True)
        except CdmppError as error:
            self._refuse(error)
            return None

    def _refuse(self, error: CdmppError) -> None:
        self.failed += 1
        logger.warning("a candidate cannot be encoded and is ranked last: %s", error.message)


def prim_func(module: Any) -> Any:
    """The function of a candidate's module, or of its only PrimFunc.

    Raises
    ------
    InvalidProgramError
        There are several, or none.
    """
    functions = [f for _, f in module.functions_items() if isinstance(f, tvm.tirx.PrimFunc)]
    if len(functions) != 1:
        raise InvalidProgramError(
            f"a candidate's module has {len(functions)} PrimFuncs", hint="tune one function at a time"
        )
    return functions[0]


@contextmanager
def _no_collection() -> Iterator[None]:
    """Without Python's collector of cycles: it looks through every node of a program's JSON again and again,
    which takes three times as long as parsing it, and finds none."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
