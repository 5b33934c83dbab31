"""Tensors of the halves of a layer: number of parameters, division over ranks, and cache of a sequence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from cdmpp.llm.config import (
    AttentionLayer,
    Compressed,
    Dense,
    FeedForward,
    Indexer,
    Latent,
    LLMConfig,
    Mixer,
    Recurrent,
)
from cdmpp.llm.layout import Layout, Types

#: How a tensor is divided: over the ranks of a layer, by key-value heads, over the ranks of the experts, or not.
Split = Literal["tp", "kv", "experts", "none"]


@dataclass(frozen=True)
class Tensor:
    """Parameters of one layer, or of the model, that are divided alike."""

    elements: int  # number over all ranks
    split: Split = "none"
    # Part of a layer (:data:`cdmpp.llm.config.WEIGHT_PARTS`) whose type of weights they have; None: they are never
    # quantised.
    part: str | None = None

    def on_rank(self, config: LLMConfig, layout: Layout) -> float:
        """Number of elements on one rank."""
        if self.split == "tp":
            return self.elements / layout.tp
        if self.split == "kv":
            return self.elements / min(layout.tp, config.kv_heads)
        if self.split == "experts":
            return self.elements / (layout.ep * layout.expert_tp)
        return self.elements


def mixer_tensors(config: LLMConfig, mixer: Mixer) -> Iterator[Tensor]:
    """Tensors of the attention half of one layer, with its norms."""
    yield Tensor(_norm(config) * (2 if config.norms == 4 else 1))
    yield from _stream_tensors(config)
    if isinstance(mixer, AttentionLayer):
        yield from _attention(config, mixer)
    elif isinstance(mixer, Latent):
        yield from _latent(config, mixer)
    elif isinstance(mixer, Compressed):
        yield from _compressed(config, mixer)
    else:
        yield from _recurrent(config, mixer)


def feed_forward_tensors(config: LLMConfig, half: FeedForward) -> Iterator[Tensor]:
    """Tensors of the feed-forward half of one layer, with its norms."""
    yield Tensor(_norm(config) * (2 if config.norms == 4 else 1))
    yield from _stream_tensors(config)
    if isinstance(half, Dense):
        yield Tensor(_projections(config, half.columns), "tp", "dense")
        if config.mlp_bias:
            yield Tensor(half.columns * (1 + config.gated) + config.hidden)
        return
    yield Tensor(config.hidden * half.count)
    yield Tensor(half.count * _projections(config, half.intermediate, half.latent), "experts", "experts")
    if config.mlp_bias:
        yield Tensor(half.count * (half.intermediate * (1 + config.gated) + config.hidden), "experts")
    yield Tensor(2 * config.hidden * half.latent)
    if half.shared:
        yield Tensor(_projections(config, half.shared), "tp", "shared")
        yield Tensor(config.hidden * half.shared_gate)


def _attention(config: LLMConfig, mixer: AttentionLayer) -> Iterator[Tensor]:
    hidden, columns = config.hidden, mixer.heads * mixer.head_dim
    keys, values = mixer.kv_heads * mixer.head_dim, mixer.kv_heads * mixer.values
    yield Tensor(hidden * columns * (1 + mixer.gate), "tp", "attention")
    yield Tensor(hidden * mixer.heads * mixer.values, "tp", "output")
    yield Tensor(hidden * (keys + values * (not mixer.shared_kv)), "kv", "attention")
    yield Tensor((columns + keys + values) * config.qkv_bias + hidden * config.o_bias)
    if config.qk_norm:
        yield Tensor(2 * mixer.head_dim)
    yield from _indexer(mixer.indexer, hidden, hidden)


def _latent(config: LLMConfig, latent: Latent) -> Iterator[Tensor]:
    hidden, heads = config.hidden, config.heads
    queries = heads * (latent.nope + latent.rope)
    if latent.q_rank:
        yield Tensor(hidden * latent.q_rank, part="attention")
        yield Tensor(latent.q_rank)
    yield Tensor((latent.q_rank or hidden) * queries, "tp", "attention")
    yield Tensor(hidden * (latent.kv_rank + latent.rope), part="attention")
    yield Tensor(latent.kv_rank)
    yield Tensor(latent.kv_rank * heads * (latent.nope + latent.v_dim), "tp", "attention")
    yield Tensor(hidden * heads * latent.v_dim * latent.gate, "tp", "attention")
    yield Tensor(heads * latent.v_dim * hidden, "tp", "output")
    yield from _indexer(latent.indexer, hidden, latent.q_rank or hidden)


def _compressed(config: LLMConfig, mixer: Compressed) -> Iterator[Tensor]:
    hidden, columns = config.hidden, mixer.heads * mixer.head_dim
    yield Tensor(hidden * (mixer.q_rank + mixer.head_dim), part="attention")
    yield Tensor(mixer.q_rank + mixer.head_dim)
    yield Tensor(mixer.q_rank * columns, "tp", "attention")
    yield Tensor(columns * mixer.o_rank, "tp", "output")
    yield Tensor(mixer.o_groups * mixer.o_rank * hidden, "tp", "output")
    yield Tensor(hidden * compressor_columns(mixer, mixer.head_dim))
    if mixer.indexer is not None:
        yield from _indexer(mixer.indexer, hidden, mixer.q_rank, compressor_columns(mixer, mixer.indexer.dim))


def compressor_columns(mixer: Compressed, dim: int) -> int:
    """Columns of the products that make compressed tokens: values and weights, twice where chunks overlap."""
    return 0 if not mixer.ratio else 2 * dim * (2 if mixer.indexer is not None else 1)


def _indexer(indexer: Indexer | None, hidden: int, queries: int, keys: int | None = None) -> Iterator[Tensor]:
    """``queries``: columns that index queries are made of; ``keys``: columns of the products of index keys."""
    if indexer is not None and indexer.own:
        yield Tensor(queries * indexer.heads * indexer.dim, part="attention")
        yield Tensor(hidden * ((indexer.dim if keys is None else keys) + indexer.heads))


def projected_columns(mixer: Recurrent) -> int:
    """Columns of the first product of a recurrent layer: queries, keys, values, output gate and scalars."""
    return mixer.convolved + mixer.inner + mixer.scalars * mixer.heads


def _recurrent(config: LLMConfig, mixer: Recurrent) -> Iterator[Tensor]:
    hidden = config.hidden
    yield Tensor(hidden * projected_columns(mixer), "tp", "attention")
    yield Tensor(mixer.inner * hidden, "tp", "output")
    yield Tensor(mixer.convolved * mixer.conv + 3 * mixer.heads + mixer.inner, "tp")
    yield Tensor(mixer.decay_rank * (hidden + mixer.heads * mixer.key_dim))


def cache_bytes(config: LLMConfig, mixer: Mixer, types: Types, tp: int, tokens: int) -> float:
    """Bytes that one layer keeps of a sequence of ``tokens`` tokens, on one rank.

    Latents, compressed tokens and index keys are on every rank.
    """
    if isinstance(mixer, Recurrent):
        return (4.0 * mixer.state + types.bytes * mixer.convolved * (mixer.conv - 1)) / tp
    indexer = mixer.indexer
    index = indexer.dim if indexer is not None and indexer.own else 0
    if isinstance(mixer, Latent):
        return tokens * (mixer.kv_rank + mixer.rope + index) * types.cache_bytes
    if isinstance(mixer, Compressed):
        compressed = tokens // mixer.ratio if mixer.ratio else 0
        return (min(tokens, mixer.window) * mixer.head_dim + compressed * (mixer.head_dim + index)) * types.cache_bytes
    columns = max(1, mixer.kv_heads // tp) * (mixer.head_dim + mixer.values) + index
    return min(tokens, mixer.window or tokens) * columns * types.cache_bytes


def activation_columns(config: LLMConfig, mixer: Mixer, tp: int) -> int:
    """Columns of the results of the first products of an attention half and of its attention, on one rank."""
    if isinstance(mixer, Recurrent):
        return -(-(projected_columns(mixer) + mixer.inner) // tp)
    if isinstance(mixer, Latent):
        return config.heads // tp * 2 * (mixer.nope + mixer.rope + mixer.v_dim)
    if isinstance(mixer, Compressed):
        return 2 * mixer.heads // tp * mixer.head_dim
    return (2 * mixer.heads // tp + 2 * max(1, mixer.kv_heads // tp)) * mixer.head_dim


def _stream_tensors(config: LLMConfig) -> Iterator[Tensor]:
    if config.streams > 1:
        yield Tensor(config.streams * (2 + config.streams) * config.streams * config.hidden)


def embedding_tensors(config: LLMConfig) -> Iterator[Tensor]:
    """Tensors in front of the first layer."""
    yield Tensor(config.vocab * config.hidden, "tp")
    yield Tensor(config.positions * config.hidden)


def output_tensors(config: LLMConfig) -> Iterator[Tensor]:
    """Tensors behind the last layer; the weight of a tied output layer is that of the embedding."""
    if config.final_norm:
        yield Tensor(_norm(config))
    if not config.tied:
        yield Tensor(config.vocab * config.hidden, "tp")


def _norm(config: LLMConfig) -> int:
    return config.hidden * (2 if config.norm == "layernorm" else 1)


def _projections(config: LLMConfig, columns: int, hidden: int = 0) -> int:
    return (2 + config.gated) * (hidden or config.hidden) * columns
