"""A program encoded elsewhere: features and identity, without its text."""

from __future__ import annotations

from dataclasses import dataclass

from cdmpp.features.encode import EncodedPrograms
from cdmpp.programs.elements import LABEL_FIELDS, types_label
from cdmpp.programs.program import TensorProgram
from cdmpp.programs.query_options import Backend

#: :attr:`EncodedProgram.operator` of a program given as TIR.
TIR = "tir"


@dataclass(frozen=True, eq=False)
class EncodedProgram:
    """Stands in place of a :class:`~cdmpp.programs.program.TensorProgram` in a query.

    Texts of programs that nobody vouches for are parsed in a process of their own; this is what comes back.
    The features are trusted as they are.

    Attributes
    ----------
    name : str
        For people, as a TensorProgram's.
    hash : str
        The TensorProgram's structural hash: answers are remembered by it.
    backend : {"library", "tvm"}
    operator : str
        The operator's name; "tir" for a program given as TIR.
    features : EncodedPrograms of one row
        Of TIR with the schedule's columns (:mod:`cdmpp.features.schedule`); a network that does not read them
        leaves them out.
    """

    name: str
    hash: str
    backend: Backend
    operator: str
    features: EncodedPrograms

    def __post_init__(self) -> None:
        if len(self.features) != 1:
            raise ValueError(f"an encoded program is one row of features, not {len(self.features)}")


def operator_name(program: TensorProgram | EncodedProgram) -> str:
    """The operator's name; "tir" for a program given as TIR."""
    if isinstance(program, EncodedProgram):
        return program.operator
    return program.operator.operator if program.operator is not None else TIR


def element_types(program: TensorProgram | EncodedProgram) -> str:
    """Element types of an operator as one text (:func:`cdmpp.programs.elements.types_label`); "" for TIR."""
    if isinstance(program, EncodedProgram):
        return program.features.types
    operator = program.operator
    if operator is None:
        return ""
    named = [name for name in LABEL_FIELDS if name in operator.structural_fields]
    return types_label(operator.dtype, {name: getattr(operator, name) for name in named})
