"""Which operators PyTorch runs as one call, without importing PyTorch.

This file runs in cdmpp and, copied beside ``run.py``, on a machine without cdmpp. An operator is the dictionary of its
fields, as in ``library_calls``, which has the calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Fields of an operator.
Fields = Mapping[str, Any]
#: Operators with a call, and their element types.
OPERATORS = frozenset(
    [
        "linear",
        "bmm",
        "conv2d",
        "relu",
        "gelu",
        "tanh",
        "sigmoid",
        "silu",
        "exp",
        "sqrt",
        "erf",
        "abs",
        "neg",
        "log",
        "add",
        "sub",
        "mul",
        "div",
        "pow",
        "maximum",
        "minimum",
        "add_scalar",
        "mul_scalar",
        "div_scalar",
        "pow_scalar",
        "softmax",
        "layernorm",
        "rmsnorm",
        "reduce_mean",
        "argmax",
        "silu_and_mul",
        "copy",
        "embedding",
        "max_pool2d",
        "avg_pool2d",
        "batch_norm",
        "attention_prefill",
        "attention_decode",
        "attention_encoder",
    ]
)
TYPES = ("float32", "tfloat32", "float16", "bfloat16", "int8", "float8_e4m3")
#: Types of matrix products only.
_PRODUCT_TYPES = {"tfloat32": ("linear", "bmm"), "float8_e4m3": ("linear",), "int8": ("linear", "copy")}
#: Fields that only serving libraries and vendors' own interfaces have.
_UNMEASURED = ("weight_dtype", "scaling", "kv_dtype", "layout", "accumulate", "out_dtype")
#: Sizes of a product of float8 are multiples of this.
FLOAT8_MULTIPLE = 16


def call_problem(fields: Fields) -> str:
    """Return why PyTorch has no single call of an operator, "" if it has one."""
    operator, dtype = fields["operator"], fields["dtype"]
    if operator not in OPERATORS:
        return f"{operator} has no PyTorch call yet"
    if dtype not in TYPES:
        return f"PyTorch is not measured with {dtype}"
    if operator not in _PRODUCT_TYPES.get(dtype, (operator,)):
        return f"PyTorch has no {dtype} kernel for {operator}"
    static_float8 = dtype == "float8_e4m3" and fields.get("scaling") == "tensor"
    for name in _UNMEASURED:
        if fields.get(name) is not None and not (name == "scaling" and static_float8):
            return f"PyTorch has no {operator} with {name}={fields[name]} as one call"
    if dtype in ("int8", "float8_e4m3") and fields.get("bias"):
        return f"PyTorch has no {dtype} product with a bias"
    if dtype == "float8_e4m3" and (fields["n"] % FLOAT8_MULTIPLE or fields["k"] % FLOAT8_MULTIPLE):
        return f"PyTorch multiplies float8 with n and k in multiples of {FLOAT8_MULTIPLE} only"
    if operator.startswith("attention") and fields["heads"] % fields["kv_heads"]:
        return f"PyTorch shares each key head among equally many heads, not {fields['heads']} on {fields['kv_heads']}"
    return ""
