"""Dimensions of a language model, as the fields of a decoder that :mod:`cdmpp.llm.operators` needs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

#: Parts of a layer whose weights a checkpoint may quantise apart: projections to and from the attention, and the three
#: kinds of feed-forward layers.
WEIGHT_PARTS = ("attention", "output", "dense", "shared", "experts")


@dataclass(frozen=True)
class PartWeights:
    """Type of the weights of one part of all layers, where it differs from that of the others.

    Attributes
    ----------
    part : str
        One of :data:`WEIGHT_PARTS`.
    weights, scaling : str or None
        Element type and scaling; None: not quantised.
    packed : bool
        Whether activations keep their type.
    """

    part: str
    weights: str | None = None
    scaling: str | None = None
    packed: bool = False


@dataclass(frozen=True)
class Experts:
    """Layers of experts.

    Attributes
    ----------
    count : int
        Routed experts of a layer.
    topk : float
        Experts of a token; with adaptive gating their expected number.
    intermediate : int
        Columns between the projections of one routed expert.
    shared : int
        Columns of the experts that every token passes, together; 0 for none.
    shared_gate : bool
        Whether a gate of one column weights the shared experts (Qwen2-MoE).
    layers : int
        Layers with experts; the remaining layers are dense.
    latent : int
        Columns that tokens are projected to before the routed experts, and back from behind them; 0: not projected.
    """

    count: int
    topk: float
    intermediate: int
    shared: int
    shared_gate: bool
    layers: int
    latent: int = 0


@dataclass(frozen=True)
class Dense:
    """A feed-forward layer of ``columns`` columns between its projections."""

    columns: int


@dataclass(frozen=True)
class Indexer:
    """Choice of the cached tokens that a query attends to (sparse attention of DeepSeek V3.2, GLM 5, MiniMax M3).

    Attributes
    ----------
    heads, dim : int
        Heads of the index queries, and their columns. The index key of a token has ``dim`` columns.
    topk : int
        Tokens that a query attends to.
    own : bool
        Whether the layer has an indexer; otherwise it uses the choice of a layer before it.
    """

    heads: int
    dim: int
    topk: int
    own: bool = True


@dataclass(frozen=True)
class AttentionLayer:
    """Attention with grouped heads.

    Attributes
    ----------
    heads, kv_heads, head_dim : int
    v_dim : int or None
        Columns of a value head, where they differ from ``head_dim``.
    window : int or None
        Tokens that a query attends to.
    gate : bool
        Whether a gate of as many columns as the queries multiplies the output (Qwen 3.5).
    shared_kv : bool
        Whether keys and values have one projection (Gemma 4).
    indexer : Indexer or None
    """

    heads: int
    kv_heads: int
    head_dim: int
    v_dim: int | None = None
    window: int | None = None
    gate: bool = False
    shared_kv: bool = False
    indexer: Indexer | None = None

    @property
    def values(self) -> int:
        """Columns of a value head."""
        return self.v_dim or self.head_dim


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek V2, V3): columns of the compressed queries, keys and values.

    Attributes
    ----------
    q_rank : int
        Columns of the compressed query; 0: queries are not compressed.
    kv_rank : int
        Columns of the compressed keys and values.
    rope, nope, v_dim : int
        Columns of a head: rotated and other columns of query and key, columns of the value.
    indexer : Indexer or None
    gate : bool
        Whether a gate multiplies the output (Kimi K3).
    """

    q_rank: int
    kv_rank: int
    rope: int
    nope: int
    v_dim: int
    indexer: Indexer | None = None
    gate: bool = False


@dataclass(frozen=True)
class Compressed:
    """Attention to a window and to compressed tokens before it (DeepSeek V4). Key and value are one vector.

    Attributes
    ----------
    heads, head_dim, rope : int
    q_rank : int
        Columns of the compressed query.
    o_groups, o_rank : int
        Groups of heads, and columns that the output of a group is compressed to.
    window : int
    ratio : int
        Tokens that are compressed to one; 0: the layer has the window only.
    indexer : Indexer or None
        Choice of the compressed tokens.
    """

    heads: int
    head_dim: int
    rope: int
    q_rank: int
    o_groups: int
    o_rank: int
    window: int
    ratio: int
    indexer: Indexer | None = None

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

    Attributes
    ----------
    heads, key_heads, key_dim, value_dim : int
        The state has ``heads * key_dim * value_dim`` elements.
    conv : int
        Tokens of the convolution of queries, keys and values.
    scalars : int
        Gates of one column for each head: 1 in Mamba 2, 2 in DeltaNet.
    decay_rank : int
        Columns between the two products of a decay of each key column (Kimi); 0: the decay is one of the scalars.
    chunk : int
        Tokens that a prefill computes as one product.
    """

    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    conv: int
    scalars: int
    decay_rank: int = 0
    chunk: int = 64

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
    """Dimensions of a decoder; :func:`cdmpp.llm.read_config` makes one from a ``config.json`` of Hugging Face.

    Attributes
    ----------
    model_type : str
        ``model_type`` of the configuration.
    layers, hidden, vocab : int
    heads, kv_heads, head_dim : int
        Query heads, key and value heads, columns of a head. Unused with ``latent``, except ``heads``.
    intermediate : int
        Columns between the projections of a dense feed-forward layer.
    gated : bool
        Whether the feed-forward layer has two first products (SwiGLU, GeGLU).
    activation : str
        Activation of the feed-forward layer, such as "silu".
    norm : {"rmsnorm", "layernorm"}
    norms : int
        Norms of a layer: 2, or 4 (Gemma 2 and 3 normalise the output of each half too).
    final_norm : bool
    qk_norm : bool
        Whether the heads of queries and keys are normalised (Qwen3, Gemma 3).
    positions : int
        Rows of the table of learned positions; 0: rotary embedding.
    tied : bool
        Whether the output layer shares its weight with the embedding.
    qkv_bias, o_bias, mlp_bias : bool
    window : int or None
        Tokens that a layer with sliding-window attention attends to.
    windowed_layers : int
        Number of layers with sliding-window attention.
    soft_cap : bool
        Whether a tanh limits the logits (Gemma 2).
    scaled_embedding : bool
        Whether the embedding is multiplied by a constant (Gemma).
    experts : Experts or None
    latent : Latent or None
    streams : int
        Copies of the residual, mixed before each half of a layer (hyper-connections of DeepSeek V4).
    mixers, feed_forwards : tuple of (int, description)
        Number of layers, and description of their first and second half, where the layers of a model differ in more
        than the fields above say. Empty: they follow from those fields.
    weights, weight_scaling : str or None
        Element type and scaling of quantised weights, from ``quantization_config``.
    packed : bool
        Whether products widen these weights, also where the device has units for their type.
    part_weights : tuple of PartWeights
        Parts of a layer whose weights have another type.
    kv_dtype : str or None
        Element type of the cache, from ``quantization_config``.
    context : int or None
        Positions that the model was made for (``max_position_embeddings``).
    prompt_only : str or None
        Class of a model that makes no output tokens, such as ``MistralModel`` (embeddings).
    left_out : tuple of str
        Parts of the configuration that are no part of the decoder, such as ``vision_config``.
    remarks : tuple of str
        What the description of the model leaves out or simplifies.
    """

    model_type: str
    layers: int
    hidden: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    gated: bool = True
    activation: str = "silu"
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norms: int = 2
    final_norm: bool = True
    qk_norm: bool = False
    positions: int = 0
    tied: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    window: int | None = None
    windowed_layers: int = 0
    soft_cap: bool = False
    scaled_embedding: bool = False
    experts: Experts | None = None
    latent: Latent | None = None
    streams: int = 1
    mixers: tuple[tuple[int, Mixer], ...] = ()
    feed_forwards: tuple[tuple[int, FeedForward], ...] = ()
    weights: str | None = None
    weight_scaling: str | None = None
    packed: bool = False
    part_weights: tuple[PartWeights, ...] = ()
    kv_dtype: str | None = None
    context: int | None = None
    prompt_only: str | None = None
    left_out: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()

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
