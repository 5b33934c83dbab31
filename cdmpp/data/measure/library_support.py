"""Operators that PyTorch runs as one call, without importing PyTorch."""

from __future__ import annotations

from cdmpp.programs.operators import (
    Attention,
    BatchMatmul,
    BatchNorm,
    Binary,
    Conv2d,
    Copy,
    Embedding,
    Linear,
    OperatorSpec,
    Pool2d,
    RowWise,
    Scalar,
    SiluAndMul,
    Unary,
)

TORCH_DTYPES = ("float32", "float16", "bfloat16", "int8")
_WITH_CALL = (
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
#: Fields that only serving libraries and vendors' own interfaces have.
_UNMEASURED = ("weight_dtype", "scaling", "kv_dtype", "layout", "accumulate", "out_dtype")


def missing_call(spec: OperatorSpec) -> str | None:
    """Return why PyTorch has no call for an operator, or None if :func:`.library_calls.make_call` makes one."""
    if spec.dtype not in TORCH_DTYPES:
        return f"PyTorch is not measured with {spec.dtype}"
    for name in _UNMEASURED:
        if getattr(spec, name, None) is not None:
            return f"PyTorch has no {spec.operator} with {name}={getattr(spec, name)} as one call"
    if not isinstance(spec, _WITH_CALL):
        return f"{spec.operator} has no PyTorch call yet"
    if spec.dtype == "int8" and not isinstance(spec, Linear | Copy):
        return f"PyTorch has no int8 kernel for {spec.operator}"
    if spec.dtype == "int8" and isinstance(spec, Linear) and spec.bias:
        return "PyTorch has no int8 product with a bias"
    if isinstance(spec, Attention) and spec.heads % spec.kv_heads:
        return f"PyTorch shares each key head among equally many heads, not {spec.heads} on {spec.kv_heads}"
    return None
