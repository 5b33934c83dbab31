"""TIR as objects or as TVMScript -> tensor programs. TVM is imported on first use."""

from __future__ import annotations

from functools import cache
from typing import Any

from cdmpp.errors import InvalidProgramError, MissingDependencyError, install_hint
from cdmpp.programs.frontends.tvmscript_check import HINT, T_DOTTED, T_NAMES, checked_functions
from cdmpp.programs.program import TensorProgram
from cdmpp.programs.query_options import Backend

_DTYPES = [
    f"{kind}{bits}{lanes}"
    for kind, widths in (("int", (8, 16, 32, 64)), ("uint", (8, 16, 32, 64)), ("float", (16, 32, 64)))
    for bits in widths
    for lanes in ("", "x2", "x4", "x8", "x16", "x32", "x64")
]


def import_tvm() -> Any:
    """Import TVM without its tensor intrinsics (half a minute), or raise an error with the install command."""
    try:
        import tvm
    except ImportError as error:
        raise MissingDependencyError("this program form needs TVM", hint=install_hint("tvm")) from error
    return tvm


def prepare() -> None:
    """Import TVM, and what reading TVMScript needs of it, now rather than with the first text.

    Raises MissingDependencyError: TVM is not installed.
    """
    import_tvm()
    _namespace()


def programs_from_tir(module: Any, backend: Backend = "tvm", *, name: str | None = None) -> list[TensorProgram]:
    """One program for each PrimFunc of an IRModule, or for a PrimFunc; Relax functions are left out.

    TIR runs as scheduled, unless ``backend`` says otherwise. ``name`` replaces the name of a single PrimFunc.
    Raises InvalidProgramError: neither an IRModule nor a PrimFunc, or without a PrimFunc.
    """
    tvm = import_tvm()
    if isinstance(module, tvm.tirx.PrimFunc):
        symbol = module.attrs.get("global_symbol") if module.attrs else None
        return [_program(tvm, module, name or str(symbol or "main"), backend)]
    if not isinstance(module, tvm.IRModule):
        raise InvalidProgramError(
            f"a {type(module).__name__} is no TIR", hint="pass a tvm.IRModule or a tvm.tirx.PrimFunc"
        )
    functions = {
        str(variable.name_hint): function
        for variable, function in module.functions_items()
        if isinstance(function, tvm.tirx.PrimFunc)
    }
    if not functions:
        raise InvalidProgramError("the module has no PrimFunc", hint="lower it first, or pass an ONNX model")
    if len(functions) == 1:
        ((key, function),) = functions.items()
        return [_program(tvm, function, name or key, backend)]
    return [_program(tvm, function, key, backend) for key, function in functions.items()]


def _program(tvm: Any, function: Any, name: str, backend: Backend) -> TensorProgram:
    try:
        text = str(tvm.ir.save_json(function))
    except Exception as error:  # an annotation may hold anything
        raise InvalidProgramError(
            f"function {name!r} cannot be written as TVM JSON: {_reason(error)}",
            hint="annotations may hold numbers and text only",
        ) from None
    return TensorProgram.from_tvm_json(text, backend, name)


def programs_from_tvmscript(source: str, backend: Backend = "tvm") -> list[TensorProgram]:
    """One program for each ``@T.prim_func`` of a TVMScript text.

    The text is not executed: see :mod:`cdmpp.programs.frontends.tvmscript_check` for what is let through.

    Raises InvalidProgramError: not TVMScript, or with anything but the listed constructs.
    Raises MissingDependencyError: TVM is not installed.
    """
    functions = _prim_funcs(source)
    return [p for name, function in functions.items() for p in programs_from_tir(function, backend, name=name)]


def module_from_tvmscript(source: str) -> Any:
    """The PrimFuncs of a TVMScript text as a ``tvm.IRModule``; errors as :func:`programs_from_tvmscript`."""
    return import_tvm().IRModule(_prim_funcs(source))


def _prim_funcs(source: str) -> dict[str, Any]:
    functions = {}
    checked = checked_functions(source)
    tvm = import_tvm()
    for name, text in checked:
        try:
            functions[name] = tvm.script.from_source(text, extra_vars=_namespace())
        except Exception as error:  # TVM's parser raises a dozen kinds, each for a fault of the text
            raise InvalidProgramError(f"TVMScript function {name!r}: {_reason(error)}", hint=HINT) from None
    return functions


def program_from_tvmscript(source: str, backend: Backend = "tvm") -> TensorProgram:
    """The only program of a TVMScript text; several are an :class:`InvalidProgramError`."""
    programs = programs_from_tvmscript(source, backend)
    if len(programs) != 1:
        raise InvalidProgramError(
            f"the TVMScript has {len(programs)} functions: {', '.join(p.name for p in programs[:8])}",
            hint="send one item for each @T.prim_func",
        )
    return programs[0]


class _Constructs:
    """Replacement for ``T``: an object with the listed constructs and nothing else."""


class _Nothing:
    """Replacement for Python's builtins, which TVM's evaluator falls back to."""


@cache
def _namespace() -> dict[str, Any]:
    import builtins

    from tvm.script import tirx

    constructs = _Constructs()
    for name in [*T_NAMES, *_DTYPES, "let", "bfloat16"]:
        if hasattr(tirx, name):
            setattr(constructs, name, getattr(tirx, name))
    for group, names in T_DOTTED.items():
        holder = _Constructs()
        for name in names:
            if hasattr(source := getattr(tirx, group, None), name):
                setattr(holder, name, getattr(source, name))
        setattr(constructs, group, holder)
    # The check lets no builtin through; this is the second lock.
    hidden = {name: _Nothing() for name in dir(builtins) if name not in ("True", "False", "None")}
    return {**hidden, "T": constructs}


def _reason(error: Exception) -> str:
    """The last line of TVM's report that is not a source excerpt."""
    lines = [line.strip() for line in str(error).splitlines()]
    kept = [line for line in lines if line and not line.startswith(("-->", "^")) and "|" not in line[:8]]
    last = kept[-1] if kept else type(error).__name__
    return next((line for line in reversed(kept) if "rror" in line), last)[:300]
