"""Features of programs, computed together where possible and cached by structural hash."""

from __future__ import annotations

from collections.abc import Sequence

from cdmpp.errors import CdmppError, InvalidProgramError
from cdmpp.features.encode import (
    TIR,
    EncodedProgram,
    EncodedPrograms,
    encode_operators,
    encode_tvm_json,
    finite,
    overflow,
)
from cdmpp.model.artifact.model import Artifact
from cdmpp.programs.program import TensorProgram
from cdmpp.utils.lru import Lru

#: Bytes of encoded programs that are cached.
ENCODED_BYTES = 1 << 24


class ProgramEncoder:
    """Encodes programs for the networks of one model. Safe to share between threads.

    Parameters
    ----------
    artifact : Artifact
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
        return [self._narrow(p) if isinstance(p, EncodedProgram) else encoded[p.hash] for p in programs]

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
        features = features.narrow(self._leaf_width)
        return features if finite(features).all() else overflow(program.name)

    def _keep(self, key: str, features: EncodedPrograms | CdmppError) -> EncodedPrograms | CdmppError:
        if isinstance(features, EncodedPrograms):
            self.cache.put(key, features, features.leaves.nbytes + features.totals.nbytes + 500)
        return features

    def _narrow(self, program: EncodedProgram) -> EncodedPrograms | CdmppError:
        """Features that were computed elsewhere, with the columns that the network reads."""
        features, width = program.features, self._leaf_width
        if features.leaves.shape[2] < width and program.operator == TIR:
            return InvalidProgramError(
                f"{program.name}: its features lack the schedule columns that the model reads",
                hint="encode it with schedule=True",
            )
        return features.narrow(width)
