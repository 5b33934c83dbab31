"""A tensor program: an operator specification or TIR as TVM JSON, with its identity."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from cdmpp.errors import InvalidProgramError
from cdmpp.programs.operators import OperatorSpec, make_operator, parse_operator
from cdmpp.programs.query_options import BACKENDS, Backend
from cdmpp.programs.tvm_json import find_prim_func, load, structural_hash

PROGRAM_FORMS = "an operator object, its text, {'tvm_json': text} or {'tvmscript': text}"


@dataclass(frozen=True)
class TensorProgram:
    """A program whose latency is predicted.

    Exactly one of ``operator`` and ``tvm_json`` is set. Build one with the class methods.

    Attributes
    ----------
    name : str
        For people: the operator's text, or the function's name.
    backend : {"library", "tvm"}
        Library kernel, or the TVM program as scheduled.
    operator : OperatorSpec or None
    tvm_json : str or None
        What ``tvm.ir.save_json`` wrote.
    function : str or None
        Which PrimFunc of the module, when it has several.
    """

    name: str
    backend: Backend
    operator: OperatorSpec | None = None
    tvm_json: str | None = None
    function: str | None = None

    def __post_init__(self) -> None:
        if (self.operator is None) == (self.tvm_json is None):
            raise InvalidProgramError("a program is either an operator or TVM JSON", hint=f"pass {PROGRAM_FORMS}")
        if self.backend not in BACKENDS:
            raise InvalidProgramError(f"backend {self.backend!r} is unknown", hint="one of: " + ", ".join(BACKENDS))

    @classmethod
    def from_operator(
        cls, operator: OperatorSpec | Mapping[str, Any] | str, backend: Backend = "library"
    ) -> TensorProgram:
        """Make a program from a specification, its fields, or its text (``linear:m=512,n=4096,k=1024``)."""
        if isinstance(operator, str):
            operator = parse_operator(operator)
        elif not isinstance(operator, OperatorSpec):
            operator = make_operator(operator)
        else:
            operator.check()
        return cls(operator.text(), backend, operator=operator)

    @classmethod
    def from_tvm_json(
        cls, text: str, backend: Backend = "tvm", name: str | None = None, function: str | None = None
    ) -> TensorProgram:
        """Make a program from TVM JSON of a PrimFunc, or of an IRModule (``function`` names one of several)."""
        return cls(name or function or "main", backend, tvm_json=text, function=function)

    @classmethod
    def from_request(cls, program: Any, backend: Backend | None = None) -> TensorProgram:
        """Make a program from an operator, its fields, its text, or ``{"tvm_json": text}``; needs no TVM.

        :func:`cdmpp.programs.frontends.load.program_from_request` also reads ``{"tvmscript": text}``.
        """
        if isinstance(program, str | OperatorSpec):
            return cls.from_operator(program, backend or "library")
        if isinstance(program, Mapping):
            if "operator" in program:
                return cls.from_operator(program, backend or "library")
            if set(program) == {"tvm_json"} and isinstance(program["tvm_json"], str):
                return cls.from_tvm_json(program["tvm_json"], backend or "tvm")
        raise InvalidProgramError("this is not a program", hint=f"pass {PROGRAM_FORMS}")

    @cached_property
    def hash(self) -> str:
        """Structural hash (hex, 32 characters): equal programs have one, whatever their source."""
        if self.operator is not None:
            return self.operator.hash()
        nodes, root = load(self.tvm_json or "")
        return structural_hash(nodes, find_prim_func(nodes, root, self.function))
