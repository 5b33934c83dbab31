"""Operators and collectives of one inference step of a language model, as a serving engine runs them.

Biases are added in the products (their cost is not separate), residuals in the norms, and the activation of a gated
feed-forward layer is one kernel with its product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal, Unpack

from cdmpp.devices.spec import DeviceSpec
from cdmpp.llm.config import Dense, Experts, LLMConfig, Mixer
from cdmpp.llm.layout import Layout, Types
from cdmpp.llm.mixers import STAND_INS, add_mixer
from cdmpp.llm.options import TypeOptions, with_options
from cdmpp.llm.step_builder import StepBuilder, StepPart
from cdmpp.llm.steps import Decode, Prefill, Step, attention_batches
from cdmpp.programs.operators import OperatorSpec

__all__ = ["Decode", "Prefill", "Step", "StepPart", "attention_batches", "step_operators"]

#: Activations that are operators of the same name; any other one costs as much as gelu.
_ACTIVATIONS = {"relu": "relu", "relu2": "relu", "silu": "silu", "tanh": "tanh"}


#: Parts of a prefill and of a decode step that only its own sequences pass, and those behind the last layer.
PREFILL_PARTS = ("attention", "window_attention", "kv_b_proj", *STAND_INS)
DECODE_PARTS = ("attention", "window_attention", "k_absorb", "v_expand", *STAND_INS)
OUTPUT_PARTS = ("lm_head", "logits_all_gather", "logits_soft_cap", "sampling")
#: Routing of real prompts: equal loads would make 32 tokens of 8 experts each read all 256 experts, measured steps of
#: DeepSeek-R1 read about as many as this distribution does.
ROUTING = "power_law_1.01"
#: Half of the layers, or the drafts of a decode step.
Only = Literal["attention", "ffn", "drafts"]


@with_options(TypeOptions)
def step_operators(
    config: LLMConfig,
    layout: Layout,
    step: Step,
    *,
    device: DeviceSpec | None = None,
    only: Only | None = None,
    **options: Unpack[TypeOptions],
) -> list[StepPart]:
    """Operators and collectives of one step, in order, as one rank runs them.

    With several pipeline stages the list holds the work of all stages and the transfers between them: the sum of
    its latencies is the time of one batch from the first stage to the last. With several replicas of the attention
    (``layout.dp``) it is that of the replica with most sequences.

    Parameters
    ----------
    config : LLMConfig
    layout : Layout
    step : Prefill or Decode
        Of the whole batch.
    dtype : str
        Type of activations.
    weights : str, optional
        Type of quantised weights (:class:`cdmpp.llm.layout.Types`). The router, the embedding and the output
        layer are never quantised.
    kv_dtype : str, optional
        Type of the cache.
    device : DeviceSpec, optional
        Where it has no units for the type of the weights, products widen them.
    only : {"attention", "ffn", "drafts"}, optional
        The attention or the feed-forward halves of all layers, without embedding, output and transfers; or the drafts
        of the next tokens.

    Returns
    -------
    list of StepPart
        Parts of equal layers are merged: ``count`` is the number of runs in the step.

    Raises
    ------
    FieldError
        The model cannot be split as the layout says, or has no such types.
    """
    layout.check(config)
    types = Types.of_options(config, options, device)
    local = replica_step(step, layout)
    b = StepBuilder(config, layout, types, local.tokens)
    if only is None:
        _embedding(b)
    if only in (None, "attention"):
        for count, mixer in config.first_halves:
            with b.times(count):
                _attention_half(b, mixer, local)
    if only in (None, "ffn"):
        for count, half in config.second_halves:
            with b.times(count):
                if isinstance(half, Dense):
                    _dense(b, half)
                else:
                    _experts(b, half, step.tokens)
    if only is None:
        if layout.pp > 1:
            b.transfer("stage_transfer", layout.pp - 1)
        _output(b, local.tokens if isinstance(local, Decode) else local.batch)
    if only in (None, "drafts") and isinstance(local, Decode) and local.drafted:
        _drafts(b, local)
    return merged(b.parts)


def merged(parts: Sequence[StepPart]) -> list[StepPart]:
    """The parts with those of the same name and program added up, in order of their first appearance."""
    parts_of: dict[tuple[str, OperatorSpec], StepPart] = {}
    for part in parts:
        key = part.name, part.program
        parts_of[key] = replace(part, count=parts_of[key].count + part.count) if key in parts_of else part
    return list(parts_of.values())


#: Products of up to this many sequences are compared with those of more.
MAX_PADDED = 64
_PADDED = ("linear", "bmm", "moe")


def padded_decode(step: Decode, parts_of: Callable[[Decode], list[StepPart]]) -> list[StepPart]:
    """Parts of a decode step, its products with those of slightly more sequences (:attr:`StepPart.padded`)."""
    return with_padding(
        parts_of(step), [parts_of(Decode(n, step.cached, drafted=step.drafted)) for n in padded_sizes(step.batch)]
    )


def padded_sizes(batch: int) -> list[int]:
    """Numbers of sequences that the products of a decode step are compared with."""
    if batch > MAX_PADDED:
        return []
    power = 1 << batch.bit_length()
    return sorted({batch + 1, power}) if batch < 8 else [power]


def with_padding(parts: list[StepPart], larger: Sequence[list[StepPart]]) -> list[StepPart]:
    """Parts of a step, its products with those of larger steps."""
    return [
        replace(part, padded=tuple(other.program for other in others if other.program != part.program))
        if part.program.operator in _PADDED
        else part
        for part, *others in zip(parts, *larger, strict=True)
    ]


def replica_step(step: Step, layout: Layout) -> Step:
    """The step of the replica of the attention that has most sequences."""
    if layout.dp == 1:
        return step
    if isinstance(step, Prefill):
        return Prefill(step.lengths[:: layout.dp], step.past_len)
    return Decode(-(-step.batch // layout.dp), step.cached, drafted=step.drafted)


def _embedding(b: StepBuilder) -> None:
    config = b.config
    b.add("embedding", "embedding", rows=b.tokens, cols=config.hidden, table_rows=-(-config.vocab // b.layout.tp))
    if config.positions:
        b.add("position_embedding", "embedding", rows=b.tokens, cols=config.hidden, table_rows=config.positions)
        b.vector("position_add", "add", config.hidden)
    if config.scaled_embedding:
        b.vector("embedding_scale", "mul_scalar", config.hidden)
    b.all_reduce("embedding_all_reduce")


def _attention_half(b: StepBuilder, mixer: Mixer, step: Step) -> None:
    config = b.config
    b.norm("attention_norm", config.hidden, residual=True)
    b.mix_streams("attention_streams")
    add_mixer(b, mixer, step)
    b.all_reduce("attention_all_reduce")
    if config.norms == 4:
        b.norm("attention_output_norm", config.hidden)


def _dense(b: StepBuilder, half: Dense) -> None:
    config = b.config
    b.norm("mlp_norm", config.hidden, residual=True)
    b.mix_streams("mlp_streams")
    _feed_forward(b, "", -(-half.columns // b.layout.tp))
    b.all_reduce("mlp_all_reduce")
    if config.norms == 4:
        b.norm("mlp_output_norm", config.hidden)


def _feed_forward(b: StepBuilder, prefix: str, columns: int) -> None:
    config, part = b.config, "shared" if prefix else "dense"
    if config.gated:
        b.linear(f"{prefix}gate_up_proj", 2 * columns, config.hidden, part)
        b.vector(f"{prefix}activation", "silu_and_mul", columns)
    else:
        b.linear(f"{prefix}up_proj", columns, config.hidden, part)
        b.vector(f"{prefix}activation", _ACTIVATIONS.get(config.activation, "gelu"), columns)
    b.linear(f"{prefix}down_proj", config.hidden, columns, part)


def _experts(b: StepBuilder, experts: Experts, tokens: int) -> None:
    """``tokens``: of all replicas of the attention."""
    config, layout = b.config, b.layout
    b.norm("mlp_norm", config.hidden, residual=True)
    b.mix_streams("mlp_streams")
    b.linear("router", experts.count, config.hidden, None)
    # One kernel in serving engines. The tables hold the unfused form, softmax and top-k by PyTorch (`moe_gating`, 55 us
    # for 128 experts on the H800), so a softmax of the same size stands for it.
    b.vector("router_topk", "softmax", experts.count, dtype="float32")
    if experts.shared:
        _feed_forward(b, "shared_", -(-experts.shared // layout.tp))
        if experts.shared_gate:
            b.linear("shared_gate", 1, config.hidden, None)
            b.vector("shared_gate_mul", "mul", config.hidden)
    if experts.latent:
        b.linear("expert_latent_proj", experts.latent, config.hidden, None)
    # An expected number: as many rows, each token with the whole number of experts that comes closest to them.
    rows, whole = tokens * experts.topk, {max(1, math.floor(experts.topk)), math.ceil(experts.topk)}
    topk = min(whole, key=lambda k: (abs(k * max(1, round(rows / k)) - rows), -k))
    b.exchange("expert_dispatch", b.types.exchanged_bytes, experts.topk, cols=experts.latent)
    b.add(
        "experts",
        "moe",
        **b.types.product("experts"),
        tokens=max(1, round(rows / topk)),
        hidden=experts.latent or config.hidden,
        intermediate=experts.intermediate,
        experts=experts.count,
        topk=topk,
        balance=ROUTING,
        tp=layout.expert_tp,
        ep=layout.ep,
        **({} if config.gated else {"gated": False}),
    )
    b.exchange("expert_combine", b.types.bytes, experts.topk, back=True, cols=experts.latent)
    if experts.latent:
        b.linear("expert_output_proj", config.hidden, experts.latent, None)
    if experts.shared:
        b.vector("shared_add", "add", config.hidden)
    b.all_reduce("mlp_all_reduce")
    if config.norms == 4:
        b.norm("mlp_output_norm", config.hidden)


def _drafts(b: StepBuilder, step: Decode) -> None:
    """Drafts of the next tokens, one after the other: a layer like the last one, and the output layer (DeepSeek V3)."""
    config, b.tokens = b.config, step.batch
    draft = replace(step, drafted=0)
    with b.times(step.drafted):
        b.vector("draft_norm", config.norm, 2 * config.hidden)
        b.linear("draft_proj", config.hidden, 2 * config.hidden)
        _attention_half(b, config.first_halves[-1][1], draft)
        half = config.second_halves[-1][1]
        if isinstance(half, Dense):
            _dense(b, half)
        else:
            _experts(b, half, draft.batch * b.layout.dp)
        _output(b, draft.batch)


def _output(b: StepBuilder, batch: int) -> None:
    """Logits of ``batch`` tokens, and the choice of the next ones."""
    config, tp = b.config, b.layout.tp
    if config.final_norm:
        b.norm("final_norm", config.hidden, residual=True)
    if config.prompt_only is not None:
        return
    b.tokens = batch
    b.linear("lm_head", -(-config.vocab // tp), config.hidden, None)
    b.all_gather("logits_all_gather", config.vocab)
    if config.soft_cap:
        b.vector("logits_soft_cap", "tanh", config.vocab)
    b.vector("sampling", "argmax", config.vocab)
