"""Parameters of a language model, and the memory of the fullest rank: weights, cache and activations."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import InfeasibleError
from cdmpp.llm.config import Dense, FeedForward, LLMConfig
from cdmpp.llm.layout import Layout, Types, allowed_tp, expert_fits
from cdmpp.llm.tensors import (
    Tensor,
    activation_columns,
    cache_bytes,
    embedding_tensors,
    feed_forward_tensors,
    mixer_tensors,
    output_tensors,
)


def parameter_count(config: LLMConfig) -> int:
    """Number of parameters of the model, without parts for other inputs and for prediction of several tokens."""

    def total(tensors: Iterator[Tensor]) -> int:
        return sum(tensor.elements for tensor in tensors)

    halves = sum(count * total(mixer_tensors(config, half)) for count, half in config.first_halves)
    halves += sum(count * total(feed_forward_tensors(config, half)) for count, half in config.second_halves)
    return halves + total(embedding_tensors(config)) + total(output_tensors(config))


def model_size(config: LLMConfig) -> dict[str, float]:
    """Parameters and experts, by which profiles know the models of measured steps."""
    experts = 1 if config.experts is None else config.experts.count
    return {"parameters": float(parameter_count(config)), "experts": float(experts)}


Half = TypeVar("Half")


def weights_read(config: LLMConfig, layout: Layout, types: Types) -> float:
    """Bytes of the weights that a rank reads in a step at least: of the experts those of one token."""
    held = _held(config, layout, types)

    def chosen(half: FeedForward) -> float:
        if isinstance(half, Dense):
            return held(feed_forward_tensors(config, half))
        share = min(1.0, half.topk / half.count)
        tensors = list(feed_forward_tensors(config, half))
        routed = held(tensor for tensor in tensors if tensor.split == "experts")
        return held(iter(tensors)) - (1 - share) * routed

    read = held(output_tensors(config))
    if config.tied:
        read += held(iter([Tensor(config.vocab * config.hidden, "tp")]))
    read += _fullest(config.first_halves, layout.pp, lambda half: held(mixer_tensors(config, half)))
    return read + _fullest(config.second_halves, layout.pp, chosen)


def _fullest(halves: tuple[tuple[int, Half], ...], stages: int, size: Callable[[Half], float]) -> float:
    """Sum of the sizes of the halves of a stage that has the largest ones."""
    left, total = -(-sum(count for count, _ in halves) // stages), 0.0
    for largest, count in sorted(((size(half), count) for count, half in halves), reverse=True):
        taken = min(left, count)
        total, left = total + taken * largest, left - taken
    return total


#: Tokens whose activations are in memory at once: engines split a longer prefill into chunks.
ACTIVATION_TOKENS = 16_384
#: Bytes of one weight in training: 16-bit weight, 32-bit gradient, 32-bit master weight and two 32-bit moments of Adam.
TRAINING_BYTES = 18
#: Layouts of more devices are not searched.
MAX_GPUS = 1024
_GB = 1e9


@dataclass(frozen=True)
class Memory:
    """Bytes on the rank that holds most."""

    weights: float
    kv_cache: float
    activations: float
    device: float | None = None  # capacity, where it is published

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
    """Memory of the fullest rank; ``batch``: sequences over all replicas, ``tokens``: of one at its end.

    Weights: the layers of the fullest stage, with the embedding or the output layer. Cache: keys and values of
    ``tokens`` tokens (in layers with a window at most those of the window), or the latents, which every rank holds.
    Activations: input, residual and widest intermediate result of a layer for at most :data:`ACTIVATION_TOKENS` tokens,
    and the logits in float32. The engine's own buffers and fragmentation are not included.
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

    ``only``: "attention", "ffn" (which has no cache) or None, the whole model.
    """
    cache = 0.0 if only == "ffn" else _cache(config, layout, types, 1, tokens)
    if only is None:
        return _weights(config, layout, types), cache
    held = _held(config, layout, types)
    if only == "attention":
        return _fullest(config.first_halves, layout.pp, lambda half: held(mixer_tensors(config, half))), cache
    return _fullest(config.second_halves, layout.pp, lambda half: held(feed_forward_tensors(config, half))), cache


def check_memory(
    config: LLMConfig, layout: Layout, types: Types, batch: int, tokens: int, device_bytes: float | None, device: str
) -> Memory:
    """Memory of the fullest rank; a device without a published capacity is not checked.

    Raises InfeasibleError where it exceeds the device; the message has the smallest number of devices that hold the
    model.
    """
    memory = memory_of(config, layout, types, batch, tokens, device_bytes)
    if device_bytes is None or memory.total <= device_bytes:
        return memory
    sizes = {"weights": memory.weights, "cache": memory.kv_cache, "activations": memory.activations}
    parts = ", ".join(f"{name} {size / _GB:.1f}" for name, size in sizes.items())
    message = (
        f"the model needs {memory.total / _GB:.1f} GB on each {device} with {_named(layout)} ({parts}); "
        f"the device has {device_bytes / _GB:.1f} GB"
    )
    smallest = smallest_layout(config, layout.ep, types, batch, tokens, device_bytes, _stated_dp(layout))
    raise _does_not_fit(message, device, smallest)


def check_cache(
    config: LLMConfig, layout: Layout, types: Types, device: DeviceSpec, share: float, tokens: int
) -> float:
    """:func:`cache_tokens` for each of the batches that pass a replica's stages.

    Raises InfeasibleError where it is less than a sequence of ``tokens``; the message has the smallest number of
    devices that hold one.
    """

    def capacity(layout: Layout) -> float:
        return cache_tokens(config, layout, types, device.memory_bytes, share, tokens) / layout.pp

    held = capacity(layout)
    if device.memory_bytes is None or held >= tokens:
        return held
    weights = _weights(config, layout, types)
    message = (
        f"the cache of a replica holds {max(0, int(held)):,} tokens, a request has {tokens:,}: on each {device.name} "
        f"with {_named(layout)}, weights take {weights / _GB:.1f} GB; the engine uses {100 * share:.0f} % of "
        f"{device.memory_bytes / _GB:.1f} GB"
    )
    dp = _stated_dp(layout)

    def fits(layout: Layout) -> bool:
        return capacity(layout) >= tokens

    raise _does_not_fit(message, device.name, _smallest(config, layout.ep, dp, fits))


def _stated_dp(layout: Layout) -> int | None:
    return None if layout.dp == Layout(layout.tp, 1, layout.ep).dp else layout.dp


def _does_not_fit(message: str, device: str, smallest: Layout | None) -> InfeasibleError:
    hint = f"no layout of up to {MAX_GPUS} devices holds it; reduce batch, input or output"
    if smallest is not None:
        message += f"; at least {smallest.gpus} devices are needed"
        hint = f"the smallest number of {device} that holds it is {smallest.gpus}: " + _named(smallest)
    return InfeasibleError(message, path="tp", hint=hint)


def cache_tokens(
    config: LLMConfig, layout: Layout, types: Types, device_bytes: float | None, share: float, tokens: int
) -> float:
    """Tokens that the cache of a replica holds beside weights and activations; infinite where nothing is published.

    ``share``: part of the device that the engine uses. ``tokens``: of a sequence; layers with a window keep fewer of a
    long one.
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

    return _smallest(config, ep, dp, fits)


def _smallest(config: LLMConfig, ep: int, dp: int | None, fits: Callable[[Layout], bool]) -> Layout | None:
    fitting = []
    for tp in allowed_tp(config):
        degrees = [(1, dp)]
        if config.experts is not None:
            choices = ((ep, dp), *((n, dp) for n in range(1, tp + 1)), *((n, None) for n in range(1, tp + 1)))
            degrees = [(n, copies) for n, copies in choices if expert_fits(config, tp, n, copies)]
        kept, copies = degrees[0]
        most_stages = min(config.layers, MAX_GPUS // Layout(tp, 1, kept, copies).gpus)
        layouts = [Layout(tp, pp, kept, copies) for pp in range(1, most_stages + 1)]
        # No stage needs more memory with more stages.
        fitting += layouts[bisect_left(layouts, True, key=fits) :][:1]
    return min(fitting, key=lambda layout: (layout.gpus, layout.pp), default=None)


def _named(layout: Layout) -> str:
    given = {"tp": layout.tp, "pp": layout.pp, "ep": layout.ep, "dp": layout.dp}
    return ", ".join(f"{name}={degree}" for name, degree in given.items() if name in ("tp", "pp") or degree > 1)


def _held(config: LLMConfig, layout: Layout, types: Types) -> Callable[[Iterator[Tensor]], float]:
    """Bytes of tensors on one rank."""

    def held(tensors: Iterator[Tensor]) -> float:
        return sum(tensor.on_rank(config, layout) * types.weight_bytes(tensor.part) for tensor in tensors)

    return held


def _weights(config: LLMConfig, layout: Layout, types: Types) -> float:
    held = _held(config, layout, types)
    weights = _fullest(config.first_halves, layout.pp, lambda half: held(mixer_tensors(config, half)))
    weights += _fullest(config.second_halves, layout.pp, lambda half: held(feed_forward_tensors(config, half)))
    first, last = held(embedding_tensors(config)), held(output_tensors(config))
    if layout.pp == 1:
        return weights + first + last
    return weights + max(first, last + (first if config.tied else 0.0))


def _cache(config: LLMConfig, layout: Layout, types: Types, sequences: int, tokens: int) -> float:
    halves = config.first_halves
    layers = sum(count for count, _ in halves)
    stage = -(-layers // layout.pp)
    counts = [stage * count // layers for count, _ in halves]
    counts[0] += stage - sum(counts)
    sizes = (cache_bytes(config, half, types, layout.tp, tokens) for _, half in halves)
    return sequences * sum(count * size for count, size in zip(counts, sizes, strict=True))


def _activations(config: LLMConfig, layout: Layout, types: Types, sequences: int, tokens: int) -> float:
    rows, tp = min(sequences * tokens, ACTIVATION_TOKENS), layout.tp
    widest = max(activation_columns(config, half, tp) for _, half in config.first_halves)
    if config.dense_layers:
        widest = max(widest, (2 + config.gated) * config.intermediate // tp)
    if config.experts is not None:
        # A replica's tokens go to all experts; each rank has the rows of its own.
        columns = (2 + config.gated) * config.experts.intermediate // layout.expert_tp + config.hidden
        widest = max(widest, math.floor(config.experts.topk * layout.dp * columns / layout.ep))
    logits = sequences * config.vocab * 4.0
    return rows * ((1 + config.streams) * config.hidden + widest) * types.bytes + logits
