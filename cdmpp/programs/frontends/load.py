"""Read whatever a user names as programs: operator text, a file, a folder, an item of a request."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cdmpp.errors import InvalidProgramError
from cdmpp.programs.frontends.graph import ProgramGraph
from cdmpp.programs.operators import PRODUCT_ALIASES, operator_types
from cdmpp.programs.program import TensorProgram
from cdmpp.programs.query_options import BACKENDS, Backend
from cdmpp.utils.files import read_text

FORMS = (
    "an operator (linear:m=512,n=4096,k=1024,dtype=float16), model.onnx, program.py (TVMScript), "
    "program.json (TVM JSON, of TIR or of a Relax module), program.pt2 (torch.export.save), or a folder with "
    "database_workload.json (MetaSchedule)"
)
#: Text files beyond this are no programs.
MAX_TEXT_BYTES = 32 * 1024 * 1024


def load_programs(
    source: str | Path, backend: Backend | None = None, dims: Mapping[str, int] | None = None
) -> ProgramGraph:
    """Programs of an operator text, a file or a folder.

    Parameters
    ----------
    source : str or Path
        An operator as text, or the path of an ``.onnx``, ``.py`` (TVMScript) or ``.json`` (TVM JSON)
        file, a ``.pt2`` file (``torch.export.save``; code in it is never run), or
        of a MetaSchedule database folder. A ``.json`` file with a Relax function ``main`` is lowered and
        fused.
    backend : {"library", "tvm"}, optional
        What runs the programs. Default: "library" for operators and ONNX, "tvm" for the others. With "tvm" an
        ONNX model is lowered and fused by TVM; otherwise each kernel that a framework launches is one.
    dims : mapping of str to int, optional
        Sizes of an ONNX model's dynamic dimensions, e.g. ``{"batch": 1}``.

    Returns
    -------
    ProgramGraph

    Raises
    ------
    InvalidProgramError
        Neither a known form nor a readable file; the hint lists the forms.
    """
    if backend is not None and backend not in BACKENDS:
        raise InvalidProgramError(f"backend {backend!r} is unknown", hint="one of: " + ", ".join(BACKENDS))
    text = str(source)
    path = Path(text)
    try:
        exists = path.exists()
    except (OSError, ValueError):  # longer than a path can be, or with a null byte
        exists = False
    if not exists:
        name, colon, _ = text.partition(":")
        is_operator = isinstance(source, str) and colon and name.strip() in (*operator_types(), *PRODUCT_ALIASES)
        if is_operator:
            _no_dims(dims, "an operator")
        if is_operator or (colon and "=" in text):  # meant as an operator: let the parser list the known ones
            return ProgramGraph.of([TensorProgram.from_operator(text, backend or "library")], text)
        raise InvalidProgramError(f"{text!r} is neither a file nor an operator", hint=f"pass {FORMS}")
    if path.is_dir():
        _no_dims(dims, "a MetaSchedule database")
        if not (path / "database_workload.json").is_file():
            raise InvalidProgramError(f"{path}: a folder without database_workload.json", hint=f"pass {FORMS}")
        from cdmpp.programs.frontends.metaschedule import metaschedule_graph

        return metaschedule_graph(path, backend or "tvm")
    suffix = path.suffix.lower()
    if suffix == ".onnx":
        if backend == "tvm":
            from cdmpp.programs.frontends.relax_programs import onnx_tvm_graph

            return onnx_tvm_graph(path, dims)
        from cdmpp.programs.frontends.onnx_library import onnx_library_graph

        return onnx_library_graph(path, dims)
    _no_dims(dims, "TIR")
    if suffix == ".pt2":
        from cdmpp.programs.frontends.relax_programs import read_exported, torch_graph

        if backend == "tvm":
            return torch_graph(read_exported(path), path.name)
        from cdmpp.programs.frontends.torch_module import exported_library_graph

        return exported_library_graph(read_exported(path), path.name)
    if suffix == ".json":
        return _tvm_json(path, backend)
    if suffix == ".py":
        from cdmpp.programs.frontends.tir import programs_from_tvmscript

        return ProgramGraph.of(programs_from_tvmscript(_read(path), backend or "tvm"), path.name)
    raise InvalidProgramError(f"{path.name}: files of this kind are not read", hint=f"pass {FORMS}")


def _no_dims(dims: Mapping[str, int] | None, what: str) -> None:
    if dims:
        raise InvalidProgramError(
            f"sizes of dimensions ({', '.join(dims)}) say nothing about {what}",
            hint="they are for ONNX models with dynamic dimensions",
        )


def _read(path: Path) -> str:
    try:
        text = read_text(path, MAX_TEXT_BYTES)
    except OSError as error:
        raise InvalidProgramError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise InvalidProgramError(f"{path.name}: not a text file (UTF-8)", hint=f"pass {FORMS}") from None
    if not text.strip():
        raise InvalidProgramError(f"{path.name}: the file is empty", hint=f"pass {FORMS}")
    return text


def _tvm_json(path: Path, backend: Backend | None) -> ProgramGraph:
    """TVM JSON of TIR is read in plain Python: TVM need not be installed. A Relax module needs it."""
    from cdmpp.programs.tvm_json import has_relax_main, load, prim_funcs

    text = _read(path)
    nodes, root = load(text)
    if has_relax_main(nodes, root):
        if backend == "library":
            raise InvalidProgramError(
                f"{path.name}: its programs are those that TVM makes of it",
                hint="leave the backend out; for library kernels export the network to ONNX",
            )
        from cdmpp.programs.frontends.relax_programs import relax_json_graph

        return relax_json_graph(text, path.name)
    names = list(prim_funcs(nodes, root))
    if not names:
        raise InvalidProgramError(f"{path.name}: the module has no PrimFunc", hint=f"pass {FORMS}")
    several = len(names) > 1
    programs = [
        TensorProgram.from_tvm_json(text, backend or "tvm", name, function=name if several else None) for name in names
    ]
    return ProgramGraph.of(programs, path.name)


def program_from_request(program: Any, backend: Backend | None = None) -> TensorProgram:
    """Make a program from an operator, its fields, its text, ``{"tvm_json": text}`` or ``{"tvmscript": text}``.

    ``program``: as JSON gives it, or an object of Python; a :class:`TensorProgram` is returned as it is.
    ``backend``: what runs the program. Default: "library" for an operator, "tvm" for TIR.
    Raises InvalidProgramError or UnsupportedOperatorError: not one of the four forms, or not a valid program.
    Raises MissingDependencyError: it is TVMScript, and TVM is not installed; the other forms do not need it.
    """
    if isinstance(program, TensorProgram):
        return program
    if isinstance(program, Mapping) and set(program) == {"tvmscript"}:
        text = program["tvmscript"]
        if isinstance(text, str):
            from cdmpp.programs.frontends.tir import program_from_tvmscript

            return program_from_tvmscript(text, backend or "tvm")
    return TensorProgram.from_request(program, backend)
