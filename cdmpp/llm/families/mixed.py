"""Layers that differ: windows beside full attention, dense layers beside experts, blocks of several widths."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from cdmpp.llm.config import AttentionLayer, Dense, Experts, LLMConfig
from cdmpp.llm.families.fields import Fields, checked_experts, common_fields, experts_of, layer_count, window_of


def read_gpt_oss(f: Fields) -> LLMConfig:
    """gpt-oss: every other layer has a window; sinks of the attention cost nothing."""
    layers, bias = layer_count(f), f.flag("attention_bias", True)
    width = f.size("intermediate_size")
    experts = Experts(f.size("num_local_experts", 128), f.per_token("num_experts_per_tok", 4), width, 0, False, layers)
    window = window_of(f, (layers + 1) // 2, default=128)
    checked = checked_experts(f, experts, "num_local_experts")
    return common_fields(f, window=window, qkv_bias=bias, o_bias=bias, mlp_bias=True, experts=checked)


def read_llama4(f: Fields) -> LLMConfig:
    """Llama 4: chunks of attention in three of four layers; one routed and one shared expert in every n-th layer."""
    layers, step = layer_count(f), f.size("interleave_moe_layer_step", 1)
    width = f.size("intermediate_size")
    experts = Experts(
        f.size("num_local_experts", 16), f.per_token("num_experts_per_tok", 1), width, width, False, layers // step
    )
    rotated = f.sizes("no_rope_layers")
    chunked = sum(map(bool, rotated)) if len(rotated) == layers else layers - layers // 4
    chunk = f.values.get("attention_chunk_size")
    window = (None, 0) if chunk is None else (f.size("attention_chunk_size"), chunked)
    return common_fields(
        f.changed(intermediate_size=f.size("intermediate_size_mlp", width)),
        window=window,
        experts=checked_experts(f, experts, "num_local_experts"),
    )


def read_minimax_m2(f: Fields) -> LLMConfig:
    """MiniMax M2: experts in every layer."""
    width = f.size("intermediate_size")
    shared = f.size("shared_intermediate_size", 0, minimum=0)
    experts = Experts(
        f.size("num_local_experts"), f.per_token("num_experts_per_tok"), width, shared, False, layer_count(f)
    )
    return common_fields(
        f, qk_norm=f.flag("use_qk_norm", True), experts=checked_experts(f, experts, "num_local_experts")
    )


def read_glm4_moe(f: Fields) -> LLMConfig:
    """GLM 4.5 to 4.7: the first layers are dense."""
    experts = experts_of(f, max(0, layer_count(f) - f.size("first_k_dense_replace", 0, minimum=0)))
    bias = f.flag("attention_bias", False)
    return common_fields(f, qk_norm=f.flag("use_qk_norm", False), qkv_bias=bias, experts=experts)


def read_step3p7(f: Fields) -> LLMConfig:
    """Step 3.7: windows in three of four layers; the first layers are dense."""
    layers = layer_count(f)
    moe_layers = max(0, layers - f.size("first_k_dense_replace", 0, minimum=0))
    experts = experts_of(f, moe_layers, count="num_experts", shared="share_expert_dim")
    return common_fields(f, window=window_of(f, layers - layers // 4), experts=experts)


def read_mimo_v2(f: Fields) -> LLMConfig:
    """MiMo V2: most layers have a window and more key-value heads; values are narrower than keys."""
    layers = layer_count(f)
    pattern, frequency = f.sizes("hybrid_layer_pattern"), f.sizes("moe_layer_freq")
    if len(pattern) != layers or len(frequency) != layers:
        name = "moe_layer_freq" if len(pattern) == layers else "hybrid_layer_pattern"
        raise f.error(name, "is not a list with one number per layer")
    config = common_fields(f, experts=experts_of(f, sum(map(bool, frequency))))
    full = AttentionLayer(config.heads, config.kv_heads, config.head_dim, f.size("v_head_dim", config.head_dim))
    windowed = AttentionLayer(
        f.size("swa_num_attention_heads", config.heads),
        f.size("swa_num_key_value_heads", config.kv_heads),
        f.size("swa_head_dim", config.head_dim),
        f.size("swa_v_head_dim", full.values),
        f.size("sliding_window"),
    )
    if (windowed.heads, windowed.heads % windowed.kv_heads) != (full.heads, 0):
        raise f.error("swa_num_attention_heads", f"differs from num_attention_heads={full.heads}")
    count = sum(map(bool, pattern))
    halves = ((layers - count, full), (count, windowed))
    return replace(config, mixers=tuple(half for half in halves if half[0]))


def read_gemma4(f: Fields) -> LLMConfig:
    """Gemma 4: full attention has wider heads and one projection for keys and values; experts beside a dense layer."""
    layers = layer_count(f)
    window, windowed_layers = window_of(f, layers - layers // 6, default=1024)
    experts = None
    if f.flag("enable_moe_block", False):
        experts = Experts(
            f.size("num_experts"),
            f.per_token("top_k_experts"),
            f.size("moe_intermediate_size"),
            f.size("intermediate_size"),
            False,
            layers,
        )
        experts = checked_experts(f, experts, "num_experts")
    config = common_fields(
        f,
        head_dim=f.size("head_dim", 256),
        activation="gelu_pytorch_tanh",
        tied=f.flag("tie_word_embeddings", True),
        norms=4,
        qk_norm=True,
        scaled_embedding=True,
        soft_cap=f.values.get("final_logit_softcapping") is not None,
        experts=experts,
    )
    unread = [n for n in ("hidden_size_per_layer_input", "num_kv_shared_layers") if f.size(n, 0, minimum=0)]
    remarks = tuple(f"{name} is left out" for name in unread)
    halves = (
        (
            layers - windowed_layers,
            AttentionLayer(
                config.heads,
                f.size("num_global_key_value_heads", config.kv_heads),
                f.size("global_head_dim", config.head_dim),
                shared_kv=f.flag("attention_k_eq_v", False),
            ),
        ),
        (windowed_layers, AttentionLayer(config.heads, config.kv_heads, config.head_dim, window=window)),
    )
    return replace(config, mixers=tuple(half for half in halves if half[0]), remarks=remarks)


def read_nemotron_nas(f: Fields) -> LLMConfig:
    """Nemotron by architecture search: a layer may lack its attention, and has its own columns."""
    blocks, heads, hidden = f.values.get("block_configs"), f.size("num_attention_heads"), f.size("hidden_size")
    if not isinstance(blocks, list) or len(blocks) != layer_count(f):
        raise f.error("block_configs", "is not a list with one block per layer")
    attentions, columns = Counter[int](), Counter[int]()
    for i, block in enumerate(blocks):
        attention = block.get("attention") if isinstance(block, dict) else None
        ffn = block.get("ffn") if isinstance(block, dict) else None
        if not isinstance(attention, dict) or not isinstance(ffn, dict):
            raise f.error(f"block_configs.{i}", "has no attention or no ffn")
        if attention.get("replace_with_linear") or ffn.get("replace_with_linear"):
            raise f.error(f"block_configs.{i}", "replace_with_linear is not supported")
        if not attention.get("no_op"):
            group = Fields(attention, f"{f.path}.block_configs.{i}.attention").size("n_heads_in_group")
            if heads % group:
                raise f.error(f"block_configs.{i}.attention.n_heads_in_group", f"{group} does not divide {heads} heads")
            attentions[heads // group] += 1
        if not ffn.get("no_op"):
            factor = ffn.get("ffn_mult")
            if not isinstance(factor, int | float) or isinstance(factor, bool) or not 0 < factor <= 1000:
                raise f.error(f"block_configs.{i}.ffn.ffn_mult", f"{str(factor)[:80]!r} is not allowed")
            columns[-(-int(2 * factor * hidden / 3) // 256) * 256] += 1
    if not attentions or not columns:
        raise f.error("block_configs", "has no attention or no feed-forward layer")
    config = common_fields(f.changed(num_key_value_heads=max(attentions), intermediate_size=max(columns)))
    return replace(
        config,
        mixers=tuple((n, AttentionLayer(heads, kv_heads, config.head_dim)) for kv_heads, n in attentions.items()),
        feed_forwards=tuple((n, Dense(width)) for width, n in columns.items()),
    )


MIXED = {
    "gpt_oss": read_gpt_oss,
    "llama4": read_llama4,
    "llama4_text": read_llama4,
    "minimax_m2": read_minimax_m2,
    "glm4_moe": read_glm4_moe,
    "step3p7": read_step3p7,
    "mimo_v2_flash": read_mimo_v2,
    "gemma4": read_gemma4,
    "gemma4_text": read_gemma4,
    "nemotron-nas": read_nemotron_nas,
}
