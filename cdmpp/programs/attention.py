"""Specifications of fused attention: grouped heads, latent attention, mixed batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import model_validator

from cdmpp.errors import InvalidProgramError
from cdmpp.programs.elements import (
    BASIC_DTYPES,
    DTYPE_BYTES,
    Scaling,
    canonical_dtype,
    check_types,
    combinations,
    completed_fields,
)
from cdmpp.programs.spec import DType, Extent, Flag, Offset, OperatorSpec, Violation, whole_number

KV_GROUPS = ("same", "one", "grouped")
#: Element types of a cache that differs from ``dtype``, and of the activations then.
CACHE_DTYPES = ("float16", "bfloat16", "int8", "float8_e4m3")
#: Element types of the projections of a latent attention module.
PROJECTION_DTYPES = ("float16", "bfloat16", "int8", "float8_e4m3", "float4_e2m1")


def cache_dtypes(dtype: str) -> Iterator[str | None]:
    """Values of ``kv_dtype`` for an attention of some element type."""
    yield None
    if dtype in CACHE_DTYPES:
        yield from (name for name in CACHE_DTYPES if name != dtype)


def projections(dtype: str) -> Iterator[tuple[str | None, str | None]]:
    """Pairs (weight_dtype, scaling) of the module of a latent attention of some element type."""
    for weight in PROJECTION_DTYPES:
        if weight == dtype:
            yield from ((None, scaling) for other, scaling in combinations(weight) if other is None)
        else:
            yield from ((weight, scaling) for other, scaling in combinations(weight, experts=True) if other is None)


def kv_groups(fields: Mapping[str, Any]) -> str:
    """How query heads share key heads; one key head for all is another structure than several."""
    kv, heads = fields["kv_heads"], fields["heads"]
    return "same" if kv == heads else "one" if kv == 1 else "grouped"


def equal_sequences(tokens: float, pairs: float) -> tuple[int, int]:
    """Batch and length of equal sequences with as many tokens and pairs of query and key as sequences of one call.

    One call over sequences of several lengths runs their tiles side by side: its work grows with the pairs, its traffic
    with the tokens. ``pairs``: sum of the squares of the lengths.
    """
    batch = max(1, round(tokens * tokens / pairs))
    return batch, max(1, round((pairs / batch) ** 0.5))


class _Cached(OperatorSpec):
    """Attention over cached keys, whose element type may be narrower (``kv_dtype``, None: ``dtype``)."""

    kv_dtype: DType | None = None
    dtypes: ClassVar[tuple[str, ...]] = (*BASIC_DTYPES, "float8_e4m3")

    @model_validator(mode="before")
    @classmethod
    def _one_type(cls, fields: Any) -> Any:
        if not isinstance(fields, dict) or "kv_dtype" not in fields:
            return fields
        kv, dtype = (
            canonical_dtype(fields["kv_dtype"]),
            canonical_dtype(fields.get("dtype", cls.model_fields["dtype"].default)),
        )
        return {**fields, "kv_dtype": None if kv == dtype else kv}

    def check_types(self) -> None:
        if self.kv_dtype is not None and not {self.kv_dtype, self.dtype} <= set(CACHE_DTYPES):
            raise InvalidProgramError(
                f"{self.operator}: no cache of {self.kv_dtype} for dtype {self.dtype}",
                hint="kv_dtype and dtype: " + ", ".join(CACHE_DTYPES),
            )
        super().check_types()

    def bytes_of_rows(self, queries: int, keys: int) -> float:
        """Bytes of queries, results, keys and values of so many elements each."""
        return 2 * (queries * DTYPE_BYTES[self.dtype] + keys * self.cache_element_bytes)

    @property
    def cache_element_bytes(self) -> float:
        """Bytes of an element of a key or value."""
        return DTYPE_BYTES[self.kv_dtype or self.dtype]


class Attention(_Cached):
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
    structural_fields: ClassVar[tuple[str, ...]] = ("kv_dtype",)

    @model_validator(mode="before")
    @classmethod
    def _mean_length(cls, fields: Any) -> Any:
        """``past_total``, the cached keys of a batch of unequal lengths, gives ``past_len``, their mean."""
        if not isinstance(fields, dict) or "past_total" not in fields:
            return fields
        fields = dict(fields)
        total, batch = whole_number(fields.pop("past_total")), whole_number(fields.get("batch"))
        if total is None or type(batch) is not int or batch < 1:
            return fields  # not given, or the batch has an error of its own
        if type(total) is not int or total < 0:
            raise ValueError(f"past_total is the number of cached keys of the whole batch, not {total!r}")
        mean = (2 * total + batch) // (2 * batch)
        if fields.setdefault("past_len", mean) != mean:
            raise ValueError(f"past_len is not the mean of past_total={total} over batch={batch}; give one of them")
        return fields

    @classmethod
    def shape_flags(cls, operator: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        # A single query sees every key: there is nothing to mask.
        causal = operator == "attention_prefill" and bool(fields["q_len"] > 1)
        return {"kv": kv_groups(fields), "causal": causal}

    @classmethod
    def violations(cls, fields: Mapping[str, Any]) -> Iterator[Violation]:
        # A last group may be smaller than the others: libraries accept, and tables hold, 33 heads on 4.
        problem = "kv_heads exceeds heads"
        hint = "grouped-query attention shares each key head among heads / kv_heads query heads"
        yield fields["kv_heads"] > fields["heads"], problem, hint

    @classmethod
    def elements(cls, sizes: Mapping[str, Any]) -> Any:
        s, keys = sizes, sizes["q_len"] + sizes["past_len"]
        return s["batch"] * s["heads"] * s["head_dim"] * np.maximum(s["q_len"] * keys, keys)

    def tensor_bytes(self) -> float:
        keys = self.q_len + self.past_len
        width = self.batch * self.head_dim
        return self.bytes_of_rows(width * self.q_len * self.heads, width * keys * self.kv_heads)


class AttentionBackward(OperatorSpec):
    """Gradients of queries, keys and values of fused self-attention over ``q_len`` tokens.

    ``head_dim`` is the width of queries and keys, ``v_dim`` that of values (default: ``head_dim``). The scores are
    computed again from the kept logarithms of their sums, so there are five products where the forward pass has two.
    """

    operator: Literal["attention_backward"] = "attention_backward"
    batch: Extent
    q_len: Extent
    heads: Extent
    kv_heads: Extent
    head_dim: Extent
    v_dim: Extent
    causal: Flag = True
    structural_fields: ClassVar[tuple[str, ...]] = ("causal",)
    dtypes: ClassVar[tuple[str, ...]] = ("float32", "float16", "bfloat16", "float8_e4m3")

    @model_validator(mode="before")
    @classmethod
    def _equal_widths(cls, fields: Any) -> Any:
        if not isinstance(fields, dict) or "head_dim" not in fields:
            return fields
        return {"v_dim": fields["head_dim"], **fields}

    @classmethod
    def shape_flags(cls, operator: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        return {"kv": kv_groups(fields)}

    @classmethod
    def violations(cls, fields: Mapping[str, Any]) -> Iterator[Violation]:
        hint = "each key head is shared by heads / kv_heads query heads"
        yield fields["heads"] % fields["kv_heads"] != 0, "kv_heads does not divide heads", hint

    @classmethod
    def elements(cls, sizes: Mapping[str, Any]) -> Any:
        s = sizes
        return s["batch"] * s["heads"] * s["q_len"] ** 2 * np.maximum(s["head_dim"], s["v_dim"])

    def tensor_bytes(self) -> float:
        """Queries, keys, values, results and the results' gradients; gradients of queries, keys and values."""
        element_size, widths = DTYPE_BYTES[self.dtype], self.head_dim + self.v_dim
        queries, keys = self.heads * widths, self.kv_heads * widths
        return (
            self.batch * self.q_len * ((queries + self.heads * self.v_dim + keys) * element_size + self._written(keys))
        )

    def _written(self, keys: int) -> float:
        return max(DTYPE_BYTES[self.dtype], 2.0) * (self.heads * self.head_dim + keys)


class AttentionMixed(_Cached):
    """One batch with a prefill chunk and decoding sequences, in one call.

    The chunk has ``q_len`` new tokens behind ``past_len`` cached ones. Each of ``decodes`` sequences adds one token
    to ``decode_past_len`` cached ones (their mean).
    """

    operator: Literal["attention_mixed"] = "attention_mixed"
    q_len: Extent
    past_len: Offset = 0
    decodes: Extent
    decode_past_len: Offset
    heads: Extent
    kv_heads: Extent
    head_dim: Extent
    structural_fields: ClassVar[tuple[str, ...]] = ("kv_dtype",)

    @classmethod
    def shape_flags(cls, operator: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        return {"kv": kv_groups(fields)}

    @classmethod
    def violations(cls, fields: Mapping[str, Any]) -> Iterator[Violation]:
        yield fields["kv_heads"] > fields["heads"], "kv_heads exceeds heads", "several query heads share a key head"

    @classmethod
    def elements(cls, sizes: Mapping[str, Any]) -> Any:
        s = sizes
        pairs = s["q_len"] * (s["q_len"] + s["past_len"]) + s["decodes"] * (1 + s["decode_past_len"])
        return s["heads"] * s["head_dim"] * pairs

    def tensor_bytes(self) -> float:
        new = self.q_len + self.decodes
        keys = new + self.past_len + self.decodes * self.decode_past_len
        return self.bytes_of_rows(self.head_dim * new * self.heads, self.head_dim * keys * self.kv_heads)


class LatentAttention(_Cached):
    """Multi-head latent attention (DeepSeek V2, V3): keys and values are compressed to one latent per token.

    ``mla_prefill`` expands the latents to ``heads`` keys of ``nope + rope`` and values of ``v_dim`` columns and is
    causal. ``mla_decode`` is the absorbed form: all heads read the cache of ``latent + rope`` values per token.
    ``module`` adds the projections around it, from and to ``hidden`` columns, with weights and activations of type
    ``weight_dtype`` (None: ``dtype``) and ``scaling``. ``heads`` are those of one rank.
    """

    operator: Literal["mla_prefill", "mla_decode"]
    dtype: DType = "bfloat16"
    batch: Extent
    q_len: Extent = 1
    past_len: Offset = 0
    heads: Extent
    latent: Extent = 512
    rope: Extent = 64
    nope: Extent = 128
    v_dim: Extent = 128
    hidden: Extent = 7168
    q_latent: Extent = 1536
    module: Flag = False
    weight_dtype: DType | None = None
    scaling: Scaling | None = None
    dtypes: ClassVar[tuple[str, ...]] = ("float16", "bfloat16", "float8_e4m3")
    structural_fields: ClassVar[tuple[str, ...]] = ("kv_dtype", "module", "weight_dtype", "scaling")

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, fields: Any) -> Any:
        if not isinstance(fields, dict) or fields.get("weight_dtype") is None:
            return fields
        # Activations of the projections have the type of their weights.
        weight = canonical_dtype(fields["weight_dtype"])
        same = completed_fields({"dtype": weight, "scaling": fields.get("scaling")}, experts=True)
        plain = weight == canonical_dtype(fields.get("dtype", cls.model_fields["dtype"].default))
        return {**fields, "weight_dtype": None if plain else weight, "scaling": same["scaling"]}

    def check_types(self) -> None:
        if not self.module and (self.weight_dtype, self.scaling) != (None, None):
            raise InvalidProgramError(
                f"{self.operator}: weight_dtype and scaling belong to the projections", hint="add module=true"
            )
        if self.weight_dtype is not None and self.weight_dtype not in PROJECTION_DTYPES:
            raise InvalidProgramError(
                f"{self.operator}: no projections with weight_dtype {self.weight_dtype}",
                hint="one of: " + ", ".join(PROJECTION_DTYPES),
            )
        if self.weight_dtype is not None or self.scaling is not None:
            check_types(self.operator, self.weight_dtype or self.dtype, None, self.scaling)
        super().check_types()

    @classmethod
    def elements(cls, sizes: Mapping[str, Any]) -> Any:
        s, keys = sizes, sizes["q_len"] + sizes["past_len"]
        pairs = s["batch"] * s["heads"] * s["q_len"] * keys * (s["latent"] + s["rope"])
        projections = s["hidden"] * (s["q_latent"] + s["heads"] * (s["nope"] + s["rope"] + s["v_dim"]))
        return np.maximum(pairs, s["batch"] * s["q_len"] * projections)

    def tensor_bytes(self) -> float:
        """Latents of all tokens, queries and results of the new ones; with the projections their weights too."""
        element_size, new = DTYPE_BYTES[self.dtype], self.batch * self.q_len
        result = max(element_size, 2)
        cache = self.batch * (self.past_len + self.q_len) * (self.latent + self.rope) * self.cache_element_bytes
        if self.operator == "mla_decode":
            heads = new * self.heads * ((self.latent + self.rope) * element_size + self.latent * result)
        else:
            heads = new * self.heads * ((self.nope + self.rope) * element_size + self.v_dim * result)
        if not self.module:
            return cache + heads
        weights = (
            self.hidden * (self.q_latent + self.latent + self.rope)
            + self.q_latent * self.heads * (self.nope + self.rope)
            + self.latent * self.heads * (self.nope + self.v_dim)
            + self.heads * self.v_dim * self.hidden
        )
        return cache + heads + weights * DTYPE_BYTES[self.weight_dtype or self.dtype] + 2 * new * self.hidden * result
