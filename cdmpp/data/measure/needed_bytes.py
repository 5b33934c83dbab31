"""Estimate of the memory that a library call of an operator needs."""

from __future__ import annotations

from cdmpp.programs.attention import Attention
from cdmpp.programs.elements import DTYPE_BYTES
from cdmpp.programs.operators import OperatorSpec
from cdmpp.programs.products import Moe
from cdmpp.programs.vectors import Binary, Conv2d


def needed_bytes(spec: OperatorSpec, *, gpu: bool = False) -> float:
    """Return the bytes of all tensors that a call holds at once, with its result and known scratch space.

    ``gpu``: half-precision attention is one fused kernel there, for any number of heads.
    """
    return spec.tensor_bytes() + DTYPE_BYTES[spec.dtype] * _scratch_elements(spec, gpu)


def _scratch_elements(spec: OperatorSpec, gpu: bool) -> float:
    if isinstance(spec, Binary):
        return spec.rows * spec.cols * (spec.inputs > 2)  # an intermediate result beside the next one
    if isinstance(spec, Conv2d):
        height, width = spec.output_hw()
        # Libraries may copy all tensors into another layout, and unfold the input of at least one image.
        return spec.tensor_bytes() / DTYPE_BYTES[spec.dtype] + spec.c_in * spec.kh * spec.kw * height * width
    if isinstance(spec, Attention):
        keys = spec.q_len + spec.past_len
        masked = spec.operator == "attention_prefill" and spec.past_len > 0
        fused = (spec.kv_heads == spec.heads and not masked) or (gpu and spec.dtype != "float32")
        # Without a fused kernel keys and values are repeated for all heads, and the scores are written out,
        # before and after the softmax.
        repeated = spec.head_dim * keys * (spec.heads - spec.kv_heads)
        return 0 if fused else 2 * spec.batch * (repeated + spec.heads * spec.q_len * keys)
    if isinstance(spec, Moe) and spec.operator == "moe":
        sizes = spec.bindings()
        # Rows between the products, before and after the activation, and the second product's before they are combined.
        columns = sizes["rank_intermediate"] * (2 + spec.gated) + spec.hidden
        return sizes["rank_rows"] * columns
    return 0
