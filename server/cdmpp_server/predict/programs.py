"""Programs seen before: by the words that named them, and by their hash."""

from __future__ import annotations

import hashlib
import marshal
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from cdmpp.errors import CdmppError
from cdmpp.features.encoded import EncodedProgram
from cdmpp.programs.program import TensorProgram
from cdmpp.programs.query_options import Backend
from cdmpp_server.predict.cache import ByteLru

#: What an operator's specification and its places in the cache take, roughly.
_OPERATOR_BYTES = 3000
_LONG = 256


class UnknownProgramError(CdmppError, LookupError):
    """A hash that no program is known by."""

    code = "unknown_program"


def unknown_program(hash: str) -> UnknownProgramError:
    """The error of an item that names a program by its hash in vain."""
    return UnknownProgramError(f"no program with the hash {hash} is known", hint="POST /programs registers programs")


def words(sent: Any) -> bytes:
    """The exact value that JSON gave, as a key: other than with ``==``, 1, 1.0 and true differ."""
    # Version 2: later ones also write which objects are shared, which is not part of the value.
    text = marshal.dumps(sent, 2)
    return text if len(text) <= _LONG else hashlib.sha256(text).digest()


@dataclass(frozen=True, eq=False)
class Known:
    """A program that can be asked about.

    Attributes
    ----------
    program : TensorProgram (an operator) or EncodedProgram (TIR)
    identity : tuple
        Structural hash, backend and name: with them equal, answers are.
    """

    program: TensorProgram | EncodedProgram
    identity: tuple[str, str, str]

    @classmethod
    def of(cls, program: TensorProgram | EncodedProgram) -> Known:
        """Compute the identity, once."""
        return cls(program, (program.hash, program.backend, program.name))

    @property
    def size_bytes(self) -> int:
        """Memory that it takes, roughly."""
        if isinstance(self.program, EncodedProgram):
            features = self.program.features
            return _OPERATOR_BYTES + features.leaves.nbytes + features.positions.nbytes + 1000
        return _OPERATOR_BYTES + 4 * len(self.program.name)

    def run_by(self, backend: Backend | None) -> Known:
        """The same program with this backend; None: its own."""
        if backend is None or backend == self.program.backend:
            return self
        return Known.of(replace(self.program, backend=backend))


class Programs:
    """Turns a program as sent into one that can be asked about, once. Safe between threads.

    Checking an operator and reading TIR cost far more than finding them here. Failures are not
    remembered: they are cheap, and whether TVM is installed may change.

    Parameters
    ----------
    max_bytes : int
    """

    def __init__(self, max_bytes: int) -> None:
        self._kept: ByteLru[Known] = ByteLru(max_bytes)

    def __len__(self) -> int:
        return len(self._kept)

    def worded(self, wording: bytes, backend: Backend | None) -> Known | None:
        """A program that was sent in these words (:func:`words`) before."""
        return self._kept.get((wording, backend))

    def hashed(self, hash: str) -> Known | None:
        """A program of this hash that was sent before, with the backend that is usual for such."""
        return self._kept.get(hash)

    def operator(self, fields: Mapping[str, Any], wording: bytes, backend: Backend | None) -> Known:
        """An operator's program; raises what :meth:`TensorProgram.from_operator` raises."""
        known = Known.of(TensorProgram.from_operator(fields, backend or "library"))
        self.remember(known, wording, backend)
        return known

    def remember(self, known: Known, wording: bytes, backend: Backend | None) -> None:
        """Find it by these words from now on, and by its hash."""
        size = known.size_bytes
        self._kept.put((wording, backend), known, size)
        # Who asks by hash and names no backend means the usual one of such programs.
        usual: Backend = "library" if isinstance(known.program, TensorProgram) else "tvm"
        self._kept.put(known.identity[0], known.run_by(usual), size)
