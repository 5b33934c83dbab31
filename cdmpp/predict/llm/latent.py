"""Operators of multi-head latent attention (DeepSeek V2, V3)."""

from __future__ import annotations

from collections.abc import Sequence

from cdmpp.predict.llm.config import Latent
from cdmpp.predict.llm.parts import StepBuilder


def latent_attention(b: StepBuilder, latent: Latent, calls: Sequence[tuple[str, dict[str, int]]]) -> None:
    """Add the operators of one layer's attention, with its projections.

    Prefill expands the latents to keys and values of each head. Decode multiplies the queries with the expansion
    instead (the absorbed form), and reads the latents of the cache. The compressed queries, keys and values are not
    split over ranks; heads are.

    Parameters
    ----------
    calls : sequence of (str, dict)
        Calls of the attention: "prefill" or "decode", and batch and lengths.
    """
    hidden, heads = b.config.hidden, b.config.heads // b.layout.tp
    compressed = latent.kv_rank + latent.rope
    queries = heads * (latent.nope + latent.rope)
    if latent.q_rank:
        b.linear("qkv_a_proj", latent.q_rank + compressed, hidden)
        b.norm("q_a_norm", latent.q_rank)
        b.linear("q_b_proj", queries, latent.q_rank)
    else:
        b.linear("q_proj", queries, hidden)
        b.linear("kv_a_proj", compressed, hidden)
    b.norm("kv_a_norm", latent.kv_rank)
    b.vector("rotary", "rotary_embedding", (heads + 1) * latent.rope, head_dim=latent.rope)
    b.vector("kv_cache_save", "kv_cache_save", compressed)
    sizes = {"heads": heads, "latent": latent.kv_rank, "rope": latent.rope, "nope": latent.nope, "v_dim": latent.v_dim}
    for operator, call in calls:
        if operator == "prefill":
            b.linear("kv_b_proj", heads * (latent.nope + latent.v_dim), latent.kv_rank)
            b.add("attention", "mla_prefill", **call, **sizes)
        else:
            b.add("k_absorb", "bmm", batch=heads, m=b.tokens, n=latent.kv_rank, k=latent.nope)
            b.add("attention", "mla_decode", **call, **sizes)
            b.add("v_expand", "bmm", batch=heads, m=b.tokens, n=latent.v_dim, k=latent.kv_rank)
    b.linear("o_proj", hidden, heads * latent.v_dim)
