"""Features of a search's candidates, encoded once per distinct program."""

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

#: Maximum number of cached programs, some ten kilobytes each; a round of TVM's default search has 2,560.
KEPT = 6_000


class CandidateEncoder:
    """Features of scheduled modules, cached by TVM's structural hash.

    Attributes
    ----------
    failed : int
        Number of distinct programs that could not be encoded.
    """

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._cache: OrderedDict[int, EncodedPrograms | None] = OrderedDict()
        self.failed = 0

    def encode(self, modules: Sequence[Any]) -> list[EncodedPrograms | None]:
        """Return the features of each module's PrimFunc with schedule columns; None if it cannot be encoded."""
        encoded: list[EncodedPrograms | None] = []
        with _no_collection():
            for module in modules:
                try:
                    function = prim_func(module)
                except InvalidProgramError as error:
                    self._refuse(error)
                    encoded.append(None)
                    continue
                key = int(tvm_ffi.structural_hash(function))
                if key in self._cache:
                    self._cache.move_to_end(key)
                else:
                    self._cache[key] = self._features(function)
                encoded.append(self._cache[key])
        while len(self._cache) > self._kept:
            self._cache.popitem(last=False)
        return encoded

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
    """Return the only PrimFunc of a candidate's module.

    Raises
    ------
    InvalidProgramError
        The module has several PrimFuncs, or none.
    """
    functions = [f for _, f in module.functions_items() if isinstance(f, tvm.tirx.PrimFunc)]
    if len(functions) != 1:
        raise InvalidProgramError(
            f"a candidate's module has {len(functions)} PrimFuncs", hint="tune one function at a time"
        )
    return functions[0]


@contextmanager
def _no_collection() -> Iterator[None]:
    """Disable cyclic garbage collection, which would scan a program's JSON repeatedly.

    The scans take three times as long as parsing and find nothing.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
