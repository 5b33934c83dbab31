"""What the lowering of all operators shares: element types, casts, constants."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cdmpp.errors import MissingDependencyError, install_hint
from cdmpp.programs.templates import TVM_NAMES, WEIGHT_DTYPE

try:
    import tvm as tvm
    from tvm import te as te
    from tvm import topi as topi
except ImportError as error:  # pragma: no cover - depends on the installation
    raise MissingDependencyError("lowering a program needs TVM", hint=install_hint("tvm")) from error

Sizes = Mapping[str, Any]
#: A constant whose value no feature depends on stands for 1/cols, 1/sqrt(head_dim) and the like.
FACTOR = 0.125
SLOPE = 0.7978845608
#: Types of activations that a program makes of wider ones before it multiplies.
NARROW = ("int8", "float8_e4m3", "float4_e2m1", WEIGHT_DTYPE)


def tvm_dtype(dtype: str) -> str:
    """TVM's name of an element type; tfloat32 is stored as float32."""
    return "float32" if dtype == "tfloat32" else TVM_NAMES.get(dtype, dtype)


def dtype_of(value: Any) -> str:
    """Element type of a tensor, a tensor slice or a scalar expression (three spellings in TVM 0.27)."""
    return str(value.dtype) if hasattr(value, "dtype") else str(value.ty.dtype)


def accumulator(*dtypes: str) -> str:
    """Type in which products of elements of these types are added."""
    if all("int" in name for name in dtypes):
        return "int32"
    return "float64" if "float64" in dtypes else "float32"


def cast(value: Any, dtype: str) -> Any:
    """The value in another type; the same where it has that type."""
    return value if dtype_of(value) == dtype else value.astype(dtype)


def wide(value: Any, dtype: str) -> Any:
    """A value of type ``dtype`` as it is added up."""
    return cast(value, accumulator(dtype))


def as_float(value: Any) -> Any:
    """Transcendental functions of half and integer types go through float32."""
    return cast(value, "float32")


def const(value: float, dtype: str) -> Any:
    """A constant of a type's accumulator."""
    kind = accumulator(dtype)
    return te.const(int(value) or 1, kind) if kind == "int32" else te.const(value, kind)


def narrow(tensor: Any, dtype: str) -> Any:
    """A tensor in another type, by a pass of its own."""
    return tensor if dtype_of(tensor) == tvm_dtype(dtype) else topi.cast(tensor, tvm_dtype(dtype))


def written(dtype: str) -> str:
    """Type in which a product of activations of this type is written: no result has 8-bit or 4-bit floats."""
    return "bfloat16" if dtype.startswith(("float8", "float4")) else dtype


def ceil_divide(size: Any, by: Any) -> Any:
    """The quotient, rounded up."""
    return te.floordiv(size + by - 1, by)
