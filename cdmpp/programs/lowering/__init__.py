"""Operator specifications lowered to TIR through TVM's tensor expressions and topi.

The sizes may be integers (one program) or symbolic variables named like the specification's fields and derived
sizes (a structural class, whose TIR is shipped as a template). Half types are read as they are, computed in
float32 and written back, int8 accumulates in int32: what the libraries do.

This package imports TVM; :mod:`cdmpp.programs.templates` is what the rest of the package uses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from cdmpp.errors import UnsupportedOperatorError
from cdmpp.programs.lowering import attention, products, vectors
from cdmpp.programs.lowering.common import Sizes, te, tvm, tvm_dtype
from cdmpp.programs.operators import OperatorSpec, structural_flags

__all__ = ["lower", "lower_class", "to_json"]

Builder = Callable[[Sizes, str, Sizes], list[Any]]
#: Builders that know the narrow types by the names of the specifications.
_PRODUCTS: dict[str, Builder] = {
    "linear": products.linear,
    "bmm": products.bmm,
    **dict.fromkeys(("moe", "moe_w13"), products.moe),
    "grouped_gemm": products.grouped_gemm,
    **dict.fromkeys(("attention_prefill", "attention_decode", "attention_encoder"), attention.attention),
    "attention_mixed": attention.attention_mixed,
    "attention_backward": attention.attention_backward,
    **dict.fromkeys(("mla_prefill", "mla_decode"), attention.latent_attention),
}
_OTHERS: dict[str, Builder] = {
    "conv2d": vectors.conv2d,
    **dict.fromkeys(("max_pool2d", "avg_pool2d"), vectors.pool2d),
    "batch_norm": vectors.batch_norm,
    "silu_and_mul": vectors.silu_and_mul,
    "copy": vectors.copy,
    "embedding": vectors.embedding,
    "rotary_embedding": vectors.rotary_embedding,
    "kv_cache_save": vectors.kv_cache_save,
    "moe_gating": vectors.moe_gating,
    "moe_shuffle": vectors.moe_shuffle,
    "fused_add_rms_norm": vectors.fused_add_rms_norm,
    **dict.fromkeys(("rmsnorm_backward", "layernorm_backward"), vectors.norm_backward),
    "softmax_cross_entropy": vectors.softmax_cross_entropy,
    **dict.fromkeys(("softmax", "layernorm", "rmsnorm", "reduce_mean", "argmax"), vectors.rowwise),
    **dict.fromkeys((*vectors.UNARY, *vectors.BINARY), vectors.elementwise),
    **dict.fromkeys(("add_scalar", "mul_scalar", "div_scalar", "pow_scalar"), vectors.elementwise),
}


def _prim_func(operator: str, dtype: str, flags: Mapping[str, Any], sizes: Sizes) -> Any:
    builder = _PRODUCTS.get(operator) or _OTHERS.get(operator)
    if builder is None:
        raise UnsupportedOperatorError(f"operator {operator!r} has no lowering", hint=", ".join([*_PRODUCTS, *_OTHERS]))
    name = dtype if operator in _PRODUCTS else tvm_dtype(dtype)
    tensors = builder(sizes, name, {**flags, "operator": operator})
    return te.create_prim_func(tensors).with_attr("global_symbol", "main")


def lower(spec: OperatorSpec) -> Any:
    """Lower one specification directly: an IRModule with static sizes."""
    flags = structural_flags(spec.operator, spec.model_dump())
    return tvm.IRModule({"main": _prim_func(spec.operator, spec.dtype, flags, spec.bindings())})


def lower_class(operator: str, dtype: str, flags: Mapping[str, Any], symbols: list[str]) -> Any:
    """Lower a structural class: an IRModule whose sizes are variables of the given names."""
    sizes = {name: te.var(name) for name in symbols}
    return tvm.IRModule({"main": _prim_func(operator, dtype, flags, sizes)})


def to_json(module: Any) -> str:
    """TVM JSON of an IRModule."""
    return str(tvm.ir.save_json(module))
