"""Dimensions of a language model, as the fields of a decoder that :mod:`cdmpp.llm.operators` needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any, Literal

#: Parts of a layer whose weights a checkpoint may quantise apart: projections to and from the attention, and the three
#: kinds of feed-forward layers.
WEIGHT_PARTS = ("attention", "output", "dense", "shared", "experts")


@dataclass(frozen=True)
class PartWeights:
    """Type of the weights of one part of all layers, where it differs from that of the others."""

    part: str  # one of :data:`WEIGHT_PARTS`
    weights: str | None = None  # None: not quantised
    scaling: str | None = None
    packed: bool = False  # whether activations keep their type


@dataclass(frozen=True)
class Experts:
    """Layers of experts."""

    count: int  # routed experts of a layer
    topk: float  # experts of a token; with adaptive gating their expected number
    intermediate: int  # columns between the projections of one routed expert
    shared: int  # columns of the experts that every token passes, together; 0 for none
    shared_gate: bool  # whether a gate of one column weights the shared experts (Qwen2-MoE)
    layers: int  # layers with experts; the remaining layers are dense
    # columns that tokens are projected to before the routed experts, and back from behind them; 0: not projected
    latent: int = 0


@dataclass(frozen=True)
class Dense:
    """A feed-forward layer of ``columns`` columns between its projections."""

    columns: int


@dataclass(frozen=True)
class Indexer:
    """Choice of the cached tokens that a query attends to (sparse attention of DeepSeek V3.2, GLM 5, MiniMax M3)."""

    heads: int  # heads of the index queries
    dim: int  # columns of such a head, and of the index key of a token
    topk: int  # tokens that a query attends to
    own: bool = True  # whether the layer has an indexer; otherwise it uses the choice of a layer before it


@dataclass(frozen=True)
class AttentionLayer:
    """Attention with grouped heads."""

    heads: int
    kv_heads: int
    head_dim: int
    v_dim: int | None = None  # columns of a value head, where they differ from ``head_dim``
    window: int | None = None  # tokens that a query attends to
    gate: bool = False  # whether a gate of as many columns as the queries multiplies the output (Qwen 3.5)
    shared_kv: bool = False  # whether keys and values have one projection (Gemma 4)
    indexer: Indexer | None = None

    @property
    def values(self) -> int:
        """Columns of a value head."""
        return self.v_dim or self.head_dim


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek V2, V3): columns of the compressed queries, keys and values."""

    q_rank: int  # columns of the compressed query; 0: queries are not compressed
    kv_rank: int  # columns of the compressed keys and values
    # Columns of a head: rotated and other columns of query and key, columns of the value.
    rope: int
    nope: int
    v_dim: int
    indexer: Indexer | None = None
    gate: bool = False  # whether a gate multiplies the output (Kimi K3)


@dataclass(frozen=True)
class Compressed:
    """Attention to a window and to compressed tokens before it (DeepSeek V4). Key and value are one vector."""

    heads: int
    head_dim: int
    rope: int
    q_rank: int  # columns of the compressed query
    o_groups: int  # groups of heads
    o_rank: int  # columns that the output of a group is compressed to
    window: int
    ratio: int  # tokens that are compressed to one; 0: the layer has the window only
    indexer: Indexer | None = None  # choice of the compressed tokens

    def keys(self, cached: int) -> int:
        """Tokens and compressed tokens that a query attends to behind ``cached`` tokens."""
        compressed = cached // self.ratio if self.ratio else 0
        if self.indexer is not None:
            compressed = min(compressed, self.indexer.topk)
        return min(cached, self.window - 1) + compressed


@dataclass(frozen=True)
class Recurrent:
    """Gated linear attention or a state-space layer, whose state has one size for any number of tokens.

    Mamba 2: ``key_heads`` are its groups, ``key_dim`` is its state size, ``value_dim`` the columns of a head. Gated
    DeltaNet and Kimi's delta attention: heads of keys and values.
    """

    # The state has ``heads * key_dim * value_dim`` elements.
    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    conv: int  # tokens of the convolution of queries, keys and values
    scalars: int  # gates of one column for each head: 1 in Mamba 2, 2 in DeltaNet
    # columns between the two products of a decay of each key column (Kimi); 0: the decay is a scalar
    decay_rank: int = 0
    chunk: int = 64  # tokens that a prefill computes as one product

    @property
    def inner(self) -> int:
        """Columns of the values."""
        return self.heads * self.value_dim

    @property
    def convolved(self) -> int:
        """Columns of queries, keys and values."""
        return self.inner + 2 * self.key_heads * self.key_dim

    @property
    def state(self) -> int:
        """Elements of the state of a sequence, in float32."""
        return self.heads * self.key_dim * self.value_dim


#: First half of a layer, and its second half.
Mixer = AttentionLayer | Latent | Compressed | Recurrent
FeedForward = Dense | Experts


@dataclass(frozen=True)
class LLMConfig:
    """Dimensions of a decoder; :func:`cdmpp.llm.read_config` makes one from a ``config.json`` of Hugging Face."""

    model_type: str
    layers: int
    hidden: int
    vocab: int
    # Query heads, key and value heads, columns of a head. Unused with ``latent``, except ``heads``.
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int  # columns between the projections of a dense feed-forward layer
    gated: bool = True  # whether the feed-forward layer has two first products (SwiGLU, GeGLU)
    activation: str = "silu"
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norms: int = 2  # norms of a layer: 2, or 4 (Gemma 2 and 3 normalise the output of each half too)
    final_norm: bool = True
    qk_norm: bool = False  # whether the heads of queries and keys are normalised (Qwen3, Gemma 3)
    positions: int = 0  # rows of the table of learned positions; 0: rotary embedding
    tied: bool = False  # whether the output layer shares its weight with the embedding
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    window: int | None = None  # tokens that a layer with sliding-window attention attends to
    windowed_layers: int = 0  # number of layers with sliding-window attention
    soft_cap: bool = False  # whether a tanh limits the logits (Gemma 2)
    scaled_embedding: bool = False  # whether the embedding is multiplied by a constant (Gemma)
    experts: Experts | None = None
    latent: Latent | None = None
    streams: int = 1  # copies of the residual, mixed before each half of a layer (hyper-connections of DeepSeek V4)
    # Number of layers, and description of their first and second half, where the layers of a model differ in more than
    # the fields above say. Empty: they follow from those fields.
    mixers: tuple[tuple[int, Mixer], ...] = ()
    feed_forwards: tuple[tuple[int, FeedForward], ...] = ()
    # Element type and scaling of quantised weights, from ``quantization_config``.
    weights: str | None = None
    weight_scaling: str | None = None
    packed: bool = False  # whether products widen these weights, also where the device has units for their type
    part_weights: tuple[PartWeights, ...] = ()  # parts of a layer whose weights have another type
    kv_dtype: str | None = None  # element type of the cache, from ``quantization_config``
    context: int | None = None  # positions that the model was made for (``max_position_embeddings``)
    # class of a model that makes no output tokens, such as ``MistralModel`` (embeddings)
    prompt_only: str | None = None
    # parts of the configuration that are no part of the decoder, such as ``vision_config``
    left_out: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()  # what the description of the model leaves out or simplifies

    @property
    def moe_layers(self) -> int:
        """Number of layers with experts."""
        return 0 if self.experts is None else self.experts.layers

    @property
    def dense_layers(self) -> int:
        """Number of layers with a dense feed-forward part."""
        if self.feed_forwards:
            return sum(count for count, half in self.feed_forwards if isinstance(half, Dense))
        return self.layers - self.moe_layers

    @property
    def first_halves(self) -> tuple[tuple[int, Mixer], ...]:
        """Number and description of the attention halves; those of the same projections follow each other."""
        if self.mixers:
            return self.mixers
        if self.latent is not None:
            return ((self.layers, self.latent),)
        full = AttentionLayer(self.heads, self.kv_heads, self.head_dim)
        windowed = replace(full, window=self.window)
        halves = ((self.layers - self.windowed_layers, full), (self.windowed_layers, windowed))
        return tuple(half for half in halves if half[0])

    @property
    def second_halves(self) -> tuple[tuple[int, FeedForward], ...]:
        """Number and description of the feed-forward halves."""
        if self.feed_forwards:
            return self.feed_forwards
        dense = ((self.dense_layers, Dense(self.intermediate)),) if self.dense_layers else ()
        return dense if self.experts is None else (*dense, (self.moe_layers, self.experts))


#: A model as public functions take it: its dimensions, the content of a ``config.json``, or the path of the file.
ConfigLike = LLMConfig | Mapping[str, Any] | str | PathLike[str]
