"""Parameters of a rank in training, and the memory of the fullest rank."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from cdmpp.predict.llm.config import Attention, Dense, FeedForward, Latent, LLMConfig, Mixer
from cdmpp.predict.llm.layout import Types
from cdmpp.predict.llm.memory import parameter_count
from cdmpp.predict.llm.tensors import (
    Tensor,
    activation_columns,
    embedding_tensors,
    feed_forward_tensors,
    mixer_tensors,
    output_tensors,
)
from cdmpp.predict.llm.training.layout import TrainingLayout

#: Share of the capacity that a recommended layout may need: the rest is left to the driver, buffers and fragmentation.
RECOMMENDED = 0.94
#: Bytes of master weight and two moments of Adam.
OPTIMIZER_BYTES = 12


@dataclass(frozen=True)
class Parameters:
    """Parameters on one rank, those of routed experts apart.

    Attributes
    ----------
    dense, experts : float
    """

    dense: float
    experts: float = 0.0

    @property
    def total(self) -> float:
        """All of them."""
        return self.dense + self.experts


def _on_rank(config: LLMConfig, layout: TrainingLayout, tensors: Iterable[Tensor]) -> Parameters:
    dense = experts = 0.0
    for tensor in tensors:
        if tensor.split == "experts":
            experts += tensor.elements / layout.ep
        else:
            dense += tensor.on_rank(config, layout.layer)
    return Parameters(dense, experts)


@dataclass(frozen=True)
class RankParameters:
    """Parameters of a mean layer, of the embedding and of the output layer on one rank."""

    layer: Parameters
    first: Parameters
    last: Parameters

    @classmethod
    def of(cls, config: LLMConfig, layout: TrainingLayout) -> RankParameters:
        """From the tensors of the model."""
        dense = experts = 0.0
        for count, mixer in config.first_halves:
            dense += count * _on_rank(config, layout, mixer_tensors(config, mixer)).dense
        for count, half in config.second_halves:
            own = _on_rank(config, layout, feed_forward_tensors(config, half))
            dense, experts = dense + count * own.dense, experts + count * own.experts
        layer = Parameters(dense / config.layers, experts / config.layers)
        first = _on_rank(config, layout, embedding_tensors(config))
        last = _on_rank(config, layout, output_tensors(config))
        if config.tied and layout.pp > 1:  # the last stage has a copy
            last = Parameters(last.dense + config.vocab * config.hidden / layout.tp)
        return cls(layer, first, last)

    def stage(self, layers: float, *, first: bool, last: bool) -> Parameters:
        """Of a stage."""
        dense = layers * self.layer.dense + first * self.first.dense + last * self.last.dense
        return Parameters(dense, layers * self.layer.experts)


def stage_layers(config: LLMConfig, layout: TrainingLayout) -> list[int]:
    """Layers of each stage.

    Equal numbers where they divide; otherwise each layer goes to the stage with the least work, as layouts that count
    embedding and loss as layers do.
    """
    stages = layout.pp
    if config.layers % (stages * layout.virtual_pp) == 0:
        return [config.layers // stages] * stages
    # Work by parameters; the embedding has little.
    layer, experts = RankParameters.of(config, layout).layer, config.experts
    share = 1.0 if experts is None else experts.topk * layout.ep / experts.count
    work = layer.dense + layer.experts * share
    head = config.vocab * config.hidden / layout.tp
    return list(_balanced(config.layers, stages, work, head))


@lru_cache(4096)
def _balanced(layers: int, stages: int, work: float, head: float) -> tuple[int, ...]:
    """Layers of each stage, each given to the stage with the least work; the first one has the embedding."""
    counts, load = [0] * stages, [0.05 * head, *[0.0] * (stages - 2), head] if stages > 1 else [head]
    loads = [(own, stage) for stage, own in enumerate(load)]
    heapq.heapify(loads)
    for _ in range(layers):
        own, least = loads[0]
        counts[least] += 1
        heapq.heapreplace(loads, (own + work, least))
    return tuple(counts)


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes on the rank that holds most.

    Attributes
    ----------
    weights, gradients, optimizer, activations : float
    device : float or None
        Capacity of the device, where it is published.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    device: float | None = None

    @property
    def total(self) -> float:
        """Sum of the parts."""
        return self.weights + self.gradients + self.optimizer + self.activations

    @property
    def fits(self) -> bool:
        """Whether the rank fits its device; true where the capacity is not published."""
        return self.device is None or self.total <= self.device

    @property
    def fits_with_margin(self) -> bool:
        """Whether a layout with this memory is recommended."""
        return self.device is None or self.total <= RECOMMENDED * self.device

    def to_dict(self) -> dict[str, float | None]:
        """Bytes by part, as whole numbers."""
        names = ("weights", "gradients", "optimizer", "activations")
        parts: dict[str, float | None] = {name: round(getattr(self, name)) for name in names}
        return {**parts, "total": sum(round(getattr(self, name)) for name in names), "device": self.device}


def training_memory(
    config: LLMConfig, layout: TrainingLayout, types: Types, gradient_bytes: float, device_bytes: float | None = None
) -> TrainingMemory:
    """Memory of the fullest rank.

    Notes
    -----
    The first stages hold the activations of as many micro-batches as are in flight. Activations are the 16-bit inputs
    of products (8-bit where products are), norms and attention; with recomputation the input of each layer and one
    whole layer. The logits are in float32.
    """
    own = RankParameters.of(config, layout)
    copies, expert_copies = layout.dp * layout.cp, layout.expert_copies
    weights, found = types.bytes, []
    logits = layout.tokens * config.vocab / layout.tp * (4.0 + types.bytes)
    whole, kept = (
        _layer_activations(config, layout, types, "none"),
        _layer_activations(config, layout, types, layout.recompute),
    )
    for stage, count in enumerate(stage_layers(config, layout)):
        last = stage == layout.pp - 1
        p = own.stage(count, first=stage == 0, last=last)
        shared = p.dense / copies + p.experts / expert_copies
        held = p.total if layout.sharding != "fsdp" else shared + 2 * own.layer.total
        gradients = p.total if layout.sharding != "fsdp" else shared + own.layer.total
        state = p.total if layout.sharding == "none" else shared
        chunk, chunks = count / layout.virtual_pp, _chunks_in_flight(layout, stage)
        activations = chunk * chunks * kept + (whole if layout.recompute == "full" else 0.0)
        found.append(
            TrainingMemory(
                held * weights,
                gradients * gradient_bytes,
                state * OPTIMIZER_BYTES,
                activations + (logits if last else 0.0),
                device_bytes,
            )
        )
    return max(found, key=lambda memory: memory.total)


def _chunks_in_flight(layout: TrainingLayout, stage: int) -> int:
    """Parts of the model whose activations a stage holds at once (one forward, one backward; interleaved or not)."""
    most = layout.micro_batches * layout.virtual_pp
    after = layout.pp - stage - 1
    if layout.virtual_pp == 1:
        return min(most, after + 1)
    return min(most, (layout.virtual_pp - 1) * layout.pp + 2 * after + 1)


def _layer_activations(config: LLMConfig, layout: TrainingLayout, types: Types, recompute: str) -> float:
    """Bytes that a mean layer keeps of one micro-batch."""
    rows, wide = layout.tokens, types.bytes
    narrow = wide if types.weights is None else 1.0
    stream = rows / layout.tp * config.hidden
    if recompute == "full":
        return stream * wide
    total = 0.0
    for count, mixer in config.first_halves:
        total += count * _mixer_activations(config, layout, mixer, stream, wide, narrow, recompute)
    for count, half in config.second_halves:
        total += count * _feed_forward_activations(config, layout, half, stream, wide, narrow, recompute)
    return total / config.layers


def _mixer_activations(
    config: LLMConfig, layout: TrainingLayout, mixer: Mixer, stream: float, wide: float, narrow: float, recompute: str
) -> float:
    rows, tp = layout.tokens, layout.tp
    heads = config.heads // tp
    if isinstance(mixer, Latent):
        # The expanded keys and values are computed again, as recipes of latent attention do.
        columns = mixer.q_rank + mixer.kv_rank + heads * (mixer.nope + mixer.rope + mixer.v_dim)
    elif isinstance(mixer, Attention):
        keys = max(1, mixer.kv_heads // tp)
        columns = mixer.heads // tp * (mixer.head_dim + mixer.values) + keys * (mixer.head_dim + mixer.values)
    else:
        columns = activation_columns(config, mixer, tp)
    norm = stream * narrow if recompute == "none" else 0.0
    return stream * wide + norm + rows * columns * wide


def _feed_forward_activations(
    config: LLMConfig,
    layout: TrainingLayout,
    half: FeedForward,
    stream: float,
    wide: float,
    narrow: float,
    recompute: str,
) -> float:
    rows, tp, gate = layout.tokens, layout.tp, 1 + config.gated
    norm = stream * narrow if recompute == "none" else 0.0
    behind = narrow if recompute == "none" else 0.0
    if isinstance(half, Dense):
        return stream * wide + norm + rows * half.columns / tp * (gate * wide + behind)
    routed = rows / tp * half.topk
    shared = rows * half.shared / tp * (gate * wide + behind)
    inputs = routed * (half.latent or config.hidden) * narrow
    return stream * wide + norm + shared + inputs + routed * half.intermediate * (gate * wide + behind)


def active_parameters(config: LLMConfig) -> float:
    """Parameters that a token passes, without the embedding and its positions."""
    total = float(parameter_count(config)) - sum(t.elements for t in embedding_tensors(config))
    if config.tied:
        total += config.vocab * config.hidden
    for count, half in config.second_halves:
        if not isinstance(half, Dense):
            routed = sum(t.elements for t in feed_forward_tensors(config, half) if t.split == "experts")
            total -= count * routed * (1 - half.topk / half.count)
    return total


def model_flops(config: LLMConfig, sequence: int) -> float:
    """Operations of a token's forward and backward pass: six for each parameter, and those of causal attention."""
    pairs = 0.0
    for count, mixer in config.first_halves:
        if isinstance(mixer, Latent):
            pairs += count * config.heads * (mixer.nope + mixer.rope + mixer.v_dim) * sequence / 2
        elif isinstance(mixer, Attention):
            window = min(sequence, mixer.window or sequence)
            seen = window - window * window / (2 * sequence)
            pairs += count * mixer.heads * (mixer.head_dim + mixer.values) * seen
    return 6 * active_parameters(config) + 6 * pairs
