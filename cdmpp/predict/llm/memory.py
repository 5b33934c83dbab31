"""Parameters of a language model, and the memory of the fullest rank: weights, cache and activations."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from cdmpp.errors import InfeasibleError
from cdmpp.predict.llm.config import LLMConfig
from cdmpp.predict.llm.layout import Layout, Types, allowed_tp, expert_fits

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
    part : str or None
        Part of a layer (:data:`cdmpp.predict.llm.config.WEIGHT_PARTS`) whose type of weights they have; None: they are
        never quantised.
    """

    elements: int
    split: Split = "none"
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


def attention_tensors(config: LLMConfig) -> Iterator[Tensor]:
    """Tensors of the attention half of one layer, with its norms."""
    hidden, heads, latent = config.hidden, config.heads, config.latent
    yield Tensor(_norm(config) * (2 if config.norms == 4 else 1))
    if latent is not None:
        queries = heads * (latent.nope + latent.rope)
        if latent.q_rank:
            yield Tensor(hidden * latent.q_rank, part="attention")
            yield Tensor(latent.q_rank)
        yield Tensor((latent.q_rank or hidden) * queries, "tp", "attention")
        yield Tensor(hidden * (latent.kv_rank + latent.rope), part="attention")
        yield Tensor(latent.kv_rank)
        yield Tensor(latent.kv_rank * heads * (latent.nope + latent.v_dim), "tp", "attention")
        yield Tensor(heads * latent.v_dim * hidden, "tp", "output")
        return
    columns, kv_columns = heads * config.head_dim, 2 * config.kv_heads * config.head_dim
    yield Tensor(hidden * columns, "tp", "attention")
    yield Tensor(hidden * columns, "tp", "output")
    yield Tensor(hidden * kv_columns, "kv", "attention")
    yield Tensor((columns + kv_columns) * config.qkv_bias + hidden * config.o_bias)
    if config.qk_norm:
        yield Tensor(2 * config.head_dim)


def dense_tensors(config: LLMConfig) -> Iterator[Tensor]:
    """Tensors of the feed-forward half of a dense layer, with its norms."""
    yield Tensor(_norm(config) * (2 if config.norms == 4 else 1))
    yield Tensor(_projections(config, config.intermediate), "tp", "dense")
    if config.mlp_bias:
        yield Tensor(config.intermediate * (1 + config.gated) + config.hidden)


def expert_tensors(config: LLMConfig) -> Iterator[Tensor]:
    """Tensors of the feed-forward half of a layer with experts, with its norms; none without experts."""
    experts = config.experts
    if experts is None:
        return
    yield Tensor(_norm(config) * (2 if config.norms == 4 else 1))
    yield Tensor(config.hidden * experts.count)
    yield Tensor(experts.count * _projections(config, experts.intermediate), "experts", "experts")
    if experts.shared:
        yield Tensor(_projections(config, experts.shared), "tp", "shared")
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


def weights_read(config: LLMConfig, layout: Layout, types: Types) -> float:
    """Bytes of the weights that a rank reads in a step at least: of the experts those of one token."""
    held, layers = _held(config, layout, types), -(-config.layers // layout.pp)
    read = layers * held(attention_tensors(config)) + held(output_tensors(config))
    if config.tied:
        read += held(iter([Tensor(config.vocab * config.hidden, "tp")]))
    if config.experts is None:
        return read + layers * held(dense_tensors(config))
    share = min(1.0, config.experts.topk / config.experts.count)
    return read + min(layers, config.moe_layers) * held(expert_tensors(config)) * share


def _norm(config: LLMConfig) -> int:
    return config.hidden * (2 if config.norm == "layernorm" else 1)


def _projections(config: LLMConfig, columns: int) -> int:
    return (2 + config.gated) * config.hidden * columns


#: Tokens whose activations are in memory at once: engines split a longer prefill into chunks.
ACTIVATION_TOKENS = 16_384
#: Bytes of one weight in training: 16-bit weight, 32-bit gradient, 32-bit master weight and two 32-bit moments of Adam.
TRAINING_BYTES = 18
#: Layouts of more devices are not searched.
MAX_GPUS = 1024
_GB = 1e9


@dataclass(frozen=True)
class Memory:
    """Bytes on the rank that holds most.

    Attributes
    ----------
    weights, kv_cache, activations : float
    device : float or None
        Capacity of the device, where it is published.
    """

    weights: float
    kv_cache: float
    activations: float
    device: float | None = None

    @property
    def total(self) -> float:
        """Sum of the parts."""
        return self.weights + self.kv_cache + self.activations

    def to_dict(self) -> dict[str, float | None]:
        """Bytes by part, as whole numbers."""
        parts = (self.weights, self.kv_cache, self.activations)
        whole = [round(part) for part in parts]
        return {
            "weights": whole[0],
            "kv_cache": whole[1],
            "activations": whole[2],
            "total": sum(whole),
            "device": self.device,
        }


def memory_of(
    config: LLMConfig, layout: Layout, types: Types, batch: int, tokens: int, device_bytes: float | None = None
) -> Memory:
    """Memory of the fullest rank.

    Parameters
    ----------
    batch : int
        Sequences over all replicas of the attention.
    tokens : int
        Tokens of a sequence at its end: prompt and output.
    device_bytes : float, optional
        Capacity of the device.

    Notes
    -----
    Weights: the layers of the fullest stage, with the embedding or the output layer. Cache: keys and values of
    ``tokens`` tokens (in layers with a window at most those of the window), or the latents, which every rank holds.
    Activations: input, residual and widest intermediate result of a layer for at most :data:`ACTIVATION_TOKENS`
    tokens, and the logits in float32. The engine's own buffers and fragmentation are not included.
    """
    sequences = -(-batch // layout.dp)
    return Memory(
        _weights(config, layout, types),
        _cache(config, layout, types, sequences, tokens),
        _activations(config, layout, types, sequences, tokens),
        device_bytes,
    )


def part_memory(config: LLMConfig, layout: Layout, types: Types, only: str | None, tokens: int) -> tuple[float, float]:
    """Bytes of the fullest rank for a step or a part of its layers: weights, and cache of one sequence of a replica.

    Parameters
    ----------
    only : {"attention", "ffn"} or None
        Part of the layers; None: the whole model. The feed-forward part has no cache.
    """
    cache = 0.0 if only == "ffn" else _cache(config, layout, types, 1, tokens)
    if only is None:
        return _weights(config, layout, types), cache
    held = _held(config, layout, types)
    layers = -(-config.layers // layout.pp)
    if only == "attention":
        return layers * held(attention_tensors(config)), cache
    return _ffn_weights(config, layers, held), cache


def check_memory(
    config: LLMConfig, layout: Layout, types: Types, batch: int, tokens: int, device_bytes: float | None, device: str
) -> Memory:
    """Memory of the fullest rank; a device without a published capacity is not checked.

    Raises
    ------
    InfeasibleError
        It exceeds the device; the message has the smallest number of devices that hold the model.
    """
    memory = memory_of(config, layout, types, batch, tokens, device_bytes)
    if device_bytes is None or memory.total <= device_bytes:
        return memory
    sizes = {"weights": memory.weights, "cache": memory.kv_cache, "activations": memory.activations}
    parts = ", ".join(f"{name} {size / _GB:.1f}" for name, size in sizes.items())
    dp = None if layout.dp == Layout(layout.tp, 1, layout.ep).dp else layout.dp
    smallest = smallest_layout(config, layout.ep, types, batch, tokens, device_bytes, dp)
    if smallest is None:
        hint = f"no layout of up to {MAX_GPUS} devices holds it; reduce batch, input or output"
    else:
        hint = f"the smallest number of {device} that holds it is {smallest.gpus}: " + _named(smallest)
    raise InfeasibleError(
        f"the model needs {memory.total / _GB:.1f} GB on each {device} with {_named(layout)} ({parts}); "
        f"the device has {device_bytes / _GB:.1f} GB"
        + ("" if smallest is None else f"; at least {smallest.gpus} devices are needed"),
        path="tp",
        hint=hint,
    )


def cache_tokens(
    config: LLMConfig, layout: Layout, types: Types, device_bytes: float | None, share: float, tokens: int
) -> float:
    """Tokens that the cache of a replica holds beside weights and activations; infinite where nothing is published.

    Parameters
    ----------
    share : float
        Part of the device that the engine uses.
    tokens : int
        Of a sequence: layers with a window keep fewer of a long one.
    """
    if device_bytes is None:
        return float("inf")
    fixed = _weights(config, layout, types) + _activations(config, layout, types, 1, ACTIVATION_TOKENS)
    return (share * device_bytes - fixed) / (_cache(config, layout, types, 1, tokens) / tokens)


def smallest_layout(
    config: LLMConfig, ep: int, types: Types, batch: int, tokens: int, device_bytes: float, dp: int | None = None
) -> Layout | None:
    """The layout of fewest devices that holds the model, then of fewest stages; None without one.

    ``ep`` and ``dp`` are kept where they fit ``tp``; otherwise ``ep`` is the smallest degree that does.
    """

    def fits(layout: Layout) -> bool:
        return memory_of(config, layout, types, batch, tokens).total <= device_bytes

    found = []
    for tp in allowed_tp(config):
        degrees = [(1, dp)]
        if config.experts is not None:
            choices = ((ep, dp), *((n, dp) for n in range(1, tp + 1)), *((n, None) for n in range(1, tp + 1)))
            degrees = [(n, copies) for n, copies in choices if expert_fits(config, tp, n, copies)]
        kept, copies = degrees[0]
        most = min(config.layers, MAX_GPUS // Layout(tp, 1, kept, copies).gpus)
        layouts = [Layout(tp, pp, kept, copies) for pp in range(1, most + 1)]
        # No stage needs more memory with more stages.
        found += layouts[bisect_left(layouts, True, key=fits) :][:1]
    return min(found, key=lambda layout: (layout.gpus, layout.pp), default=None)


def _named(layout: Layout) -> str:
    given = {"tp": layout.tp, "pp": layout.pp, "ep": layout.ep, "dp": layout.dp}
    return ", ".join(f"{name}={degree}" for name, degree in given.items() if name in ("tp", "pp") or degree > 1)


def _held(config: LLMConfig, layout: Layout, types: Types) -> Callable[[Iterator[Tensor]], float]:
    """Bytes of tensors on one rank."""

    def held(tensors: Iterator[Tensor]) -> float:
        return sum(tensor.on_rank(config, layout) * types.weight_bytes(tensor.part) for tensor in tensors)

    return held


def _ffn_weights(config: LLMConfig, layers: int, held: Callable[[Iterator[Tensor]], float]) -> float:
    expert_layers = min(layers, config.moe_layers)
    dense_layers = min(layers - expert_layers, config.dense_layers) if config.experts else layers
    return expert_layers * held(expert_tensors(config)) + dense_layers * held(dense_tensors(config))


def _weights(config: LLMConfig, layout: Layout, types: Types) -> float:
    held, layers = _held(config, layout, types), -(-config.layers // layout.pp)
    weights = layers * held(attention_tensors(config)) + _ffn_weights(config, layers, held)
    first, last = held(embedding_tensors(config)), held(output_tensors(config))
    if layout.pp == 1:
        return weights + first + last
    return weights + max(first, last + (first if config.tied else 0.0))


def _cache(config: LLMConfig, layout: Layout, types: Types, sequences: int, tokens: int) -> float:
    layers = -(-config.layers // layout.pp)
    if config.latent is not None:
        return sequences * tokens * layers * (config.latent.kv_rank + config.latent.rope) * types.cache_bytes
    columns = 2 * max(1, config.kv_heads // layout.tp) * config.head_dim
    windowed = layers * config.windowed_layers // config.layers
    kept = (layers - windowed) * tokens + windowed * min(tokens, config.window or tokens)
    return sequences * kept * columns * types.cache_bytes


def _activations(config: LLMConfig, layout: Layout, types: Types, sequences: int, tokens: int) -> float:
    rows, tp = min(sequences * tokens, ACTIVATION_TOKENS), layout.tp
    heads = config.heads // tp
    if config.latent is not None:
        widest = heads * 2 * (config.latent.nope + config.latent.rope + config.latent.v_dim)
    else:
        widest = (2 * heads + 2 * max(1, config.kv_heads // tp)) * config.head_dim
    if config.dense_layers:
        widest = max(widest, (2 + config.gated) * config.intermediate // tp)
    if config.experts is not None:
        # A replica's tokens go to all experts; each rank has the rows of its own.
        columns = (2 + config.gated) * config.experts.intermediate // layout.expert_tp + config.hidden
        widest = max(widest, config.experts.topk * layout.dp * columns // layout.ep)
    logits = sequences * config.vocab * 4.0
    return rows * (2 * config.hidden + widest) * types.bytes + logits
