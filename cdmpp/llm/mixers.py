"""Operators of the attention half of a layer: one function for each description in :mod:`cdmpp.llm.config`."""

from __future__ import annotations

from cdmpp.llm.config import AttentionLayer, Compressed, Indexer, Latent, Mixer, Recurrent
from cdmpp.llm.step_builder import StepBuilder
from cdmpp.llm.steps import Decode, Prefill, Step, attention_calls
from cdmpp.llm.tensors import compressor_columns, projected_columns

#: Parts that each recurrent or sparse layer has once.
EAGER_LAYERS = ("conv1d", "index_topk")
#: Parts for which no operator exists: one of about their cost stands for them. They belong to the sequences of a phase.
STAND_INS = ("index_scores", "index_topk", "conv1d", "scan", "scan_scores", "scan_values", "scan_state", "scan_output")


def add_mixer(b: StepBuilder, mixer: Mixer, step: Step) -> None:
    """Add the operators between the norm and the all-reduce of an attention half."""
    if isinstance(mixer, AttentionLayer):
        _attention(b, mixer, step)
    elif isinstance(mixer, Latent):
        _latent(b, mixer, step)
    elif isinstance(mixer, Compressed):
        _compressed(b, mixer, step)
    else:
        _recurrent(b, mixer, step)


def _queries(step: Step) -> int:
    """Query tokens of a sequence in decode: they read the cache once, as further heads do."""
    return 1 + step.drafted if isinstance(step, Decode) else 1


def _attention(b: StepBuilder, mixer: AttentionLayer, step: Step) -> None:
    config, tp = b.config, b.layout.tp
    heads, kv_heads = mixer.heads // tp, max(1, mixer.kv_heads // tp)
    keys, values = kv_heads * mixer.head_dim, kv_heads * mixer.values
    queries = heads * mixer.head_dim * (1 + mixer.gate)
    b.linear("qkv_proj", queries + keys + values * (not mixer.shared_kv), config.hidden)
    if config.qk_norm:
        b.add("qk_norm", config.norm, rows=b.tokens * (heads + kv_heads), cols=mixer.head_dim)
    if not config.positions:
        b.vector("rotary", "rotary_embedding", (heads + kv_heads) * mixer.head_dim, head_dim=mixer.head_dim)
    b.vector("kv_cache_save", "kv_cache_save", keys + values)
    limit = mixer.window
    if mixer.indexer is not None:
        _indexer(b, mixer.indexer, step, config.hidden)
        limit = mixer.indexer.topk
    # Attention over keys and values of different widths costs as much as one over their mean.
    width = -(-(mixer.head_dim + mixer.values) // 2)
    name = "attention" if mixer.window is None else "window_attention"
    for operator, call in attention_calls(step, limit):
        sizes = {"heads": heads * _queries(step), "kv_heads": kv_heads, "head_dim": width}
        b.add(name, f"attention_{operator}", **call, **sizes, **b.cache)
    if mixer.gate:
        b.vector("attention_gate", "mul", heads * mixer.values)
    b.linear("o_proj", config.hidden, heads * mixer.values, "output")


def _latent(b: StepBuilder, latent: Latent, step: Step) -> None:
    """Latent attention.

    Prefill expands the latents to keys and values of each head. Decode multiplies the queries with the expansion
    instead (the absorbed form), and reads the latents of the cache. The compressed queries, keys and values are not
    split over ranks; heads are.
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
    limit = None
    if latent.indexer is not None:
        _indexer(b, latent.indexer, step, latent.q_rank or hidden)
        limit = latent.indexer.topk
    sizes = {"heads": heads, "latent": latent.kv_rank, "rope": latent.rope, "nope": latent.nope, "v_dim": latent.v_dim}
    calls = attention_calls(step, limit)
    if isinstance(step, Prefill):
        # Cached latents are expanded, too.
        for _, call in calls if limit is None else [("prefill", {"batch": step.batch, "past_len": step.past_len})]:
            rows = b.tokens + call["batch"] * call.get("past_len", 0)
            b.linear("kv_b_proj", heads * (latent.nope + latent.v_dim), latent.kv_rank, rows=rows)
        for _, call in calls:
            b.add("attention", "mla_prefill", **call, **sizes, **b.cache)
    else:
        b.add("k_absorb", "bmm", batch=heads, m=b.tokens, n=latent.kv_rank, k=latent.nope)
        for _, call in calls:
            b.add("attention", "mla_decode", **call, **{**sizes, "heads": heads * _queries(step)}, **b.cache)
        b.add("v_expand", "bmm", batch=heads, m=b.tokens, n=latent.v_dim, k=latent.kv_rank)
    if latent.gate:
        b.linear("attention_gate_proj", heads * latent.v_dim, hidden)
        b.vector("attention_gate", "mul", heads * latent.v_dim)
    b.linear("o_proj", hidden, heads * latent.v_dim, "output")


def _compressed(b: StepBuilder, mixer: Compressed, step: Step) -> None:
    """Attention to a window and compressed tokens; one head of keys, which are the values, too."""
    hidden, tp = b.config.hidden, b.layout.tp
    heads, groups = mixer.heads // tp, -(-mixer.o_groups // tp)
    b.linear("qkv_a_proj", mixer.q_rank + mixer.head_dim, hidden)
    b.norm("q_a_norm", mixer.q_rank)
    b.linear("q_b_proj", heads * mixer.head_dim, mixer.q_rank)
    b.norm("kv_a_norm", mixer.head_dim)
    b.vector("rotary", "rotary_embedding", (heads + 1) * mixer.rope, head_dim=mixer.rope)
    b.vector("kv_cache_save", "kv_cache_save", mixer.head_dim)
    if mixer.ratio:
        b.linear("compressor_proj", compressor_columns(mixer, mixer.head_dim), hidden, None)
    if mixer.indexer is not None:
        _indexer(b, mixer.indexer, step, mixer.q_rank, mixer.ratio, compressor_columns(mixer, mixer.indexer.dim))
    if isinstance(step, Decode):
        sizes = {"heads": heads * _queries(step), "latent": mixer.head_dim - mixer.rope, "rope": mixer.rope}
        b.add("attention", "mla_decode", batch=step.batch, past_len=mixer.keys(step.cached), **sizes, **b.cache)
    else:
        # A query attends to as many compressed tokens as lie before the middle of its prompt.
        middle = step.past_len + step.tokens // step.batch // 2
        window = 1 + mixer.keys(max(middle, mixer.window))
        for _, call in attention_calls(step, window):
            b.add("attention", "attention_prefill", **call, heads=heads, kv_heads=1, head_dim=mixer.head_dim, **b.cache)
    width = -(-heads // groups) * mixer.head_dim
    b.add("o_a_proj", "bmm", batch=groups, m=b.tokens, n=mixer.o_rank, k=width)
    b.linear("o_proj", hidden, groups * mixer.o_rank, "output")


def _indexer(
    b: StepBuilder, indexer: Indexer, step: Step, queries: int, ratio: int = 1, key_columns: int | None = None
) -> None:
    """Scores of all cached index keys, and the choice of the largest; on every rank.

    ``queries``: columns that the index queries are made of. ``ratio``: tokens of one index key. ``key_columns``:
    columns of the products that make index keys; default: those of a key.
    """
    if not indexer.own:
        return
    hidden = b.config.hidden
    b.linear("index_q_proj", indexer.heads * indexer.dim, queries)
    b.linear("index_k_proj", (key_columns or indexer.dim) + indexer.heads, hidden, None)
    if isinstance(step, Decode):
        keys = max(1, (step.cached + 1) // ratio)
        b.add("index_scores", "bmm", batch=step.batch, m=indexer.heads * _queries(step), n=keys, k=indexer.dim)
    else:
        for _, call in attention_calls(step, None):
            # Half of the new tokens lie before a query, on average.
            keys = max(1, (call.get("past_len", 0) + -(-call["q_len"] // 2)) // ratio)
            rows = indexer.heads * call["q_len"]
            b.add("index_scores", "bmm", batch=call["batch"], m=rows, n=keys, k=indexer.dim)
    b.vector("index_topk", "softmax", keys, dtype="float32")


def _recurrent(b: StepBuilder, mixer: Recurrent, step: Step) -> None:
    """Products, convolution and scan; heads are split over ranks.

    Decode reads and writes the state of each sequence. Prefill computes chunks of tokens as products, and one after
    the other a state for each chunk.
    """
    hidden, tp = b.config.hidden, b.layout.tp
    heads, inner, convolved = -(-mixer.heads // tp), -(-mixer.inner // tp), -(-mixer.convolved // tp)
    b.linear("in_proj", -(-projected_columns(mixer) // tp), hidden)
    if mixer.decay_rank:
        b.linear("decay_a_proj", mixer.decay_rank, hidden, None)
        b.linear("decay_b_proj", heads * mixer.key_dim, mixer.decay_rank, None)
    if isinstance(step, Decode):
        # The tokens of the convolution are read and written.
        b.add("conv1d", "silu", rows=b.tokens * mixer.conv, cols=convolved)
        b.add("scan", "silu", dtype="float32", rows=b.tokens * heads, cols=mixer.key_dim * mixer.value_dim)
    else:
        b.vector("conv1d", "silu", convolved)
        chunks = [-(-length // mixer.chunk) for length in step.lengths]
        products = {
            "scan_scores": (mixer.chunk, mixer.chunk, mixer.key_dim),
            "scan_values": (mixer.chunk, mixer.value_dim, mixer.chunk),
            "scan_output": (mixer.chunk, mixer.value_dim, mixer.key_dim),
        }
        for name, (m, n, k) in products.items():
            b.add(name, "bmm", batch=heads * sum(chunks), m=m, n=n, k=k)
        # The state of a chunk needs that of the chunk before it.
        with b.repeated(max(chunks)):
            sizes = {"m": mixer.key_dim, "n": mixer.value_dim, "k": mixer.chunk}
            b.add("scan_state", "bmm", batch=heads * len(chunks), **sizes)
    b.norm("scan_norm", inner)
    b.vector("scan_gate", "mul", inner)
    b.linear("o_proj", hidden, inner, "output")
