"""Dimensions of a language model, as the fields of a decoder that :mod:`cdmpp.predict.llm.operators` needs."""

from __future__ import annotations

from dataclasses import dataclass
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
    count, topk : int
        Routed experts of a layer, and experts of a token.
    intermediate : int
        Columns between the projections of one routed expert.
    shared : int
        Columns of the experts that every token passes, together; 0 for none.
    shared_gate : bool
        Whether a gate of one column weights the shared experts (Qwen2-MoE).
    layers : int
        Layers with experts; the remaining layers are dense.
    """

    count: int
    topk: int
    intermediate: int
    shared: int
    shared_gate: bool
    layers: int


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
    """

    q_rank: int
    kv_rank: int
    rope: int
    nope: int
    v_dim: int


@dataclass(frozen=True)
class LLMConfig:
    """Dimensions of a decoder; :func:`cdmpp.predict.llm.read_config` makes one from a ``config.json`` of Hugging Face.

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
    weights: str | None = None
    weight_scaling: str | None = None
    packed: bool = False
    part_weights: tuple[PartWeights, ...] = ()
    kv_dtype: str | None = None
    context: int | None = None
    left_out: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def moe_layers(self) -> int:
        """Number of layers with experts."""
        return 0 if self.experts is None else self.experts.layers

    @property
    def dense_layers(self) -> int:
        """Number of layers with a dense feed-forward part."""
        return self.layers - self.moe_layers
