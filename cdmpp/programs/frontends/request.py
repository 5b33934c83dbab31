"""The program of one ``/predict`` item, in any of its three forms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cdmpp.programs.program import TensorProgram
from cdmpp.programs.query_options import Backend


def program_from_request(program: Any, backend: Backend | None = None) -> TensorProgram:
    """Make a program from an operator object, its text, ``{"tvm_json": text}`` or ``{"tvmscript": text}``.

    Parameters
    ----------
    program : object
        As JSON gives it.
    backend : {"library", "tvm"}, optional
        What runs the program. Default: "library" for an operator, "tvm" for TIR.

    Raises
    ------
    InvalidProgramError, UnsupportedOperatorError
        Not one of the four forms, or not a valid program.
    MissingDependencyError
        TVMScript, and TVM is not installed; the other forms do not need it.
    """
    if isinstance(program, Mapping) and set(program) == {"tvmscript"}:
        text = program["tvmscript"]
        if isinstance(text, str):
            from cdmpp.programs.frontends.tir import program_from_tvmscript

            return program_from_tvmscript(text, backend or "tvm")
    return TensorProgram.from_request(program, backend)
