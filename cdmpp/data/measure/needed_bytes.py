"""Estimate of the memory that a library call of an operator needs."""

from __future__ import annotations

from cdmpp.programs.operators import (
    DTYPE_BYTES,
    Attention,
    BatchMatmul,
    BatchNorm,
    Binary,
    Conv2d,
    Embedding,
    Linear,
    OperatorSpec,
    Pool2d,
    SiluAndMul,
)


def needed_bytes(spec: OperatorSpec, *, gpu: bool = False) -> float:
    """Return the bytes of all tensors that a call holds at once, with its result and known scratch space.

    ``gpu``: half-precision attention is one fused kernel there, for any number of heads.
    """
    return DTYPE_BYTES[spec.dtype] * _elements(spec, gpu)


def _elements(spec: OperatorSpec, gpu: bool) -> float:
    if isinstance(spec, Linear):
        return spec.m * spec.k + spec.k * spec.n + spec.m * spec.n
    if isinstance(spec, BatchMatmul):
        return spec.batch * (spec.m * spec.k + spec.k * spec.n + spec.m * spec.n)
    if isinstance(spec, Conv2d):
        height, width = spec.output_hw()
        window = spec.c_in // spec.groups * spec.kh * spec.kw
        # Libraries may unfold the input, at least one image.
        unfolded = window * spec.groups * height * width
        outside = spec.n * (spec.c_in * spec.h * spec.w + spec.c_out * height * width)
        return 2 * outside + 2 * spec.c_out * window + unfolded
    if isinstance(spec, Attention):
        keys = spec.q_len + spec.past_len
        tokens = spec.head_dim * (2 * spec.q_len * spec.heads + 2 * keys * spec.heads)
        masked = spec.operator == "attention_prefill" and spec.past_len > 0
        fused = (spec.kv_heads == spec.heads and not masked) or (gpu and spec.dtype != "float32")
        # Without a fused kernel the scores are written out, before and after the softmax.
        return spec.batch * (tokens + (0 if fused else 2 * spec.heads * spec.q_len * keys))
    if isinstance(spec, Pool2d | BatchNorm):
        return 2 * spec.n * spec.c * spec.h * spec.w
    if isinstance(spec, Embedding):
        return spec.cols * (spec.rows + spec.table_rows) + 8 * spec.rows
    sizes = spec.sizes()
    inputs = spec.inputs if isinstance(spec, Binary) else 2 if isinstance(spec, SiluAndMul) else 1
    chained = inputs > 2  # an intermediate result beside the next one
    return sizes["rows"] * sizes["cols"] * (inputs + 1 + chained)
