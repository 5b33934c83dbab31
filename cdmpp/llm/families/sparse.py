"""Sparse attention: DeepSeek V3.2 and V4, GLM 5."""

from __future__ import annotations

from dataclasses import replace

from cdmpp.llm.config import AttentionLayer, Compressed, Indexer, LLMConfig, Mixer
from cdmpp.llm.families.classic import read_deepseek
from cdmpp.llm.families.fields import Fields, common_fields, experts_of, layer_count

_INDEXER = "indexers are approximated by a product of all index keys, and a softmax for the choice"
_COMPRESSED = "compressed attention and mixed residuals are approximated by known operators"


def read_sparse_latent(f: Fields) -> LLMConfig:
    """DeepSeek V3.2, GLM 5: latent attention to the tokens that an indexer chooses; layers may share a choice."""
    config = read_deepseek(f)
    assert config.latent is not None
    indexer = Indexer(f.size("index_n_heads"), f.size("index_head_dim"), f.size("index_topk"))
    types = f.values.get("indexer_types")
    shared = types.count("shared") if isinstance(types, list) and len(types) == config.layers else 0
    mixers: list[tuple[int, Mixer]] = [(config.layers - shared, replace(config.latent, indexer=indexer))]
    if shared:
        mixers.append((shared, replace(config.latent, indexer=replace(indexer, own=False))))
    return replace(config, mixers=tuple(mixers), remarks=(_INDEXER,))


def read_deepseek_v4(f: Fields) -> LLMConfig:
    """DeepSeek V4: a window and compressed tokens, of which every other layer chooses some by an indexer."""
    layers, width = layer_count(f), f.size("moe_intermediate_size")
    experts = experts_of(f, layers)
    indexer = Indexer(f.size("index_n_heads"), f.size("index_head_dim"), f.size("index_topk"))
    layer = Compressed(
        heads=f.size("num_attention_heads"),
        head_dim=f.size("head_dim"),
        rope=f.size("qk_rope_head_dim"),
        q_rank=f.size("q_lora_rank"),
        o_groups=f.size("o_groups"),
        o_rank=f.size("o_lora_rank"),
        window=f.size("sliding_window"),
        ratio=0,
    )
    if layer.rope >= layer.head_dim:
        raise f.error("qk_rope_head_dim", f"{layer.rope} is not below head_dim={layer.head_dim}")
    if layer.heads % layer.o_groups:
        raise f.error("o_groups", f"{layer.o_groups} does not divide num_attention_heads={layer.heads}")
    ratios = f.sizes("compress_ratios")
    if len(ratios) < layers or min(ratios, default=0) < 0:
        raise f.error("compress_ratios", "is not a list with one ratio per layer")
    ratios = ratios[:layers]
    # Only the layers of the smallest ratio have so many compressed tokens that they choose.
    smallest = min((ratio for ratio in ratios if ratio), default=0)
    mixers = tuple(
        (ratios.count(ratio), replace(layer, ratio=ratio, indexer=indexer if ratio and ratio == smallest else None))
        for ratio in sorted(set(ratios))
    )
    return common_fields(
        f.changed(intermediate_size=width),
        experts=experts,
        streams=f.size("hc_mult", 1),
        mixers=mixers,
        remarks=(_COMPRESSED, _INDEXER),
    )


def read_minimax_m3(f: Fields) -> LLMConfig:
    """MiniMax M3: grouped heads; most layers attend to the blocks of tokens that an indexer chooses."""
    layers = layer_count(f)
    pattern = f.sizes("moe_layer_freq")
    moe_layers = sum(map(bool, pattern)) if len(pattern) == layers else layers - f.size("first_k_dense_replace", 0)
    width = f.size("moe_intermediate_size", f.size("intermediate_size"))
    experts = experts_of(f, moe_layers, count="num_local_experts", width=width, shared="shared_intermediate_size")
    config = common_fields(
        f.changed(intermediate_size=f.size("dense_intermediate_size", width), hidden_act="silu"),
        experts=experts,
        qk_norm=f.flag("use_qk_norm", True),
    )
    full = AttentionLayer(config.heads, config.kv_heads, config.head_dim)
    stated = f.values.get("sparse_attention_config")
    if not isinstance(stated, dict) or not stated.get("use_sparse_attention", True):
        return replace(config, mixers=((layers, full),))
    s = Fields(stated, f"{f.path}.sparse_attention_config")
    indexer = Indexer(
        s.size("sparse_num_index_heads"),
        s.size("sparse_index_dim"),
        s.size("sparse_topk_blocks") * s.size("sparse_block_size"),
    )
    frequency = s.sizes("sparse_attention_freq")
    sparse = sum(map(bool, frequency)) if len(frequency) == layers else layers
    halves = ((layers - sparse, full), (sparse, replace(full, indexer=indexer)))
    return replace(config, mixers=tuple(half for half in halves if half[0]), remarks=(_INDEXER,))


SPARSE = {
    "deepseek_v32": read_sparse_latent,
    "glm_moe_dsa": read_sparse_latent,
    "deepseek_v4": read_deepseek_v4,
    "deepseek_ref": read_deepseek_v4,
    "minimax_m3": read_minimax_m3,
    "minimax_m3_vl": read_minimax_m3,
}
