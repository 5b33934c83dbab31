"""Encoding of programs as arrays: leaf vectors, positions and whole-program quantities.

Three ways in, one result: a TVM JSON (walked as it is), one operator specification, or columns of
sizes (thousands of shapes of one operator at once). The last two evaluate the shipped template of the
shape's structural class. Many scheduled programs, such as a search's population or a data set, are encoded in one call
(:func:`encode_many`). :class:`EncodedProgram` is a program that was encoded elsewhere. A GPU cannot run a store outside
of thread bindings (:func:`binding_error`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import InvalidProgramError
from cdmpp.features.ast import CompactAST
from cdmpp.features.class_features import (
    argument_bytes,
    class_features,
    output_elements,
    template,
    totals,
    useful_flops,
)
from cdmpp.features.launch_columns import recorded_ast
from cdmpp.features.leaf import ast_matrix, positions
from cdmpp.features.leaf_tables import PARTS
from cdmpp.features.schedule import schedule_matrices
from cdmpp.features.schema import COLUMN
from cdmpp.features.walk import build_ast
from cdmpp.programs.elements import LABEL_FIELDS, NARROW_FIELDS, types_label
from cdmpp.programs.operators import OperatorSpec, derived_sizes, operator_family, read_value
from cdmpp.programs.program import TensorProgram
from cdmpp.programs.query_options import Backend
from cdmpp.programs.templates import class_name, partition, size_names
from cdmpp.programs.tvm_json import HINT, Nodes, load

Array = np.ndarray[Any, np.dtype[Any]]

#: So many shapes of a structural class are encoded faster one after the other.
_ONE_BY_ONE = 2


@dataclass(frozen=True)
class EncodedPrograms:
    """Features of programs that share one leaf count."""

    leaves: Array  # float32, (programs, leaves, WIDTH), or with the schedule's columns behind them
    positions: Array  # int32, (leaves,) or (programs, leaves)
    # float64, (programs, len(PROGRAM_COLUMNS)). ``flops``: floating-point operations that the result needs (masked and
    # zero-multiplied work left out where the operator is known); ``bytes``: distinct bytes of the arguments read and
    # written; ``matrix``: 1 when most of the work is a contraction; ``work_fraction``: flops over the flops of the
    # loop nest; ``output_elements``; ``parallel_blocks``: blocks of a GPU schedule, else 0.
    totals: Array
    dtype: str  # element type of the first argument
    family: str  # ``gemm``, ``conv``, ``attention``, ``vector`` or ``tir`` (a program given as TIR)
    structure: str = ""  # structural class of operators (:mod:`cdmpp.programs.templates`); "" where there is none
    # int64, (programs, size names of the operator): with the structure they give features of another element type.
    sizes: Array | None = None

    def __len__(self) -> int:
        return len(self.leaves)

    @property
    def types(self) -> str:
        """Element types as one text (:func:`cdmpp.programs.elements.types_label`)."""
        return structure_types(self.structure, self.dtype)

    def narrow(self, width: int) -> EncodedPrograms:
        """The same without columns from ``width`` on."""
        if self.leaves.shape[2] <= width:
            return self
        return replace(self, leaves=self.leaves[:, :, :width])

    @classmethod
    def join(cls, parts: Sequence[EncodedPrograms]) -> EncodedPrograms:
        """Programs of ``parts``, which is not empty and of one leaf count, width, type and family."""
        first = parts[0]
        if len(parts) == 1:
            return first
        counted = ((p, len(p) if p.positions.ndim == 1 else 1) for p in parts)
        where = np.concatenate([p.positions.reshape(-1, p.leaves.shape[1]).repeat(n, 0) for p, n in counted])
        leaves, totals = (np.concatenate([getattr(p, name) for p in parts]) for name in ("leaves", "totals"))
        if len({p.structure for p in parts}) > 1:
            return cls(leaves, where, totals, first.dtype, first.family)
        sizes = [p.sizes for p in parts if p.sizes is not None]
        joined = np.concatenate(sizes) if len(sizes) == len(parts) else None
        return cls(leaves, where, totals, first.dtype, first.family, first.structure, joined)

    def row(self, index: int) -> EncodedPrograms:
        """One program, as arrays of its own."""
        row = slice(index, index + 1)
        where = self.positions if self.positions.ndim == 1 else self.positions[row].copy()
        sizes = None if self.sizes is None else self.sizes[row].copy()
        leaves, totals = self.leaves[row].copy(), self.totals[row].copy()
        return EncodedPrograms(leaves, where, totals, self.dtype, self.family, self.structure, sizes)


@lru_cache(maxsize=4096)
def structure_types(structure: str, dtype: str) -> str:
    """Element types of programs with this structural class; ``dtype`` where there is none."""
    flags = (flag.partition("=") for flag in structure.split(":")[2:])
    return types_label(dtype, {name: value for name, _, value in flags})


_size_names = lru_cache(maxsize=None)(size_names)


def encode_tvm_json(text: str | bytes, function: str | None = None, *, schedule: bool = False) -> EncodedPrograms:
    """Features of one program given as TVM JSON.

    ``function``: which PrimFunc, when the module has several.
    ``schedule``: with the columns of :mod:`cdmpp.features.schedule` behind each leaf's own.
    Raises InvalidProgramError: the program cannot be encoded; the message gives the reason.
    """
    walk = recorded_ast if schedule else build_ast
    return encode_ast(walk(*load(text), function=function), schedule=schedule)


def encode_ast(ast: CompactAST, *, schedule: bool = False) -> EncodedPrograms:
    """Features of one concrete compact AST.

    Raises InvalidProgramError: its sizes overflow, or an element type is not one.
    """
    return encode_asts([ast], schedule=schedule)[0]


def encode_asts(asts: Sequence[CompactAST], *, schedule: bool = False) -> list[EncodedPrograms]:
    """Features of concrete compact ASTs, each as :func:`encode_ast` gives it.

    Raises InvalidProgramError: sizes of one overflow, or an element type is not one.
    """
    try:
        encoded = []
        schedules = schedule_matrices(asts) if schedule else [None] * len(asts)
        for ast, further in zip(asts, schedules, strict=True):
            matrix = ast_matrix(ast)[None]
            program = totals(matrix, argument_bytes(ast), output_elements(ast))
            if further is not None:
                matrix = np.concatenate([matrix, further[None]], axis=2)
            if not np.isfinite(matrix).all():
                raise OverflowError("a quantity is larger than any number")
            dtype = next((b.dtype for b in ast.buffers if b.is_parameter), ast.leaves[0].compute_dtype)
            encoded.append(EncodedPrograms(matrix, positions(ast), program, dtype, "tir"))
    except InvalidProgramError:
        raise
    except (ArithmeticError, TypeError, ValueError) as error:
        raise InvalidProgramError(f"the program's sizes make no sense ({error})", hint=HINT) from None
    return encoded


def operator_ast(spec: OperatorSpec) -> CompactAST:
    """Compact AST of an operator specification, from its template (sizes as integers)."""
    return build_ast(*template(spec.structural_class()), bindings=spec.bindings())


def encode_operator(spec: OperatorSpec) -> EncodedPrograms:
    """Features of one operator specification."""
    sizes = {name: np.array([value], dtype=np.int64) for name, value in spec.bindings().items()}
    return _encode_class(spec.structural_class(), spec.operator, spec.dtype, sizes, 1)


def encode_operators(specs: Sequence[OperatorSpec]) -> list[EncodedPrograms | InvalidProgramError]:
    """Features of many operator specifications, each as :func:`encode_operator` gives it.

    Specifications that share a lowered structure are encoded together: a thousand shapes of one operator take
    little longer than one.

    The list is in the order of ``specs``, with an error in place of features that are not finite.
    Raises UnsupportedOperatorError: an operator does not exist for its element type.
    """
    classes: dict[str, list[int]] = {}
    for position, spec in enumerate(specs):
        classes.setdefault(spec.structural_class(), []).append(position)
    parts: dict[int, EncodedPrograms] = {}
    sound: dict[int, bool] = {}
    for name, members in classes.items():
        if len(members) <= _ONE_BY_ONE:
            parts |= {position: encode_operator(specs[position]) for position in members}
            sound |= {position: bool(finite(parts[position])[0]) for position in members}
            continue
        first, rows = specs[members[0]], [specs[position].bindings() for position in members]
        sizes = {field: np.array([row[field] for row in rows], dtype=np.int64) for field in rows[0]}
        joined = _encode_class(name, first.operator, first.dtype, sizes, len(members))
        parts |= {position: joined.row(row) for row, position in enumerate(members)}
        sound |= zip(members, finite(joined).tolist(), strict=True)
    return [parts[i] if sound[i] else overflow(spec.text()) for i, spec in enumerate(specs)]


def finite(encoded: EncodedPrograms) -> Array:
    """Programs whose features are numbers, (programs,) bool: absurd sizes overflow."""
    return np.asarray(np.isfinite(encoded.leaves).all(axis=(1, 2)) & np.isfinite(encoded.totals).all(axis=1))


def overflow(name: str) -> InvalidProgramError:
    """The error for a program whose features are not finite."""
    return InvalidProgramError(f"{name}: its sizes overflow the features", hint="no loop nest of this size can run")


def encode_shapes(
    operator: str, dtype: str, fixed: Mapping[str, Any], sizes: Mapping[str, Array]
) -> Iterator[tuple[Array, EncodedPrograms]]:
    """Features of many shapes of one operator: for each structural class which shapes (indices), and their features.

    ``fixed``: the structural fields (``bias``, ``direction``, ...). ``sizes``: every integer field, one element per
    shape; already checked.
    """
    # A structural field may be a size too: the number of inputs of a concatenation.
    whole = {name: value for name, value in fixed.items() if isinstance(value, int) and not isinstance(value, bool)}
    for flags, rows in partition(operator, fixed, sizes):
        bindings = {name: np.asarray(values[rows], dtype=np.int64) for name, values in sizes.items()}
        bindings |= {name: np.full(len(rows), value) for name, value in whole.items()}
        bindings |= derived_sizes(operator, {**flags, **bindings})
        yield rows, _encode_class(class_name(operator, dtype, flags), operator, dtype, bindings, len(rows))


def _encode_class(name: str, operator: str, dtype: str, sizes: Mapping[str, Array], count: int) -> EncodedPrograms:
    """Shapes of one structural class."""
    matrix, totals, places = class_features(name).compute(sizes, count)
    useful = useful_flops(operator, sizes, name)
    if useful is not None:
        totals[:, 3] = np.minimum(useful / np.maximum(totals[:, 0], 1.0), 1.0)
        totals[:, 0] = useful
    stacked = np.stack([sizes[field] for field in _size_names(operator)], axis=1)
    return EncodedPrograms(matrix, places, totals, dtype, operator_family(operator), name, stacked)


def encode_as(structure: str, dtype: str, sizes: Array) -> EncodedPrograms:
    """Features of operators in one other element type, from :attr:`EncodedPrograms.structure` and ``sizes``.

    Narrower types of weights and caches, and scales, are left out.

    Raises UnsupportedOperatorError: there is no such structural class.
    """
    operator, _, *flags = structure.split(":")
    flags = [flag for flag in flags if flag.partition("=")[0] not in NARROW_FIELDS]
    names = _size_names(operator)
    columns = {name: sizes[:, i].astype(np.int64) for i, name in enumerate(names)}
    values = {name: read_value(value) for name, _, value in (flag.partition("=") for flag in flags)}
    columns |= derived_sizes(operator, {**values, **columns})
    return _encode_class(":".join([operator, dtype, *flags]), operator, dtype, columns, len(sizes))


#: :attr:`EncodedProgram.operator` of a program given as TIR.
TIR = "tir"


@dataclass(frozen=True, eq=False)
class EncodedProgram:
    """Stands in place of a :class:`~cdmpp.programs.program.TensorProgram` in a query.

    Texts of programs that nobody vouches for are parsed in a process of their own; this is what comes back.
    The features are trusted as they are.
    """

    name: str  # for people, as a TensorProgram's
    hash: str  # the TensorProgram's structural hash: answers are remembered by it
    backend: Backend
    operator: str  # the operator's name; "tir" for a program given as TIR
    # One row; of TIR with the schedule's columns (:mod:`cdmpp.features.schedule`), which a network that does not read
    # them leaves out.
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


#: A program: TVM JSON, its nodes and root as :func:`cdmpp.programs.tvm_json.load` returns them, or its compact AST.
Source = str | bytes | tuple[Nodes, int] | CompactAST
#: Programs from which on importing numba pays, and programs that are computed at once.
COMPILE_FROM, AT_ONCE = 32, 512


def encode_many(programs: Sequence[Source], *, schedule: bool = False) -> list[EncodedPrograms | InvalidProgramError]:
    """Features of programs, each exactly as :func:`~cdmpp.features.encode.encode_tvm_json` gives it.

    ``programs``: of one PrimFunc each.
    ``schedule``: with the columns of :mod:`cdmpp.features.schedule` behind each leaf's own.
    The list is in the order of ``programs``, with an error in place of a program that cannot be encoded.
    """
    if schedule and len(programs) >= COMPILE_FROM:
        PARTS.compile()
    encoded: list[EncodedPrograms | InvalidProgramError] = []
    for start in range(0, len(programs), AT_ONCE):
        encoded += _encode(programs[start : start + AT_ONCE], schedule)
    return encoded


def _encode(programs: Sequence[Source], schedule: bool) -> list[EncodedPrograms | InvalidProgramError]:
    encoded: list[EncodedPrograms | InvalidProgramError | None] = [None] * len(programs)
    asts: dict[int, CompactAST] = {}
    walk = recorded_ast if schedule else build_ast
    for place, program in enumerate(programs):
        try:
            if not isinstance(program, CompactAST):
                program = walk(*(program if isinstance(program, tuple) else load(program)))
            asts[place] = program
        except InvalidProgramError as error:
            encoded[place] = error
    try:
        joined = encode_asts(list(asts.values()), schedule=schedule)
        found_by_place: dict[int, EncodedPrograms | InvalidProgramError] = dict(zip(asts, joined, strict=True))
    except InvalidProgramError:
        # One program must not fail the others: each by itself says what is wrong with it.
        found_by_place = {place: _alone(ast, schedule) for place, ast in asts.items()}
    return [found_by_place[place] if each is None else each for place, each in enumerate(encoded)]


def _alone(ast: CompactAST, schedule: bool) -> EncodedPrograms | InvalidProgramError:
    try:
        return encode_ast(ast, schedule=schedule)
    except InvalidProgramError as error:
        return error


#: Element types of operands by their bytes; the features do not tell the two types of 16 bits apart.
_DTYPES = {4: "float32", 2: "float16 (or bfloat16)"}


def unbound(leaves: Array, padding: Array | None = None) -> Array:
    """Programs with a store outside of any thread binding, (programs,) bool.

    ``padding``: leaves that are not the program's.
    """
    loose = leaves[:, :, COLUMN["is_gpu"]] == 0
    return np.asarray((loose if padding is None else loose & ~padding).any(axis=1))


def unbound_error(name: str, device: str, leaves: Array | None = None) -> InvalidProgramError:
    """The error for a program that a GPU cannot run; ``leaves`` (leaves, columns) are its features."""
    product = None if leaves is None else product_text(leaves)
    instead = f": {product}" if product else ", with its sizes (cdmpp support lists the operators)"
    return InvalidProgramError(
        f"{name}: it has stores outside of thread bindings, and {device} is a GPU, which cannot run it",
        hint=f"bind its loops to blockIdx and threadIdx, or pass the operator instead{instead}",
    )


def product_text(leaves: Array) -> str | None:
    """The operator of a program with one matrix product, such as ``linear:m=512,n=512,k=1024,dtype=float32``.

    None for several products, for convolutions and for other programs.
    """
    products = leaves[leaves[:, COLUMN["is_contraction"]] == 1]
    if len(products) != 1:
        return None

    def value(name: str) -> float:
        return float(np.exp2(products[0, COLUMN[name]].astype(np.float64)) - 1.0)

    batch, m, n, k = (round(value(f"contraction_{name}")) for name in ("batch", "m", "n", "k"))
    element_bytes = round(value("read_0_element_bytes"))
    dtype = _DTYPES.get(element_bytes)
    # A convolution reads less than its operands have elements, and the single precision of features blurs long axes.
    operands = sorted((batch * m * k * element_bytes, batch * k * n * element_bytes))
    read = sorted((value("read_0_unique_bytes"), value("read_1_unique_bytes")))
    if dtype is None or not np.allclose(operands, read, rtol=1e-4):
        return None
    sizes = f"m={m},n={n},k={k},dtype={dtype}"
    return f"linear:{sizes}" if batch == 1 else f"bmm:batch={batch},{sizes}"


def binding_error(
    program: TensorProgram | EncodedProgram, features: EncodedPrograms, device: DeviceSpec
) -> InvalidProgramError | None:
    """The error for TIR that the device cannot run as scheduled; None for any other program.

    Operators are not affected: their features come from a lowered structure without a schedule.
    """
    if device.kind != "gpu" or program.backend != "tvm" or operator_name(program) != TIR:
        return None
    leaves = features.leaves
    return unbound_error(program.name, device.name, leaves[0]) if unbound(leaves)[0] else None
