"""Specifications of operators on ``[rows, cols]`` tensors, which do no matrix products."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import BeforeValidator, Field

from cdmpp.programs.elements import DTYPE_BYTES, Extent, Flag, whole_number
from cdmpp.programs.spec import OperatorSpec, Violation

#: Bytes of an index.
INDEX_BYTES = 8


class _Rows(OperatorSpec):
    """An operator on a ``[rows, cols]`` tensor."""

    rows: Extent
    cols: Extent

    def tensor_bytes(self) -> float:
        """By default one input, and a result of its shape."""
        return self._bytes_of(2)

    def _bytes_of(self, tensors: int) -> float:
        return DTYPE_BYTES[self.dtype] * self.rows * self.cols * tensors


class Unary(_Rows):
    """Element by element on one tensor."""

    operator: Literal["relu", "gelu", "tanh", "sigmoid", "silu", "exp", "sqrt", "erf", "abs", "neg", "log"]


class Binary(_Rows):
    """Elementwise operation on ``inputs`` tensors of one shape (default: two)."""

    operator: Literal["add", "sub", "mul", "div", "pow", "maximum", "minimum"]
    inputs: Annotated[int, BeforeValidator(whole_number), Field(strict=True, ge=2, le=4)] = 2
    structural_fields: ClassVar[tuple[str, ...]] = ("inputs",)

    def tensor_bytes(self) -> float:
        return self._bytes_of(self.inputs + 1)


class Scalar(_Rows):
    """Element by element with one scalar."""

    operator: Literal["add_scalar", "mul_scalar", "div_scalar", "pow_scalar"]


class RowWise(_Rows):
    """A reduction along each row, then (but for ``reduce_mean`` and ``argmax``) a pass over it."""

    operator: Literal["softmax", "layernorm", "rmsnorm", "reduce_mean", "argmax"]


class SiluAndMul(_Rows):
    """``silu(x[:, :cols]) * x[:, cols:]``: reads ``2 * cols`` columns, writes ``cols``."""

    operator: Literal["silu_and_mul"] = "silu_and_mul"

    def tensor_bytes(self) -> float:
        return self._bytes_of(3)


class Copy(_Rows):
    """Data movement that touches every element once: concatenation, slice, transpose (``transposed``)."""

    operator: Literal["copy"] = "copy"
    transposed: Flag = False
    structural_fields: ClassVar[tuple[str, ...]] = ("transposed",)


class Embedding(_Rows):
    """``rows`` look-ups of ``cols`` elements each in a table of ``table_rows`` rows."""

    operator: Literal["embedding"] = "embedding"
    table_rows: Extent

    @classmethod
    def elements(cls, sizes: Mapping[str, Any]) -> Any:
        return np.maximum(sizes["rows"], sizes["table_rows"]) * sizes["cols"]

    def tensor_bytes(self) -> float:
        return DTYPE_BYTES[self.dtype] * self.cols * (self.rows + self.table_rows) + INDEX_BYTES * self.rows


class RotaryEmbedding(_Rows):
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


class KvCacheSave(_Rows):
    """Writes the key and value columns of ``rows`` new tokens to their slots of a paged cache."""

    operator: Literal["kv_cache_save"] = "kv_cache_save"


class MoeGating(_Rows):
    """Softmax over ``cols`` experts and choice of the ``topk`` largest, per token."""

    operator: Literal["moe_gating"] = "moe_gating"
    topk: Extent

    @classmethod
    def violations(cls, fields: Mapping[str, Any]) -> Iterator[Violation]:
        yield fields["topk"] > fields["cols"], "topk exceeds the number of experts, cols", "at most cols"

    def tensor_bytes(self) -> float:
        """Scores of all experts; values and indices of the chosen ones."""
        own = DTYPE_BYTES[self.dtype]
        return self.rows * (self.cols * own + self.topk * (own + INDEX_BYTES))


class MoeShuffle(_Rows):
    """Copies each of ``rows`` tokens of ``cols`` values to ``topk`` places, ordered by expert."""

    operator: Literal["moe_shuffle"] = "moe_shuffle"
    topk: Extent

    def tensor_bytes(self) -> float:
        return self._bytes_of(1 + self.topk)
