"""Specifications of operators without matrix products: on ``[rows, cols]`` tensors and on images (NCHW)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import BeforeValidator, Field

from cdmpp.errors import InvalidProgramError
from cdmpp.programs.elements import DTYPE_BYTES
from cdmpp.programs.spec import Extent, Flag, Offset, OperatorSpec, Violation, whole_number

#: Bytes of an index.
INDEX_BYTES = 8
#: Element types of operators of training.
TRAINED_DTYPES = ("float32", "float16", "bfloat16")


class _OperatorRows(OperatorSpec):
    """An operator on a ``[rows, cols]`` tensor."""

    rows: Extent
    cols: Extent

    def tensor_bytes(self) -> float:
        """By default one input, and a result of its shape."""
        return self._bytes_of(2)

    def _bytes_of(self, tensors: int) -> float:
        return DTYPE_BYTES[self.dtype] * self.rows * self.cols * tensors


class Unary(_OperatorRows):
    """Element by element on one tensor."""

    operator: Literal["relu", "gelu", "tanh", "sigmoid", "silu", "exp", "sqrt", "erf", "abs", "neg", "log"]


class Binary(_OperatorRows):
    """Elementwise operation on ``inputs`` tensors of one shape (default: two)."""

    operator: Literal["add", "sub", "mul", "div", "pow", "maximum", "minimum"]
    inputs: Annotated[int, BeforeValidator(whole_number), Field(strict=True, ge=2, le=4)] = 2
    structural_fields: ClassVar[tuple[str, ...]] = ("inputs",)

    def tensor_bytes(self) -> float:
        return self._bytes_of(self.inputs + 1)


class Scalar(_OperatorRows):
    """Element by element with one scalar."""

    operator: Literal["add_scalar", "mul_scalar", "div_scalar", "pow_scalar"]


class RowWise(_OperatorRows):
    """A reduction along each row, then (but for ``reduce_mean`` and ``argmax``) a pass over it."""

    operator: Literal["softmax", "layernorm", "rmsnorm", "reduce_mean", "argmax"]


class FusedAddRmsNorm(_OperatorRows):
    """Adds a residual and normalises the sum, in one pass: writes the sum and its RMSNorm."""

    operator: Literal["fused_add_rms_norm"] = "fused_add_rms_norm"
    dtypes: ClassVar[tuple[str, ...]] = TRAINED_DTYPES

    def tensor_bytes(self) -> float:
        """Two inputs and two results."""
        return self._bytes_of(4)


class NormBackward(_OperatorRows):
    """Gradients of a norm with respect to its input and its weights, from the statistics that the forward pass kept.

    The gradient is an operator, not a field ``direction`` of the norms: a field would change their canonical texts and
    with them every stored hash.
    """

    operator: Literal["rmsnorm_backward", "layernorm_backward"]
    dtypes: ClassVar[tuple[str, ...]] = TRAINED_DTYPES

    def tensor_bytes(self) -> float:
        """The input, the gradient of the result, and the gradient of the input."""
        return self._bytes_of(3)


class SoftmaxCrossEntropy(_OperatorRows):
    """Cross entropy of ``rows`` tokens over ``cols`` classes, from scores and target indices.

    ``fwd`` writes a loss per token, ``bwd`` the gradient of the scores, ``fwd_bwd`` both in one pass, as fused kernels
    do while they train.
    """

    operator: Literal["softmax_cross_entropy"] = "softmax_cross_entropy"
    direction: Literal["fwd", "bwd", "fwd_bwd"] = "fwd"
    structural_fields: ClassVar[tuple[str, ...]] = ("direction",)
    dtypes: ClassVar[tuple[str, ...]] = TRAINED_DTYPES

    def tensor_bytes(self) -> float:
        return self._bytes_of(1 if self.direction == "fwd" else 2) + INDEX_BYTES * self.rows


class SiluAndMul(_OperatorRows):
    """``silu(x[:, :cols]) * x[:, cols:]``: reads ``2 * cols`` columns, writes ``cols``."""

    operator: Literal["silu_and_mul"] = "silu_and_mul"

    def tensor_bytes(self) -> float:
        return self._bytes_of(3)


class Copy(_OperatorRows):
    """Data movement that touches every element once: concatenation, slice, transpose (``transposed``)."""

    operator: Literal["copy"] = "copy"
    transposed: Flag = False
    structural_fields: ClassVar[tuple[str, ...]] = ("transposed",)


class Embedding(_OperatorRows):
    """``rows`` look-ups of ``cols`` elements each in a table of ``table_rows`` rows."""

    operator: Literal["embedding"] = "embedding"
    table_rows: Extent

    @classmethod
    def elements(cls, sizes: Mapping[str, Any]) -> Any:
        return np.maximum(sizes["rows"], sizes["table_rows"]) * sizes["cols"]

    def tensor_bytes(self) -> float:
        return DTYPE_BYTES[self.dtype] * self.cols * (self.rows + self.table_rows) + INDEX_BYTES * self.rows


class RotaryEmbedding(_OperatorRows):
    """Rotates pairs of the ``cols`` query and key columns of each token by a tabulated angle, in place.

    ``rows`` is the number of tokens, ``cols`` is ``(heads + kv_heads) * head_dim``.
    """

    operator: Literal["rotary_embedding"] = "rotary_embedding"
    head_dim: Extent = 128

    @classmethod
    def violations(cls, fields: Mapping[str, Any]) -> Iterator[Violation]:
        cols, head_dim = fields["cols"], fields["head_dim"]
        yield cols % head_dim != 0, "head_dim does not divide cols", "cols is (heads + kv_heads) * head_dim"

    @classmethod
    def elements(cls, sizes: Mapping[str, Any]) -> Any:
        return sizes["rows"] * sizes["cols"]


class KvCacheSave(_OperatorRows):
    """Writes the key and value columns of ``rows`` new tokens to their slots of a paged cache."""

    operator: Literal["kv_cache_save"] = "kv_cache_save"


class MoeGating(_OperatorRows):
    """Softmax over ``cols`` experts and choice of the ``topk`` largest, per token."""

    operator: Literal["moe_gating"] = "moe_gating"
    topk: Extent

    @classmethod
    def violations(cls, fields: Mapping[str, Any]) -> Iterator[Violation]:
        yield fields["topk"] > fields["cols"], "topk exceeds the number of experts, cols", "at most cols"

    def tensor_bytes(self) -> float:
        """Scores of all experts; values and indices of the chosen ones."""
        element_size = DTYPE_BYTES[self.dtype]
        return self.rows * (self.cols * element_size + self.topk * (element_size + INDEX_BYTES))


class MoeShuffle(_OperatorRows):
    """Copies each of ``rows`` tokens of ``cols`` values to ``topk`` places, ordered by expert."""

    operator: Literal["moe_shuffle"] = "moe_shuffle"
    topk: Extent

    def tensor_bytes(self) -> float:
        return self._bytes_of(1 + self.topk)


def output_hw(sizes: Mapping[str, Any]) -> tuple[Any, Any]:
    """Output height and width of conv2d and of the pools, from their sizes as integers or as arrays."""

    def along(axis: str) -> Any:
        span = (sizes["k" + axis] - 1) * sizes.get("dil_" + axis, 1) + 1
        return (sizes[axis] + 2 * sizes["pad_" + axis] - span) // sizes["stride_" + axis] + 1

    return along("h"), along("w")


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

    @classmethod
    def shape_flags(cls, operator: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        padded = bool(fields["pad_h"] > 0 or fields["pad_w"] > 0)
        return {"padded": padded, "grouped": bool(fields["groups"] > 1)}

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

    @classmethod
    def elements(cls, sizes: Mapping[str, Any]) -> Any:
        s, (oh, ow) = sizes, output_hw(sizes)
        per_group = s["c_in"] // s["groups"]
        padded = s["n"] * s["c_in"] * (s["h"] + 2 * s["pad_h"]) * (s["w"] + 2 * s["pad_w"])
        weight = s["c_out"] * per_group * s["kh"] * s["kw"]
        return np.maximum(np.maximum(padded, weight), s["n"] * oh * ow * weight)

    def tensor_bytes(self) -> float:
        height, width = self.output_hw()
        images = self.n * (self.c_in * self.h * self.w + self.c_out * height * width)
        weight = self.c_out * (self.c_in // self.groups) * self.kh * self.kw
        return DTYPE_BYTES[self.dtype] * (images + weight)


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

    @classmethod
    def shape_flags(cls, operator: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        return {"padded": bool(fields["pad_h"] > 0 or fields["pad_w"] > 0)}

    def check(self) -> None:
        if self.h + 2 * self.pad_h < self.kh or self.w + 2 * self.pad_w < self.kw:
            raise InvalidProgramError(
                f"{self.operator}: the window {self.kh}x{self.kw} is larger than the padded input",
                hint="enlarge h, w or the padding, or shrink the window",
            )
        super().check()

    @classmethod
    def elements(cls, sizes: Mapping[str, Any]) -> Any:
        s = sizes
        padded = (s["h"] + 2 * s["pad_h"]) * (s["w"] + 2 * s["pad_w"])
        return s["n"] * s["c"] * padded * s["kh"] * s["kw"]

    def tensor_bytes(self) -> float:
        height, width = output_hw(self.sizes())
        return float(DTYPE_BYTES[self.dtype] * self.n * self.c * (self.h * self.w + height * width))


class BatchNorm(OperatorSpec):
    """Inference batch normalisation, NCHW: one scale and one shift per channel."""

    operator: Literal["batch_norm"] = "batch_norm"
    n: Extent
    c: Extent
    h: Extent
    w: Extent

    def tensor_bytes(self) -> float:
        return DTYPE_BYTES[self.dtype] * 2 * self.n * self.c * self.h * self.w
