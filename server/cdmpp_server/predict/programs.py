"""Caches of programs and devices of requests.

Programs are found by the exact JSON value that a request sent, and by structural hash; devices by name for each model,
and by the figures of an inline specification.
"""

from __future__ import annotations

import hashlib
import marshal
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from cdmpp.devices import DeviceSpec, described_device
from cdmpp.errors import CdmppError
from cdmpp.features.encode import EncodedProgram
from cdmpp.model.artifact.model import Artifact
from cdmpp.programs.program import TensorProgram
from cdmpp.programs.query_options import Backend
from cdmpp.utils.lru import Lru

#: Memory of an operator's specification and its cache entries, approximately.
_OPERATOR_BYTES = 3000
_LONG = 256


class UnknownProgramError(CdmppError, LookupError):
    """No program has this hash."""

    code = "unknown_program"


def unknown_program(hash: str) -> UnknownProgramError:
    """The error of an item whose program hash is not known."""
    return UnknownProgramError(f"no program with the hash {hash} is known", hint="POST /programs registers programs")


def exact_key(sent: Any) -> bytes:
    """Key of a JSON value; unlike with ``==``, 1, 1.0 and true have different keys."""
    # Version 2: later versions also write which objects are shared, which is not part of the value.
    text = marshal.dumps(sent, 2)
    return text if len(text) <= _LONG else hashlib.sha256(text).digest()


@dataclass(frozen=True, eq=False)
class ResolvedProgram:
    """A program that can be predicted, with its hash and name, which are computed once."""

    program: TensorProgram | EncodedProgram
    #: Structural hash.
    hash: str
    backend: str
    name: str

    @classmethod
    def of(cls, program: TensorProgram | EncodedProgram) -> ResolvedProgram:
        """Compute hash and name."""
        return cls(program, program.hash, program.backend, program.name)

    @property
    def size_bytes(self) -> int:
        """Memory of the program, approximately."""
        if isinstance(self.program, EncodedProgram):
            features = self.program.features
            return _OPERATOR_BYTES + features.leaves.nbytes + features.positions.nbytes + 1000
        return _OPERATOR_BYTES + 4 * len(self.name)

    def run_by(self, backend: Backend | None) -> ResolvedProgram:
        """The same program with this backend; None keeps its backend."""
        if backend is None or backend == self.backend:
            return self
        return ResolvedProgram.of(replace(self.program, backend=backend))


class Programs:
    """Turns programs of requests into programs to predict, each once. Safe to share between threads.

    Checking an operator and reading TIR cost far more than a look-up here. Errors are not cached: they are cheap,
    and TVM may be installed later.
    """

    def __init__(self, max_bytes: int) -> None:
        self._cache: Lru[ResolvedProgram] = Lru(max_bytes)

    def __len__(self) -> int:
        return len(self._cache)

    def known(self, key: bytes, backend: Backend | None) -> ResolvedProgram | None:
        """The program that an earlier request sent with this :func:`exact_key` and backend."""
        return self._cache.get((key, backend))

    def hashed(self, hash: str) -> ResolvedProgram | None:
        """The program with this hash that an earlier request sent, with its default backend."""
        return self._cache.get(hash)

    def operator(self, fields: Mapping[str, Any] | str, key: bytes, backend: Backend | None) -> ResolvedProgram:
        """The program of an operator object or text; raises the errors of :meth:`TensorProgram.from_operator`."""
        known = ResolvedProgram.of(TensorProgram.from_operator(fields, backend or "library"))
        self.remember(known, key, backend)
        return known

    def remember(self, known: ResolvedProgram, key: bytes, backend: Backend | None) -> None:
        """Cache a program under this key and under its hash."""
        size = known.size_bytes
        self._cache.put((key, backend), known, size)
        # An item that names a hash and no backend gets the default backend of such programs.
        default: Backend = "library" if isinstance(known.program, TensorProgram) else "tvm"
        self._cache.put(known.hash, known.run_by(default), size)


#: Memory of a specification and its cache entry, approximately.
_DEVICE_BYTES = 4000


@dataclass(frozen=True, eq=False)
class ResolvedDevice:
    """A specification with its digest and its part of a cache key, which are computed once."""

    spec: DeviceSpec
    digest: str
    cache_key: str


class Devices:
    """Looks up devices of requests. Safe to share between threads."""

    def __init__(self, max_bytes: int = 2**23) -> None:
        self._cache: Lru[ResolvedDevice] = Lru(max_bytes)

    def known(self, sent: Any, artifact: Artifact) -> ResolvedDevice | None:
        """A device that an earlier request sent in the same form."""
        return self._cache.get(_key(sent, artifact))

    def find(self, sent: str | dict[str, Any], artifact: Artifact) -> ResolvedDevice:
        """The device of this name or with these figures.

        Raises UnknownDeviceError or InvalidDeviceError; errors are not cached.
        """
        known = self.known(sent, artifact)
        if known is None:
            # By name and never load_device: a client's text must not be used as a path on this machine.
            spec = artifact.device(sent) if isinstance(sent, str) else described_device(sent)
            known = ResolvedDevice(spec, spec.digest(), spec.cache_key())
            self._cache.put(_key(sent, artifact), known, _DEVICE_BYTES)
        return known


def _key(sent: Any, artifact: Artifact) -> Any:
    # The meaning of a name depends on the model, that of figures does not.
    return (artifact.model_id, sent) if isinstance(sent, str) else exact_key(sent)
