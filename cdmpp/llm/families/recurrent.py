"""Gated linear attention and state-space layers beside attention: Qwen 3.5, Nemotron-H, Kimi linear (K3)."""

from __future__ import annotations

from dataclasses import replace

from cdmpp.llm.config import AttentionLayer, Dense, Experts, FeedForward, Latent, LLMConfig, Mixer, Recurrent
from cdmpp.llm.families.fields import Fields, checked_experts, common_fields, experts_of, layer_count

_SCAN = "the scan of recurrent layers is approximated by reads and writes of its state, and by products of chunks"
_MLA_RESIDUAL = "residuals between blocks of layers (attn_res_block_size) are left out"
#: Characters of ``hybrid_override_pattern`` -> names in ``layers_block_type``.
_BLOCKS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


def _counted(f: Fields, name: str, known: tuple[str, ...], default: list[str]) -> list[str]:
    types = f.values.get(name, default)
    if not isinstance(types, list) or not all(isinstance(kind, str) for kind in types):
        raise f.error(name, "is not a list with one type per layer")
    unknown = [kind for kind in types if kind not in known]
    if unknown:
        raise f.error(name, f"{unknown[0][:80]!r} is not known", "one of: " + ", ".join(known))
    return types


def read_qwen3_5(f: Fields) -> LLMConfig:
    """Qwen 3.5, 3.6, Qwen3-Next: gated delta nets; every fourth layer has attention with an output gate."""
    layers, every = layer_count(f), f.size("full_attention_interval", 4)
    default = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(layers)]
    types = _counted(f, "layer_types", ("linear_attention", "full_attention"), default)
    if len(types) != layers:
        raise f.error("layer_types", "is not a list with one type per layer")
    experts = None
    if f.values.get("num_experts"):
        experts = Experts(
            f.size("num_experts"),
            f.per_token("num_experts_per_tok"),
            f.size("moe_intermediate_size"),
            f.size("shared_expert_intermediate_size", 0, minimum=0),
            True,
            layers,
        )
        experts = checked_experts(f, experts, "num_experts")
    width = f.size("intermediate_size", f.size("moe_intermediate_size", 1))
    config = common_fields(f.changed(intermediate_size=width), qk_norm=True, experts=experts, remarks=(_SCAN,))
    attention = AttentionLayer(config.heads, config.kv_heads, config.head_dim, gate=f.flag("attn_output_gate", True))
    delta = Recurrent(
        heads=f.size("linear_num_value_heads"),
        key_heads=f.size("linear_num_key_heads"),
        key_dim=f.size("linear_key_head_dim"),
        value_dim=f.size("linear_value_head_dim"),
        conv=f.size("linear_conv_kernel_dim", 4),
        scalars=2,
    )
    full = types.count("full_attention")
    halves: tuple[tuple[int, Mixer], ...] = ((full, attention), (layers - full, delta))
    return replace(config, mixers=tuple(half for half in halves if half[0]))


def read_nemotron_h(f: Fields) -> LLMConfig:
    """Nemotron-H: each layer is one of Mamba 2, attention, a dense or an expert feed-forward layer."""
    pattern = f.values.get("hybrid_override_pattern")
    letters = [_BLOCKS.get(letter, letter) for letter in pattern] if isinstance(pattern, str) else []
    types = _counted(f, "layers_block_type", tuple(_BLOCKS.values()), letters)
    if not 1 <= len(types) <= 10_000:
        raise f.error("hybrid_override_pattern", "missing", "a letter of " + ", ".join(_BLOCKS) + " for each layer")
    mamba, attention, dense, moe = (types.count(kind) for kind in _BLOCKS.values())
    experts = None
    if moe:
        latent = f.size("moe_latent_size", 0, minimum=0)
        experts = experts_of(f, moe, shared="moe_shared_expert_intermediate_size", latent=latent)
    config = common_fields(
        f.changed(num_hidden_layers=len(types)),
        head_dim=f.size("head_dim", f.size("attention_head_dim", 128)),
        gated=False,
        activation=f.text("mlp_hidden_act", "relu2"),
        experts=experts,
        remarks=(_SCAN,),
    )
    state = Recurrent(
        heads=f.size("mamba_num_heads"),
        key_heads=f.size("n_groups"),
        key_dim=f.size("ssm_state_size"),
        value_dim=f.size("mamba_head_dim"),
        conv=f.size("conv_kernel", 4),
        scalars=1,
        chunk=f.size("chunk_size", 128),
    )
    mixers: tuple[tuple[int, Mixer], ...] = (
        (attention, AttentionLayer(config.heads, config.kv_heads, config.head_dim)),
        (mamba, state),
    )
    halves: list[tuple[int, FeedForward]] = [(dense, Dense(config.intermediate))]
    if experts is not None:
        halves.append((moe, experts))
    return replace(
        config,
        mixers=tuple(half for half in mixers if half[0]),
        feed_forwards=tuple(half for half in halves if half[0]),
    )


def read_kimi_linear(f: Fields) -> LLMConfig:
    """Kimi linear (K3): Kimi's delta attention; some layers have latent attention. Experts may be narrower."""
    layers, heads = layer_count(f), f.size("num_attention_heads")
    stated = f.values.get("linear_attn_config")
    if not isinstance(stated, dict):
        raise f.error("linear_attn_config", "missing", "a config.json of this model_type has linear_attn_config")
    linear = Fields(stated, f"{f.path}.linear_attn_config")
    full = len(linear.sizes("full_attn_layers"))
    if full > layers:
        raise linear.error("full_attn_layers", f"has {full} layers of {layers}")
    latent = Latent(
        f.size("q_lora_rank", 0, minimum=0),
        f.size("kv_lora_rank"),
        f.size("qk_rope_head_dim"),
        f.size("qk_nope_head_dim"),
        f.size("v_head_dim", f.size("qk_nope_head_dim")),
        gate=f.flag("mla_use_output_gate", False),
    )
    dim, linear_heads = linear.size("head_dim"), linear.size("num_heads")
    delta = Recurrent(linear_heads, linear_heads, dim, dim, linear.size("short_conv_kernel_size", 4), 1, decay_rank=dim)
    width = f.size("moe_intermediate_size")
    experts = Experts(
        f.size("num_experts"),
        f.size("num_experts_per_token"),
        width,
        f.size("num_shared_experts", 0, minimum=0) * width,
        False,
        max(0, layers - f.size("first_k_dense_replace", 0, minimum=0)),
        f.size("routed_expert_hidden_size", 0, minimum=0),
    )
    mixers: tuple[tuple[int, Mixer], ...] = ((full, latent), (layers - full, delta))
    return common_fields(
        f,
        kv_heads=heads,
        head_dim=latent.rope + latent.nope,
        experts=checked_experts(f, experts, "num_experts"),
        latent=latent,
        mixers=tuple(half for half in mixers if half[0]),
        remarks=(_SCAN, _MLA_RESIDUAL) if f.values.get("attn_res_block_size") else (_SCAN,),
    )


RECURRENT = {
    "qwen3_next": read_qwen3_5,
    "qwen3_5": read_qwen3_5,
    "qwen3_5_text": read_qwen3_5,
    "qwen3_5_moe": read_qwen3_5,
    "qwen3_5_moe_text": read_qwen3_5,
    "nemotron_h": read_nemotron_h,
    "kimi_linear": read_kimi_linear,
    "kimi_k3": read_kimi_linear,
}
