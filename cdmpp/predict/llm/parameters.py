"""Parameters of a language model, and how a layout divides them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from cdmpp.predict.llm.config import LLMConfig
from cdmpp.predict.llm.layout import Layout

#: How a tensor is divided: over the ranks of a layer, by key-value heads, over the ranks of the experts, or not.
Split = Literal["tp", "kv", "experts", "none"]


@dataclass(frozen=True)
class Tensor:
    """Parameters of one layer, or of the model, that are divided alike.

    Attributes
    ----------
    elements : int
        Number over all ranks.
    split : str
    quantised : bool
        Whether a quantised model stores them in the type of its weights.
    """

    elements: int
    split: Split = "none"
    quantised: bool = False

    def on_rank(self, config: LLMConfig, layout: Layout) -> float:
        """Number of elements on one rank."""
        if self.split == "tp":
            return self.elements / layout.tp
        if self.split == "kv":
            return self.elements / min(layout.tp, config.kv_heads)
        if self.split == "experts":
            return self.elements / (layout.ep * layout.expert_tp)
        return self.elements


def attention_tensors(config: LLMConfig) -> Iterator[Tensor]:
    """Tensors of the attention half of one layer, with its norms."""
    hidden, heads, latent = config.hidden, config.heads, config.latent
    yield Tensor(_norm(config) * (2 if config.norms == 4 else 1))
    if latent is not None:
        queries = heads * (latent.nope + latent.rope)
        if latent.q_rank:
            yield Tensor(hidden * latent.q_rank, quantised=True)
            yield Tensor(latent.q_rank)
        yield Tensor((latent.q_rank or hidden) * queries, "tp", True)
        yield Tensor(hidden * (latent.kv_rank + latent.rope), quantised=True)
        yield Tensor(latent.kv_rank)
        yield Tensor(latent.kv_rank * heads * (latent.nope + latent.v_dim), "tp", True)
        yield Tensor(heads * latent.v_dim * hidden, "tp", True)
        return
    columns, kv_columns = heads * config.head_dim, 2 * config.kv_heads * config.head_dim
    yield Tensor(2 * hidden * columns, "tp", True)
    yield Tensor(hidden * kv_columns, "kv", True)
    yield Tensor((columns + kv_columns) * config.qkv_bias + hidden * config.o_bias)
    if config.qk_norm:
        yield Tensor(2 * config.head_dim)


def dense_tensors(config: LLMConfig) -> Iterator[Tensor]:
    """Tensors of the feed-forward half of a dense layer, with its norms."""
    yield Tensor(_norm(config) * (2 if config.norms == 4 else 1))
    yield Tensor(_projections(config, config.intermediate), "tp", True)
    if config.mlp_bias:
        yield Tensor(config.intermediate * (1 + config.gated) + config.hidden)


def expert_tensors(config: LLMConfig) -> Iterator[Tensor]:
    """Tensors of the feed-forward half of a layer with experts, with its norms; none without experts."""
    experts = config.experts
    if experts is None:
        return
    yield Tensor(_norm(config) * (2 if config.norms == 4 else 1))
    yield Tensor(config.hidden * experts.count)
    yield Tensor(experts.count * _projections(config, experts.intermediate), "experts", True)
    if experts.shared:
        yield Tensor(_projections(config, experts.shared), "tp", True)
        yield Tensor(config.hidden * experts.shared_gate)


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


def parameter_count(config: LLMConfig) -> int:
    """Number of parameters of the model, without parts for other inputs and for prediction of several tokens."""

    def total(tensors: Iterator[Tensor]) -> int:
        return sum(tensor.elements for tensor in tensors)

    layers = config.layers * total(attention_tensors(config)) + config.dense_layers * total(dense_tensors(config))
    layers += config.moe_layers * total(expert_tensors(config))
    return layers + total(embedding_tensors(config)) + total(output_tensors(config))


def _norm(config: LLMConfig) -> int:
    return config.hidden * (2 if config.norm == "layernorm" else 1)


def _projections(config: LLMConfig, columns: int) -> int:
    return (2 + config.gated) * config.hidden * columns
