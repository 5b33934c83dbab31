"""Parameters of a rank in training, and the memory of the fullest rank."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from cdmpp.llm.config import AttentionLayer, Dense, FeedForward, Latent, LLMConfig, Mixer
from cdmpp.llm.engines.profile import TrainingLoop
from cdmpp.llm.layout import Types
from cdmpp.llm.memory import parameter_count
from cdmpp.llm.tensors import (
    Tensor,
    activation_columns,
    embedding_tensors,
    feed_forward_tensors,
    mixer_tensors,
    output_tensors,
)
from cdmpp.llm.training.layout import TrainingLayout

#: Share of the capacity that a recommended layout may need: the rest is left to the driver, buffers and fragmentation.
RECOMMENDED = 0.94


@dataclass(frozen=True)
class Parameters:
    """Parameters on one rank, those of routed experts apart."""

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
            tensors = _on_rank(config, layout, feed_forward_tensors(config, half))
            dense, experts = dense + count * tensors.dense, experts + count * tensors.experts
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
    loads = [(work_of_stage, stage) for stage, work_of_stage in enumerate(load)]
    heapq.heapify(loads)
    for _ in range(layers):
        work_of_stage, lightest = loads[0]
        counts[lightest] += 1
        heapq.heapreplace(loads, (work_of_stage + work, lightest))
    return tuple(counts)


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes on the rank that holds most."""

    weights: float
    gradients: float
    optimizer: float
    activations: float  # with what the allocator reserves beyond all tensors
    device: float | None = None  # capacity, where it is published

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
    config: LLMConfig, layout: TrainingLayout, types: Types, loop: TrainingLoop, device_bytes: float | None = None
) -> TrainingMemory:
    """Memory of the fullest rank.

    The first stages hold the activations of as many micro-batches as are in flight. Activations are the 16-bit inputs
    of products (8-bit where products are), norms and attention; with recomputation the input of each layer, and beside
    them one whole layer or the copies of the logits, which are not held at once. ``fsdp`` with stages gathers the
    weights of a stage once, and reduces its gradients behind the last micro-batch.
    """
    parameters = RankParameters.of(config, layout)
    copies, expert_copies = layout.dp * layout.cp, layout.expert_copies
    stages = []
    logits = layout.tokens * config.vocab / layout.tp * loop.logit_bytes
    spread = layout.tp if loop.backward_gathers == 1 else 1
    if spread > 1:  # the gathered input of the output layer, and its gradient
        logits += 2 * layout.tokens * config.hidden * types.bytes
    again = {"none": {}, "selective": loop.selective, "full": None}[layout.recompute]
    kept = _layer_activations(config, layout, types, again, spread)
    whole = _layer_activations(config, layout, types, {}, spread) if again is None else 0.0
    for stage, count in enumerate(stage_layers(config, layout)):
        p = parameters.stage(count, first=stage == 0, last=stage == layout.pp - 1)
        shared = p.dense / copies + p.experts / expert_copies
        held = gradients = p.total
        if layout.sharding == "fsdp":
            gathered = p.total if layout.pp > 1 else parameters.layer.total
            held, gradients = shared + (gathered if layout.pp > 1 else 2 * gathered), shared + gathered
        state = p.total if layout.sharding == "none" else shared
        chunk, chunks = count / layout.virtual_pp, _chunks_in_flight(layout, stage)
        activations = chunk * chunks * kept + max(whole, logits if stage == layout.pp - 1 else 0.0)
        lasting = (held * types.bytes, gradients * loop.gradient_bytes, state * loop.optimizer_bytes)
        activations += (loop.memory_factor - 1) * (sum(lasting) + activations)
        stages.append(TrainingMemory(*lasting, activations, device_bytes))
    return max(stages, key=lambda memory: memory.total)


def _chunks_in_flight(layout: TrainingLayout, stage: int) -> int:
    """Parts of the model whose activations a stage holds at once (one forward, one backward; interleaved or not)."""
    micro_batches = layout.micro_batches * layout.virtual_pp
    after = layout.pp - stage - 1
    if layout.virtual_pp == 1:
        return min(micro_batches, after + 1)
    return min(micro_batches, (layout.virtual_pp - 1) * layout.pp + 2 * after + 1)


#: Shares of parts that are computed again, by name; None: whole layers.
Again = Mapping[str, float] | None


def _layer_activations(config: LLMConfig, layout: TrainingLayout, types: Types, again: Again, spread: int) -> float:
    """Bytes that a mean layer keeps of one micro-batch; the results of norms on ``spread`` ranks are gathered."""
    wide = types.bytes
    narrow = wide if types.weights is None else 1.0
    stream = layout.tokens / layout.tp * config.hidden
    if again is None:
        return stream * wide
    total = 0.0
    for count, mixer in config.first_halves:
        norm = spread * stream * narrow * (1 - again.get("attention_norm", 0.0))
        total += count * (stream * wide + norm + _mixer_activations(config, layout, mixer, wide, again))
    for count, half in config.second_halves:
        # The input of this half is the result of the projection behind attention.
        norm = spread * stream * narrow * (1 - again.get("mlp_norm", 0.0))
        feed_forward_bytes = _feed_forward_activations(config, layout, half, wide, narrow, again)
        total += count * (stream * wide * (1 - again.get("o_proj", 0.0)) + norm + feed_forward_bytes)
    return total / config.layers


def _mixer_activations(
    config: LLMConfig, layout: TrainingLayout, mixer: Mixer, wide: float, again: Mapping[str, float]
) -> float:
    tp, heads = layout.tp, config.heads // layout.tp
    if isinstance(mixer, Latent):
        # The expanded keys and values are computed again, as recipes of latent attention do.
        columns: float = mixer.q_rank + mixer.kv_rank + heads * (mixer.nope + mixer.rope + mixer.v_dim)
    elif isinstance(mixer, AttentionLayer):
        keys, queries = max(1, mixer.kv_heads // tp), mixer.heads // tp
        projected = queries * mixer.head_dim + keys * (mixer.head_dim + mixer.values)
        columns = projected * (1 - again.get("qkv_proj", 0.0)) + queries * mixer.values
    else:
        columns = activation_columns(config, mixer, tp)
    return layout.tokens * columns * wide


def _feed_forward_activations(
    config: LLMConfig, layout: TrainingLayout, half: FeedForward, wide: float, narrow: float, again: Mapping[str, float]
) -> float:
    rows, tp, gate = layout.tokens, layout.tp, (1 + config.gated) * wide
    behind = narrow * (1 - again.get("activation", 0.0))
    columns = gate * (1 - again.get("gate_up_proj", 0.0)) + behind
    if isinstance(half, Dense):
        return rows * half.columns / tp * columns
    routed = rows / tp * half.topk
    inputs = routed * (half.latent or config.hidden) * narrow
    return rows * half.shared / tp * columns + inputs + routed * half.intermediate * (gate + behind)


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
        elif isinstance(mixer, AttentionLayer):
            window = min(sequence, mixer.window or sequence)
            seen = window - window * window / (2 * sequence)
            pairs += count * mixer.heads * (mixer.head_dim + mixer.values) * seen
    return 6 * active_parameters(config) + 6 * pairs
