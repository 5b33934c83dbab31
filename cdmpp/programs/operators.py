"""Operator specifications: one library call of a framework, by its sizes.

Every operator of the public tables and of the ONNX front end is one small frozen model here. A
specification is a plain value: it has its sizes, its canonical text (``linear:m=512,...``), its
structural class (which lowered TIR it shares with other sizes) and nothing about TVM.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from cdmpp.errors import InvalidProgramError, UnsupportedOperatorError

#: Other spellings of element types and operators, as texts and requests may use them.
DTYPE_ALIASES = {
    **dict.fromkeys(("fp32", "f32", "float"), "float32"),
    **dict.fromkeys(("fp16", "f16", "half"), "float16"),
    **dict.fromkeys(("bf16",), "bfloat16"),
    **dict.fromkeys(("i8", "s8"), "int8"),
}
PRODUCT_ALIASES = ("matmul", "gemm", "mm")


def _canonical_dtype(value: Any) -> Any:
    """A known spelling's element type; "torch.float16" is float16."""
    if not isinstance(value, str):
        return value
    name = value.removeprefix("torch.")
    return DTYPE_ALIASES.get(name, name)


DTypeName = Literal["float32", "float16", "bfloat16", "int8"]
DType = Annotated[DTypeName, BeforeValidator(_canonical_dtype)]
DTYPE_BYTES: dict[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}

#: Largest size of one axis. Products of axes stay exact in float64, which the features are made in.
MAX_EXTENT = 2**31 - 1
#: Largest accepted tensor or iteration count; a larger one is probably a typing error.
MAX_ELEMENTS = 2**48
#: Maximum length of an operator's text in a request, and of a part of it in a message.
MAX_PROGRAM_TEXT, MAX_SHOWN = 2000, 200


def _whole_number(value: Any) -> Any:
    """JSON has one number type: 512.0 is the integer 512; 512.5 and NaN are not integers."""
    if isinstance(value, float) and math.isfinite(value) and value.is_integer():
        return int(value)
    return value


Extent = Annotated[int, BeforeValidator(_whole_number), Field(strict=True, ge=1, le=MAX_EXTENT)]
Offset = Annotated[int, BeforeValidator(_whole_number), Field(strict=True, ge=0, le=MAX_EXTENT)]
Flag = Annotated[bool, Field(strict=True)]


def output_hw(sizes: Mapping[str, Any]) -> tuple[Any, Any]:
    """Output height and width of conv2d and of the pools, from their sizes as integers or as arrays."""

    def along(axis: str) -> Any:
        span = (sizes["k" + axis] - 1) * sizes.get("dil_" + axis, 1) + 1
        return (sizes[axis] + 2 * sizes["pad_" + axis] - span) // sizes["stride_" + axis] + 1

    return along("h"), along("w")


class OperatorSpec(BaseModel):
    """One operator with its sizes. Extents are counts of elements, at least 1."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    operator: str
    dtype: DType = "float32"

    #: Fields that select another lowered structure instead of another size.
    structural_fields: ClassVar[tuple[str, ...]] = ()

    def check(self) -> None:
        """Raise :class:`InvalidProgramError` when the sizes contradict each other."""
        elements = self.elements()
        if elements > MAX_ELEMENTS:
            raise InvalidProgramError(
                f"{self.operator}: its largest tensor or loop nest has {elements:.3g} elements",
                hint=f"at most 2^48 = {MAX_ELEMENTS:.3g}; check the sizes",
            )

    def elements(self) -> int:
        """An upper bound on any tensor of the operator (for sanity checks only)."""
        product = 1
        for name, value in self.sizes().items():
            if name not in ("past_len",):
                product *= max(int(value), 1)
        return product

    def sizes(self) -> dict[str, int]:
        """The integer fields, in declaration order: what a template's symbols are bound to."""
        return {
            name: value
            for name in type(self).model_fields
            if isinstance(value := getattr(self, name), int) and not isinstance(value, bool)
        }

    def structural_class(self) -> str:
        """Key of the lowered structure that this specification shares with other sizes."""
        flags = structural_flags(self.operator, self.model_dump())
        return ":".join([self.operator, self.dtype, *(f"{k}={v}" for k, v in flags.items())])

    def canonical(self) -> dict[str, Any]:
        """All fields, defaults filled in, in a fixed order: the identity of the program."""
        return self.model_dump()

    def hash(self) -> str:
        """Structural hash (hex, 32 characters): equal for equal programs, whatever their source."""
        text = json.dumps(self.canonical(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(b"operator\0" + text.encode()).hexdigest()[:32]

    def text(self) -> str:
        """Short text that :func:`parse_operator` reads back; fields at their default are left out."""
        shown = []
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if name != "operator" and (name == "dtype" or value != field.default):
                shown.append(f"{name}={str(value).lower() if isinstance(value, bool) else value}")
        return f"{self.operator}:{','.join(shown)}"


class Linear(OperatorSpec):
    """``y[m, n] = x[m, k] @ w[n, k].T (+ bias[n])``: a dense layer or a plain GEMM."""

    operator: Literal["linear"] = "linear"
    m: Extent
    n: Extent
    k: Extent
    bias: Flag = False
    structural_fields: ClassVar[tuple[str, ...]] = ("bias",)


class BatchMatmul(OperatorSpec):
    """``y[batch, m, n] = a[batch, m, k] @ b[batch, k, n]``."""

    operator: Literal["bmm"] = "bmm"
    batch: Extent
    m: Extent
    n: Extent
    k: Extent


class Conv2d(OperatorSpec):
    """2-D convolution, NCHW, written as the forward problem whatever the direction."""

    operator: Literal["conv2d"] = "conv2d"
    direction: Literal["fwd", "bwd_data", "bwd_weight"] = "fwd"
    n: Extent
    c_in: Extent
    h: Extent
    w: Extent
    c_out: Extent
    kh: Extent
    kw: Extent
    stride_h: Extent = 1
    stride_w: Extent = 1
    pad_h: Offset = 0
    pad_w: Offset = 0
    dil_h: Extent = 1
    dil_w: Extent = 1
    groups: Extent = 1
    bias: Flag = False
    structural_fields: ClassVar[tuple[str, ...]] = ("direction", "bias")

    def output_hw(self) -> tuple[int, int]:
        """Height and width of the forward output."""
        return output_hw(self.sizes())

    def check(self) -> None:
        if self.c_in % self.groups or self.c_out % self.groups:
            raise InvalidProgramError(
                f"conv2d: groups={self.groups} divides neither or only one of c_in={self.c_in} and c_out={self.c_out}",
                hint="groups must divide both channel counts",
            )
        if min(self.output_hw()) < 1:
            raise InvalidProgramError(
                f"conv2d: the kernel ({self.kh}x{self.kw}, dilation {self.dil_h}x{self.dil_w}) is larger "
                f"than the padded input ({self.h + 2 * self.pad_h}x{self.w + 2 * self.pad_w})",
                hint="enlarge h, w or the padding, or shrink the kernel",
            )
        if self.bias and self.direction != "fwd":
            raise InvalidProgramError("conv2d: a backward direction has no bias", hint="leave bias out")
        super().check()

    def elements(self) -> int:
        oh, ow = self.output_hw()
        per_group = self.c_in // self.groups
        padded = self.n * self.c_in * (self.h + 2 * self.pad_h) * (self.w + 2 * self.pad_w)
        return max(
            padded,
            self.c_out * per_group * self.kh * self.kw,
            self.n * self.c_out * oh * ow * per_group * self.kh * self.kw,
        )


class _Rows(OperatorSpec):
    """An operator on a ``[rows, cols]`` tensor."""

    rows: Extent
    cols: Extent


class Unary(_Rows):
    """Element by element on one tensor."""

    operator: Literal["relu", "gelu", "tanh", "sigmoid", "silu", "exp", "sqrt", "erf", "abs", "neg", "log"]


class Binary(_Rows):
    """Elementwise operation on ``inputs`` tensors of one shape (default: two)."""

    operator: Literal["add", "sub", "mul", "div", "pow", "maximum", "minimum"]
    inputs: Annotated[int, BeforeValidator(_whole_number), Field(strict=True, ge=2, le=4)] = 2
    structural_fields: ClassVar[tuple[str, ...]] = ("inputs",)


class Scalar(_Rows):
    """Element by element with one scalar."""

    operator: Literal["add_scalar", "mul_scalar", "div_scalar", "pow_scalar"]


class RowWise(_Rows):
    """A reduction along each row, then (but for ``reduce_mean``) a pass over it."""

    operator: Literal["softmax", "layernorm", "rmsnorm", "reduce_mean"]


class SiluAndMul(_Rows):
    """``silu(x[:, :cols]) * x[:, cols:]``: reads ``2 * cols`` columns, writes ``cols``."""

    operator: Literal["silu_and_mul"] = "silu_and_mul"


class Copy(_Rows):
    """Data movement that touches every element once: concatenation, slice, transpose (``transposed``)."""

    operator: Literal["copy"] = "copy"
    transposed: Flag = False
    structural_fields: ClassVar[tuple[str, ...]] = ("transposed",)


class Embedding(_Rows):
    """``rows`` look-ups of ``cols`` elements each in a table of ``table_rows`` rows."""

    operator: Literal["embedding"] = "embedding"
    table_rows: Extent

    def elements(self) -> int:
        return max(self.rows, self.table_rows) * self.cols


class Pool2d(OperatorSpec):
    """2-D pooling, NCHW."""

    operator: Literal["max_pool2d", "avg_pool2d"]
    n: Extent
    c: Extent
    h: Extent
    w: Extent
    kh: Extent
    kw: Extent
    stride_h: Extent = 1
    stride_w: Extent = 1
    pad_h: Offset = 0
    pad_w: Offset = 0

    def check(self) -> None:
        if self.h + 2 * self.pad_h < self.kh or self.w + 2 * self.pad_w < self.kw:
            raise InvalidProgramError(
                f"{self.operator}: the window {self.kh}x{self.kw} is larger than the padded input",
                hint="enlarge h, w or the padding, or shrink the window",
            )
        super().check()

    def elements(self) -> int:
        padded = (self.h + 2 * self.pad_h) * (self.w + 2 * self.pad_w)
        return self.n * self.c * padded * self.kh * self.kw


class BatchNorm(OperatorSpec):
    """Inference batch normalisation, NCHW: one scale and one shift per channel."""

    operator: Literal["batch_norm"] = "batch_norm"
    n: Extent
    c: Extent
    h: Extent
    w: Extent


class Attention(OperatorSpec):
    """Fused scaled-dot-product attention with grouped heads.

    ``attention_prefill`` is causal over ``past_len + q_len`` keys, ``attention_decode`` reads a cache of
    ``past_len`` keys and adds ``q_len`` (one, usually) new ones, ``attention_encoder`` is not causal.
    """

    operator: Literal["attention_prefill", "attention_decode", "attention_encoder"]
    batch: Extent
    q_len: Extent = 1
    past_len: Offset = 0
    heads: Extent
    kv_heads: Extent
    head_dim: Extent

    def check(self) -> None:
        # A last group may be smaller than the others: libraries accept, and tables hold, 33 heads on 4.
        if self.kv_heads > self.heads:
            raise InvalidProgramError(
                f"{self.operator}: kv_heads={self.kv_heads} exceeds heads={self.heads}",
                hint="grouped-query attention shares each key head among heads / kv_heads query heads",
            )
        super().check()

    def elements(self) -> int:
        keys = self.q_len + self.past_len
        return self.batch * self.heads * self.head_dim * max(self.q_len * keys, keys)


SPEC_TYPES: tuple[type[OperatorSpec], ...] = (
    Linear,
    BatchMatmul,
    Conv2d,
    Unary,
    Binary,
    Scalar,
    RowWise,
    SiluAndMul,
    Copy,
    Embedding,
    Pool2d,
    BatchNorm,
    Attention,
)


@cache
def operator_types() -> dict[str, type[OperatorSpec]]:
    """Operator name -> its specification class."""
    table: dict[str, type[OperatorSpec]] = {}
    for spec in SPEC_TYPES:
        for name in get_args(spec.model_fields["operator"].annotation):
            table[name] = spec
    return table


def operator_family(operator: str) -> str:
    """Coarse family of an operator: ``gemm``, ``conv``, ``attention``, ``vector``."""
    if operator in ("linear", "bmm"):
        return "gemm"
    if operator == "conv2d":
        return "conv"
    return "attention" if operator.startswith("attention") else "vector"


def structural_flags(operator: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields besides operator and dtype that select the lowered structure (see :mod:`.templates`).

    ``fields`` may hold scalars or arrays of one value: only comparisons are made here.
    """
    flags: dict[str, Any] = {name: fields[name] for name in operator_types()[operator].structural_fields}
    if operator == "conv2d":
        flags["padded"] = bool(fields["pad_h"] > 0 or fields["pad_w"] > 0)
        flags["grouped"] = bool(fields["groups"] > 1)
    elif operator in ("max_pool2d", "avg_pool2d"):
        flags["padded"] = bool(fields["pad_h"] > 0 or fields["pad_w"] > 0)
    elif operator.startswith("attention"):
        # One key head for all is another structure: its keys do not depend on the head at all.
        kv, heads = fields["kv_heads"], fields["heads"]
        flags["kv"] = "same" if kv == heads else "one" if kv == 1 else "grouped"
        # A single query sees every key: there is nothing to mask.
        flags["causal"] = operator == "attention_prefill" and bool(fields["q_len"] > 1)
    return flags


def make_operator(fields: Mapping[str, Any]) -> OperatorSpec:
    """Build and check a specification from its fields.

    Raises
    ------
    UnsupportedOperatorError
        ``operator`` is not one of :func:`operator_types` (the hint lists them).
    InvalidProgramError
        A field is missing, unknown, of the wrong type, out of range, or contradicts another.
    """
    name = fields.get("operator")
    if isinstance(name, str) and name in PRODUCT_ALIASES:
        name = "bmm" if "batch" in fields else "linear"
        fields = {**fields, "operator": name}
    if not isinstance(name, str) or name not in operator_types():
        raise _unknown_operator(name)
    kind = operator_types()[name]
    try:
        spec = kind.model_validate(dict(fields))
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc'])) or name}: {e['msg']}" for e in error.errors()[:4])
        wanted = ", ".join(
            f"{field}{'' if info.is_required() else f'={info.default}'}"
            for field, info in kind.model_fields.items()
            if field != "operator"
        )
        raise InvalidProgramError(f"{name}: {problems}", hint=f"{name} takes {wanted}") from None
    spec.check()
    return spec


def _unknown_operator(name: Any) -> UnsupportedOperatorError:
    known = sorted(operator_types())
    nearest = difflib.get_close_matches(name[:64], known, n=3) if isinstance(name, str) else []
    meant = f"; did you mean {' or '.join(nearest)}?" if nearest else ""
    return UnsupportedOperatorError(f"operator {name!r} is not supported{meant}", hint="one of: " + ", ".join(known))


def parse_operator(text: str) -> OperatorSpec:
    """Read ``linear:m=512,n=4096,k=1024,dtype=float16``.

    Raises
    ------
    UnsupportedOperatorError, InvalidProgramError
        As :func:`make_operator`; also when the text is not ``name:key=value,...``.
    """
    return make_operator(operator_fields(text))


def operator_fields(text: str, read: Callable[[str], Any] | None = None) -> dict[str, Any]:
    """Fields of an operator's text; its values are not checked, so they may be expressions (``m=batch*128``).

    Parameters
    ----------
    text : str
    read : callable, optional
        Reads a value; default: :func:`read_value`.

    Raises
    ------
    InvalidProgramError
        The text is not ``name:key=value,...``.
    """
    name, _, rest = text.partition(":")
    fields: dict[str, Any] = {"operator": name.strip()}
    for part in filter(None, map(str.strip, _split(rest))):
        key, equals, value = (p.strip() for p in part.partition("="))
        if not equals or key in fields:
            raise InvalidProgramError(
                f"{text[:MAX_SHOWN]!r}: {part[:MAX_SHOWN]!r} is not key=value, or repeats a key",
                hint="write an operator as linear:m=512,n=4096,k=1024,dtype=float16",
            )
        fields[key] = (read or read_value)(value)
    return fields


def _split(text: str) -> Iterator[str]:
    """Parts between commas; commas between brackets are arguments of min and max."""
    start, depth = 0, 0
    for at, character in enumerate(text):
        if character == "," and depth == 0:
            yield text[start:at]
            start = at + 1
        else:
            depth += (character == "(") - (character == ")")
    yield text[start:]


def read_value(text: str) -> Any:
    """A value as it is written in text: a flag, a number, else the text itself."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
