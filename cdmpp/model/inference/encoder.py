"""The stage ``encode``: features of programs, and the one builder of the batches that the network reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import CdmppError, InvalidProgramError
from cdmpp.features.encode import (
    TIR,
    EncodedProgram,
    EncodedPrograms,
    encode_as,
    encode_operators,
    encode_tvm_json,
    finite,
    overflow,
)
from cdmpp.features.schedule import SCHEDULE_WIDTH
from cdmpp.features.schema import WIDTH
from cdmpp.model.artifact.model import Artifact
from cdmpp.model.nn.figures import summarise
from cdmpp.model.nn.rows import ProgramStore, QueryBatch, QueryRows
from cdmpp.programs.program import TensorProgram
from cdmpp.utils.lru import Lru

Array = np.ndarray[Any, np.dtype[Any]]
#: Function from operator, element types and backend to the 16-bit type that a prediction may depend on, or None.
HalfType = Callable[[str, str, str], str | None]

#: Bytes of encoded programs that are cached.
ENCODED_BYTES = 1 << 24


class ProgramEncoder:
    """Encodes programs for the networks of one model, together where possible. Safe to share between threads.

    Features are cached by structural hash.
    """

    def __init__(self, artifact: Artifact) -> None:
        self._schedule, self._leaf_width = artifact.reads_schedules, artifact.leaf_width
        self.cache: Lru[EncodedPrograms] = Lru(ENCODED_BYTES)

    def encode(self, programs: Sequence[TensorProgram | EncodedProgram]) -> list[EncodedPrograms | CdmppError]:
        """Features of each program, or the error that prevents them."""
        encoded: dict[str, EncodedPrograms | CdmppError] = {}
        operators: dict[str, TensorProgram] = {}
        for program in programs:
            if isinstance(program, EncodedProgram) or program.hash in encoded or program.hash in operators:
                continue
            cached = self.cache.get(program.hash)
            if cached is not None:
                encoded[program.hash] = cached
            elif program.operator is not None:
                operators[program.hash] = program
            else:
                encoded[program.hash] = self._keep(program.hash, self._tir(program))
        for key, features in zip(operators, self._operators(list(operators.values())), strict=True):
            encoded[key] = self._keep(key, features)
        return [self._checked(p) if isinstance(p, EncodedProgram) else encoded[p.hash] for p in programs]

    def _operators(self, programs: Sequence[TensorProgram]) -> Sequence[EncodedPrograms | CdmppError]:
        specs = [program.operator for program in programs if program.operator is not None]
        try:
            return encode_operators(specs)
        except CdmppError as error:
            if len(programs) == 1:
                return [error]
            # One operator that does not exist for its dtype must not fail the others.
            return [self._operators([program])[0] for program in programs]

    def _tir(self, program: TensorProgram) -> EncodedPrograms | CdmppError:
        try:
            features = encode_tvm_json(program.tvm_json or "", program.function, schedule=self._schedule)
        except CdmppError as error:
            return error
        return features if finite(features).all() else overflow(program.name)

    def _keep(self, key: str, features: EncodedPrograms | CdmppError) -> EncodedPrograms | CdmppError:
        if isinstance(features, EncodedPrograms):
            self.cache.put(key, features, features.leaves.nbytes + features.totals.nbytes + 500)
        return features

    def _checked(self, program: EncodedProgram) -> EncodedPrograms | CdmppError:
        """Features that were computed elsewhere, unless they lack columns that the network reads."""
        features = program.features
        if features.leaves.shape[2] < self._leaf_width and program.operator == TIR:
            return InvalidProgramError(
                f"{program.name}: its features lack the schedule columns that the model reads",
                hint="encode it with schedule=True",
            )
        return features


class BatchBuilder:
    """Builds a batch from encoded programs and the queries on them.

    Predictions of a few programs, of arrays of features and of the rows of a table all use it. Add the programs, call
    :meth:`finish`, then :meth:`batch` as often as needed. The builder adds the 16-bit forms of programs whose
    predictions may depend on them.

    Keys of programs are 0 .. ``programs`` - 1; a key without a program must not be queried. ``width``: columns of a
    leaf that the network reads. ``half_type``: :meth:`cdmpp.model.inference.pipeline.InferencePipeline.half_type`.
    """

    def __init__(self, programs: int, width: int, half_type: HalfType) -> None:
        self.programs, self._half_type = programs, half_type
        # The physical limits read columns beyond those of the network.
        self._width = WIDTH + SCHEDULE_WIDTH if width > WIDTH else width
        self._alike: dict[tuple[Any, ...], list[tuple[Array, EncodedPrograms]]] = {}
        self._kinds: dict[tuple[str, str], int] = {}

    def add(self, keys: Array, operator: str, encoded: EncodedPrograms, backends: Iterable[str]) -> None:
        """Add programs of one operator ("tir" for programs given as TIR) under these keys.

        ``backends`` are those of the queries on them.
        """
        shape, with_sizes = encoded.leaves.shape[1:], encoded.sizes is not None
        alike = (operator, tuple(backends), encoded.structure, encoded.dtype, encoded.family, shape, with_sizes)
        self._alike.setdefault(alike, []).append((keys, encoded))

    def finish(self) -> Array:
        """Encode the 16-bit forms and store all programs.

        Returns the keys of programs whose features, or those of their 16-bit form, are not finite; they must not be
        queried.
        """
        blocks: list[tuple[Array, str, EncodedPrograms]] = []
        owners = [np.arange(self.programs)]
        self._half, count = np.full(self.programs, -1), self.programs
        for (operator, backends, *_), parts in self._alike.items():
            keys = np.concatenate([part_keys for part_keys, _ in parts])
            encoded = EncodedPrograms.join([features for _, features in parts])
            blocks.append((keys, operator, encoded))
            halves = {half for b in backends if (half := self._half_type(operator, encoded.types, b)) is not None}
            if halves and encoded.structure and encoded.sizes is not None:
                self._half[keys] = count + np.arange(len(keys))
                count += len(keys)
                owners.append(keys)
                blocks.append((self._half[keys], operator, encode_as(encoded.structure, min(halves), encoded.sizes)))
        self._store, self._kind = ProgramStore(count, self._width), np.zeros(count, dtype=np.int64)
        overflowing: list[Array] = []
        for keys, operator, encoded in blocks:
            sound = finite(encoded)
            overflowing.append(keys[~sound])
            kept = encoded if sound.all() else _cleared(encoded, sound)
            self._store.add(keys, kept, summarise(kept))
            self._kind[keys] = self._kinds.setdefault((operator, encoded.types), len(self._kinds))
        self._store.finish()
        self._alike.clear()
        return np.unique(np.concatenate(owners)[np.concatenate(overflowing)]) if overflowing else np.zeros(0, np.int64)

    def batch(self, specs: Sequence[DeviceSpec], rows: QueryRows) -> QueryBatch:
        """The batch of queries on programs and devices; ``rows`` refers to keys, and to positions in ``specs``."""
        return QueryBatch(self._store, list(self._kinds), self._kind, specs, rows, self._half)


def _cleared(encoded: EncodedPrograms, sound: Array) -> EncodedPrograms:
    """The features with finite values in place of programs that overflow."""
    leaves, totals = encoded.leaves.copy(), encoded.totals.copy()
    leaves[~sound], totals[~sound] = 0, 1
    return replace(encoded, leaves=leaves, totals=totals)
