"""Features of many scheduled programs, encoded in one call: a search's population, a data set."""

from __future__ import annotations

from collections.abc import Sequence

from cdmpp.errors import InvalidProgramError
from cdmpp.features.ast import CompactAST
from cdmpp.features.encode import EncodedPrograms, encode_ast, encode_asts
from cdmpp.features.leaf_tables import PARTS
from cdmpp.features.walk import build_ast
from cdmpp.programs.tvm_json import Nodes, load

#: A program: TVM JSON, its nodes and root as :func:`cdmpp.programs.tvm_json.load` returns them, or its compact AST.
Source = str | bytes | tuple[Nodes, int] | CompactAST
#: Programs from which on importing numba pays, and programs that are computed at once.
COMPILE_FROM, AT_ONCE = 32, 512


def encode_many(programs: Sequence[Source], *, schedule: bool = False) -> list[EncodedPrograms | InvalidProgramError]:
    """Features of programs, each exactly as :func:`~cdmpp.features.encode.encode_tvm_json` gives it.

    Parameters
    ----------
    programs : sequence of str, bytes, (nodes, root) or CompactAST
        Of one PrimFunc each.
    schedule : bool
        With the columns of :mod:`cdmpp.features.schedule` behind each leaf's own.

    Returns
    -------
    list, in the order of ``programs``
        An error in place of a program that cannot be encoded.
    """
    if schedule and len(programs) >= COMPILE_FROM:
        PARTS.compile()
    encoded: list[EncodedPrograms | InvalidProgramError] = []
    for start in range(0, len(programs), AT_ONCE):
        encoded += _encode(programs[start : start + AT_ONCE], schedule)
    return encoded


def _encode(programs: Sequence[Source], schedule: bool) -> list[EncodedPrograms | InvalidProgramError]:
    found: list[EncodedPrograms | InvalidProgramError | None] = [None] * len(programs)
    asts: dict[int, CompactAST] = {}
    for place, program in enumerate(programs):
        try:
            if not isinstance(program, CompactAST):
                program = build_ast(*(program if isinstance(program, tuple) else load(program)))
            asts[place] = program
        except InvalidProgramError as error:
            found[place] = error
    try:
        together = encode_asts(list(asts.values()), schedule=schedule)
        found_by_place: dict[int, EncodedPrograms | InvalidProgramError] = dict(zip(asts, together, strict=True))
    except InvalidProgramError:
        # One program must not fail the others: each by itself says what is wrong with it.
        found_by_place = {place: _alone(ast, schedule) for place, ast in asts.items()}
    return [found_by_place[place] if each is None else each for place, each in enumerate(found)]


def _alone(ast: CompactAST, schedule: bool) -> EncodedPrograms | InvalidProgramError:
    try:
        return encode_ast(ast, schedule=schedule)
    except InvalidProgramError as error:
        return error
