"""Decoders of equal layers: Llama, Mistral, Qwen 2 and 3, Gemma 1 to 3, GPT-2, OPT, MPT, DeepSeek V2 and V3."""

from __future__ import annotations

from typing import Any

from cdmpp.llm.config import Experts, Latent, LLMConfig
from cdmpp.llm.families.fields import Fields, checked_experts, common_fields, experts_of, layer_count, window_of


def _llama(f: Fields) -> LLMConfig:
    bias = f.flag("attention_bias", f.flag("bias", False))
    return common_fields(f, qkv_bias=bias, o_bias=bias, mlp_bias=f.flag("mlp_bias", False))


def _mistral(f: Fields) -> LLMConfig:
    return common_fields(f, window=window_of(f, layer_count(f)))


def _mixtral(f: Fields) -> LLMConfig:
    intermediate = f.size("intermediate_size")
    experts = Experts(
        f.size("num_local_experts", 8), f.per_token("num_experts_per_tok", 2), intermediate, 0, False, layer_count(f)
    )
    return common_fields(
        f, window=window_of(f, layer_count(f)), experts=checked_experts(f, experts, "num_local_experts")
    )


def _qwen(f: Fields, *, bias: bool, qk_norm: bool, experts: Experts | None = None, **fields: Any) -> LLMConfig:
    window: tuple[int | None, int] = (None, 0)
    if f.flag("use_sliding_window", False):
        window = window_of(f, max(0, layer_count(f) - f.size("max_window_layers", 28, minimum=0)))
    o_bias = f.flag("attention_bias", False)
    return common_fields(
        f, window=window, qkv_bias=bias or o_bias, o_bias=o_bias, qk_norm=qk_norm, experts=experts, **fields
    )


def _qwen2(f: Fields) -> LLMConfig:
    return _qwen(f, bias=True, qk_norm=False)


def _qwen3(f: Fields) -> LLMConfig:
    return _qwen(f, bias=False, qk_norm=True, head_dim=f.size("head_dim", 128))


def _qwen_experts(f: Fields, count: int, topk: int, intermediate: int, shared: int) -> Experts:
    """Experts of Qwen; layers that ``decoder_sparse_step`` or ``mlp_only_layers`` exclude are dense."""
    step, dense = f.size("decoder_sparse_step", 1), set(f.sizes("mlp_only_layers"))
    layers = sum(1 for layer in range(layer_count(f)) if (layer + 1) % step == 0 and layer not in dense)
    experts = Experts(
        f.size("num_experts", count),
        f.per_token("num_experts_per_tok", topk),
        f.size("moe_intermediate_size", intermediate),
        f.size("shared_expert_intermediate_size", shared, minimum=0) if shared else 0,
        bool(shared),
        layers,
    )
    return checked_experts(f, experts, "num_experts")


def _qwen2_moe(f: Fields) -> LLMConfig:
    return _qwen(f, bias=True, qk_norm=False, experts=_qwen_experts(f, 60, 4, 1408, 5632))


def _qwen3_moe(f: Fields) -> LLMConfig:
    experts = _qwen_experts(f, 128, 8, 768, 0)
    return _qwen(f, bias=False, qk_norm=True, experts=experts, head_dim=f.values.get("head_dim"))


def _gemma(f: Fields, *, heads: int | None = None, kv_heads: int | None = None, **fields: Any) -> LLMConfig:
    bias = f.flag("attention_bias", False)
    activation = f.values.get("hidden_activation") or f.values.get("hidden_act") or "gelu_pytorch_tanh"
    return common_fields(
        f,
        heads=f.size("num_attention_heads", heads),
        kv_heads=f.size("num_key_value_heads", kv_heads),
        head_dim=f.size("head_dim", 256),
        activation=str(activation)[:100],
        tied=f.flag("tie_word_embeddings", True),
        qkv_bias=bias,
        o_bias=bias,
        scaled_embedding=True,
        **fields,
    )


def _gemma2(f: Fields) -> LLMConfig:
    # Layers 0, 2, 4, ... have the window.
    window = window_of(f, (layer_count(f) + 1) // 2, default=4096)
    return _gemma(f, norms=4, window=window, soft_cap=f.values.get("final_logit_softcapping", 30.0) is not None)


def _gemma3(f: Fields) -> LLMConfig:
    # Every sixth layer attends to all tokens.
    pattern = f.size("sliding_window_pattern", 6)
    window = window_of(f, layer_count(f) - layer_count(f) // pattern, default=4096)
    f = f.changed(vocab_size=f.size("vocab_size", 262_208))
    return _gemma(f, heads=8, kv_heads=4, norms=4, qk_norm=True, window=window)


def _gpt2(f: Fields) -> LLMConfig:
    hidden = f.size("n_embd")
    names = {"num_hidden_layers": "n_layer", "hidden_size": "n_embd", "num_attention_heads": "n_head"}
    values = {name: f.size(source) for name, source in names.items()}
    return common_fields(
        f.changed(**values, num_key_value_heads=None, intermediate_size=f.size("n_inner", 4 * hidden)),
        gated=False,
        activation=f.text("activation_function", "gelu_new"),
        norm="layernorm",
        positions=f.size("n_positions", 1024),
        tied=f.flag("tie_word_embeddings", True),
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
    )


def _opt(f: Fields) -> LLMConfig:
    hidden, bias = f.size("hidden_size"), f.flag("enable_bias", True)
    if f.size("word_embed_proj_dim", hidden) != hidden:
        raise f.error(
            "word_embed_proj_dim",
            f"{f.values['word_embed_proj_dim']} differs from hidden_size={hidden}",
            "only models whose embedding has hidden_size columns are read (all OPT models but 350m)",
        )
    return common_fields(
        f.changed(intermediate_size=f.size("ffn_dim"), num_key_value_heads=None),
        gated=False,
        activation=f.text("activation_function", "relu"),
        norm="layernorm",
        final_norm=f.flag("do_layer_norm_before", True) and not f.flag("_remove_final_layer_norm", False),
        # OPT's table of positions has two further rows.
        positions=f.size("max_position_embeddings", 2048) + 2,
        tied=f.flag("tie_word_embeddings", True),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
    )


def read_deepseek(f: Fields) -> LLMConfig:
    layers = layer_count(f)
    count = f.values.get("n_routed_experts")
    experts = None
    if count is not None:
        first, step = f.size("first_k_dense_replace", 0, minimum=0), f.size("moe_layer_freq", 1)
        experts = experts_of(f, sum(1 for layer in range(layers) if layer >= first and layer % step == 0))
    latent = Latent(
        f.size("q_lora_rank", 0, minimum=0),
        f.size("kv_lora_rank"),
        f.size("qk_rope_head_dim"),
        f.size("qk_nope_head_dim"),
        f.size("v_head_dim"),
    )
    heads = f.size("num_attention_heads")
    return common_fields(f, kv_heads=heads, head_dim=latent.rope + latent.nope, experts=experts, latent=latent)


def _mpt(f: Fields) -> LLMConfig:
    names = {"num_hidden_layers": "n_layers", "hidden_size": "d_model", "num_attention_heads": "n_heads"}
    values = {name: f.size(source) for name, source in names.items()}
    bias = not f.flag("no_bias", False)
    attention = f.values.get("attn_config")
    alibi = isinstance(attention, dict) and attention.get("alibi") is True
    return common_fields(
        f.changed(
            **values, num_key_value_heads=None, intermediate_size=f.size("expansion_ratio", 4) * f.size("d_model")
        ),
        gated=False,
        activation="gelu",
        norm="layernorm",
        positions=0 if alibi else f.size("max_seq_len", 2048),
        tied=f.flag("tie_word_embeddings", True),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
    )


_QWEN2 = ("qwen2", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text", "qwen2_5_omni_text")
#: ``model_type`` -> how its configuration is read.
CLASSIC = {
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    **dict.fromkeys(_QWEN2, _qwen2),
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_vl": _qwen3,
    "qwen3_vl_text": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "qwen3_vl_moe": _qwen3_moe,
    "qwen3_vl_moe_text": _qwen3_moe,
    "qwen3_omni_moe_text": _qwen3_moe,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma3_text": _gemma3,
    "gpt2": _gpt2,
    "opt": _opt,
    "mpt": _mpt,
    "mimo": _qwen2,
    "internlm2": _llama,
    "phi3": _mistral,
    "deepseek_v2": read_deepseek,
    "deepseek_v3": read_deepseek,
    "kimi_k2": read_deepseek,
    "kimi_k25": read_deepseek,
}
