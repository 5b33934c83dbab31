"""Frontier: layers, attention and expert layers of serving systems on H800, A800 and RTX PRO 6000.

``protocol``: ``CUDA_EVENT`` is ``eager``, ``KERNEL_ONLY`` is ``kernel``. ``not stated`` is ``kernel``: these tables
have a floor of 2 us and agree with Vidur's on the same die (median ratio 0.94 to 1.00 by layer). The element type is
``profiling_precision``; Vidur's collector measures float16 and states none.

Products of a model with an fp8 ``quant_signature`` (Llama-3.1-405B) are ``linear`` in float8_e4m3 with scaling
channel, as vLLM quantises a checkpoint while it loads. Weights of 8 bit are proven: for up to 16 tokens the largest
product reads 3.1 TB/s at one byte per weight, 93 % of the memory's bandwidth, and would exceed it at two. All other
layers of that model are bfloat16.

Frameworks: ``flashinfer`` for attention, ``pytorch`` for reshapes and the tables without a stated protocol, ``vllm``
for all else: the collector calls vLLM's kernels. Sizes are those of one rank; ``tp`` divides heads (at least one key
head stays), columns of the feed-forward layer and rows of the embedding. ``mean_us``, ``std_us``, ``rep_spread`` and
``table`` are never read.

Attention
---------
Attention rows of Frontier: which part of a batch was timed, and with which lengths.

One collector call runs a batch and times its steps separately. A batch has prefill sequences (``is_prefill``), or
decoding ones. ``is_mixed_batch`` is a batch of prefills of unequal lengths, ``seq_lens``; it becomes sequences of
one length, the root mean square, which keeps the arithmetic.

- ``attn_prefill`` of a decoding batch and ``attn_decode`` of a prefill batch time a region without a kernel, and
  ``attn_input_reshape`` and ``attn_output_reshape`` only change views. Their latency is the cost of the timer (7 us
  on H800) and hardly grows with the sizes. They are a ``copy`` of few elements per token, as many columns as the
  region has views (:data:`_VIEWS`), so that regions of unlike cost are unlike programs.
- Batches with prefills and decoding sequences (true mixed batches) state no lengths. They are predicted as sequences
  of one token without a cache (``no_sizes``, not trained on).
- ``attn_kv_cache_save`` of old prefills copies page by page, 0.8 us per token (``paged_copy``, not trained on).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from cdmpp.data.assemble import Group
from cdmpp.data.importers.base import NOT_SERVING, Importer, column_set
from cdmpp.data.labels import Labels, Mask
from cdmpp.data.raw import IntColumn, RawTable

#: Columns of the copy that stands for a region without a kernel.
_VIEWS = {"attn_prefill": 1, "attn_decode": 1, "attn_output_reshape": 2, "attn_input_reshape": 3}
_RESHAPES = ("attn_input_reshape", "attn_output_reshape")


def _batch(text: str) -> tuple[int, int, int] | None:
    """Sequences, tokens in all and root mean square of the lengths of a text such as "[7, 6]"; None for others."""
    parts = text.strip("[] ").split(",")
    if not all(part.strip().isdecimal() for part in parts):
        return None
    lengths = [int(part) for part in parts]
    mean_square = sum(length * length for length in lengths) / len(lengths)
    return len(lengths), sum(lengths), max(round(mean_square**0.5), 1)


class _Batches:
    """Lengths of each row's batch."""

    def __init__(self, raw: RawTable) -> None:
        truth = ("true", "True", "TRUE")
        self.prefill = raw.labels("is_prefill").map(lambda name: "yes" if name in truth else "").is_("yes")
        self.unequal = raw.labels("is_mixed_batch").map(lambda name: "yes" if name in truth else "").is_("yes")
        lens, sequences = raw.labels("seq_lens"), raw.ints("batch_size")
        chunk = raw.ints("prefill_chunk_size")
        read = [_batch(name) or (0, 0, 0) for name in (*lens.names, "")]
        table = np.array(read, dtype=np.int64)[lens.codes]
        listed = self.unequal & (table[:, 0] > 0)
        #: Sequences that are neither listed nor of a stated length.
        self.unknown = self.prefill & ~listed & (chunk.values == 0) & (raw.ints("kv_cache_size").values == 0)
        new = np.where(listed, table[:, 2], np.where(self.prefill & ~self.unknown, chunk.values, 1))
        self.batch = IntColumn(np.where(listed, table[:, 0], sequences.values), sequences.missing, sequences.invalid)
        self.new = IntColumn(new, chunk.missing & self.prefill & ~listed, chunk.invalid)
        tokens = np.where(listed, table[:, 1], sequences.values * new)
        self.tokens = IntColumn(tokens, sequences.missing | self.new.missing, sequences.invalid | self.new.invalid)
        self.past = raw.ints("kv_cache_size")


def without_kernel(op: Labels, prefill: Mask, unknown: Mask) -> Mask:
    """Rows whose timed region launched nothing."""
    empty = (op.is_("attn_prefill") & ~prefill) | (op.is_("attn_decode") & prefill & ~unknown)
    for name in _RESHAPES:
        empty |= op.is_(name)
    return empty


def attention_groups(raw: RawTable, op: Labels, shard: Callable[[IntColumn], IntColumn]) -> Iterator[Group]:
    """Groups of the attention rows; ``shard`` divides heads by the degree of tensor parallelism."""
    batches = _Batches(raw)
    empty = without_kernel(op, batches.prefill, batches.unknown)
    heads, kv_heads = shard(raw.ints("n_q_head")), shard(raw.ints("n_kv_head"))
    head_dim, ones = raw.ints("head_dim"), IntColumn.constant(1, len(raw))
    sizes = {"past_len": batches.past, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    for name, columns in _VIEWS.items():
        views = IntColumn.constant(columns, len(raw))
        yield Group("copy", empty & op.is_(name), {"rows": batches.tokens, "cols": views})
    yield Group(
        "attention_prefill", op.is_("attn_prefill") & ~empty, {"batch": batches.batch, "q_len": batches.new, **sizes}
    )
    yield Group("attention_decode", op.is_("attn_decode") & ~empty, {"batch": batches.batch, "q_len": ones, **sizes})
    saved = kv_heads.times(head_dim).times(IntColumn.constant(2, len(raw)))
    yield Group("kv_cache_save", op.is_("attn_kv_cache_save"), {"rows": batches.tokens, "cols": saved})


def doubtful_attention(raw: RawTable) -> dict[str, Mask]:
    """Attention rows of doubtful meaning, by the rule that leaves them out of training."""
    op, batches = raw.labels("op"), _Batches(raw)
    timed = op.is_("attn_prefill") | op.is_("attn_decode") | op.is_("attn_kv_cache_save")
    old = raw.labels("protocol").is_("not stated")
    return {"no_sizes": timed & batches.unknown, "paged_copy": op.is_("attn_kv_cache_save") & old & batches.prefill}


_PRODUCTS = ("attn_post_proj", "attn_pre_proj", "mlp_up_proj", "mlp_down_proj", "lm_head_linear")
_QUERY_PROJECTIONS = ("attn_wq_proj", "attn_pre_proj_wq")
_LATENT_NORMS = ("attn_inter_norm", "attn_pre_proj_q_norm")
_FP8, _SCALED = "float8_e4m3", {"scaling": "channel"}
#: Models whose queries come from a shared latent: its columns, from their configuration files.
_QUERY_LATENT = {"Step2Mini-tiny": 512, "step-moe-noquant-small": 2048}
#: Columns of the shared expert, where they are not ``n_expanded_embd``; from the configuration file.
_SHARED_EXPERT = {"Step2Mini-tiny": 2048}
#: ``attn_pre_proj`` of these models is timed together with norms of the queries and keys.
_WITH_NORMS = ("qwen3", "step-moe")
_BALANCE = {"uniform": "balanced", "skewed": "power_law_1.2"}


class _Columns:
    """Sizes of one rank, by the columns of the table."""

    def __init__(self, raw: RawTable) -> None:
        self.rows = len(raw)
        self.m, self.n, self.k, self.width = (raw.ints(name) for name in ("m", "n", "k", "n_embd"))
        self.expanded, self.vocab = raw.ints("n_expanded_embd"), raw.ints("vocab_size")
        self.heads, self.kv_heads, self.head_dim = (raw.ints(n) for n in ("n_q_head", "n_kv_head", "head_dim"))
        self.tp = raw.ints("tp")
        self.models = raw.labels("model")

    def constant(self, value: int) -> IntColumn:
        """One value for every row."""
        return IntColumn.constant(value, self.rows)

    def shard(self, column: IntColumn) -> IntColumn:
        """``column`` divided among ``tp`` ranks, rounded up."""
        return column.shard(self.tp)

    def by_model(self, values: dict[str, int], otherwise: IntColumn) -> IntColumn:
        """A size by model, ``otherwise`` for models that are not listed."""
        result = otherwise
        for name, value in values.items():
            rows = self.models.is_(name)
            result = IntColumn(np.where(rows, value, result.values), result.missing & ~rows, result.invalid & ~rows)
        return result


def _groups(raw: RawTable, op: Labels) -> list[Group]:
    columns = _Columns(raw)
    return [
        *_products(raw, op, columns),
        *_small_layers(op, columns),
        *_expert_layers(raw, op, columns.m),
        *attention_groups(raw, op, columns.shard),
    ]


def _products(raw: RawTable, op: Labels, c: _Columns) -> Iterator[Group]:
    """Dense layers; those of fp8 models are quantised."""
    fp8 = raw.labels("quant_signature").map(lambda name: "fp8" if "fp8" in name else "").is_("fp8")
    no = np.zeros(len(raw), dtype=np.bool_)
    missing = IntColumn(np.zeros(len(raw), dtype=np.int64), ~no, no)
    latent = c.by_model(_QUERY_LATENT, missing)
    queries = c.shard(c.heads).times(c.head_dim)
    keys = c.shard(c.kv_heads).times(c.head_dim).times(c.constant(2))
    shared = c.shard(c.by_model(_SHARED_EXPERT, c.expanded))
    two = c.constant(2)
    stated = (c.n.values > 0) & (c.k.values > 0)
    dense = [(op.is_(name) & (stated | (name != "attn_pre_proj")), c.n, c.k) for name in _PRODUCTS]
    first = op.is_("attn_pre_proj") & ~stated
    dense += [
        (first & c.models.is_(name), _first_products(name, c, latent, queries, keys), c.width) for name in _QUERY_LATENT
    ]
    dense += [(op.is_(name), queries, latent) for name in _QUERY_PROJECTIONS]
    dense += [
        (op.is_("attn_pre_proj_qkv"), latent.plus(keys), c.width),
        (op.is_("mtp_fusion_proj"), c.width, c.width.times(two)),
        (op.is_("share_expert_up_proj"), shared.times(two), c.width),
        (op.is_("share_expert_down_proj"), c.width, shared),
        (op.is_("moe_gating_linear"), raw.ints("num_experts"), raw.ints("hidden_dim")),
    ]
    for rows, n, k in dense:
        sizes = {"m": c.m, "n": n, "k": k}
        yield Group("linear", rows & ~fp8, sizes)
        yield Group("linear", rows & fp8, sizes, _SCALED, _FP8)


def _first_products(model: str, c: _Columns, latent: IntColumn, queries: IntColumn, keys: IntColumn) -> IntColumn:
    """Columns of ``attn_pre_proj`` of a model with a query latent.

    Step3's covers three steps: to the latent and the keys, a norm, and from the latent to the queries. Its columns
    are those of one product with the arithmetic of the two.
    """
    first = latent.plus(keys)
    if not model.startswith("step-moe"):
        return first
    second = latent.values * queries.values // np.maximum(c.width.values, 1)
    return first.plus(IntColumn(second, queries.missing, queries.invalid))


def _small_layers(op: Labels, c: _Columns) -> list[Group]:
    """Layers without products."""
    tokens = {"rows": c.m, "cols": c.width}
    latent = {"rows": c.m, "cols": c.by_model(_QUERY_LATENT, c.width)}
    rotated = c.shard(c.heads).plus(c.shard(c.kv_heads)).times(c.head_dim)
    shared = c.shard(c.by_model(_SHARED_EXPERT, c.expanded))
    norms = op.is_("input_layernorm") | op.is_("post_attention_layernorm")
    return [
        Group("rmsnorm", norms, tokens),
        *(Group("rmsnorm", op.is_(name), latent) for name in _LATENT_NORMS),
        Group("add", op.is_("add"), tokens),
        Group("embedding", op.is_("emb"), {**tokens, "table_rows": c.shard(c.vocab)}),
        Group("rotary_embedding", op.is_("attn_rope"), {"rows": c.m, "cols": rotated, "head_dim": c.head_dim}),
        Group("silu_and_mul", op.is_("mlp_act"), {"rows": c.m, "cols": c.shard(c.expanded)}),
        Group("silu_and_mul", op.is_("share_expert_act"), {"rows": c.m, "cols": shared}),
    ]


def _expert_layers(raw: RawTable, op: Labels, tokens: IntColumn) -> Iterator[Group]:
    hidden, experts, topk = (raw.ints(name) for name in ("hidden_dim", "num_experts", "router_topk"))
    yield Group("moe_gating", op.is_("moe_gating_routing_topk"), {"rows": tokens, "cols": experts, "topk": topk})
    yield Group("moe_shuffle", op.is_("moe_shuffling"), {"rows": tokens, "cols": hidden, "topk": topk})
    sizes = {
        "tokens": tokens,
        "hidden": hidden,
        "intermediate": raw.ints("expert_hidden_dim"),
        "experts": experts,
        "topk": topk,
        "tp": raw.ints("tp"),
        "ep": raw.ints("expert_parallel_size"),
    }
    load = raw.labels("load_distribution").map(lambda name: _BALANCE.get(name, "balanced"))
    for balance in load.names:
        yield Group("moe", op.is_("moe_grouped_gemm") & load.is_(balance), sizes, {"balance": balance})


def _dtype(raw: RawTable) -> Labels:
    names = {"BF16": "bfloat16", "FP16": "float16", "FP32": "float32", "": "float16"}
    return raw.labels("profiling_precision").map(lambda name: names.get(name, name))


def _protocol(raw: RawTable) -> Labels:
    names = {"CUDA_EVENT": "eager", "KERNEL_ONLY": "kernel", "not stated": "kernel"}
    return raw.labels("protocol").map(lambda name: names.get(name, name))


def _framework(raw: RawTable) -> Labels:
    op, old = raw.labels("op"), raw.labels("protocol").is_("not stated")
    names = ("vllm", "pytorch", "flashinfer")
    codes = np.zeros(len(raw), dtype=np.int32)
    codes[old | op.is_("attn_input_reshape") | op.is_("attn_output_reshape")] = 1
    codes[op.is_("attn_prefill") | op.is_("attn_decode") | (op.is_("attn_kv_cache_save") & old)] = 2
    return Labels(codes, names)


def _implementation(raw: RawTable) -> Labels:
    """vLLM's kernels, but the routing of experts: 15 us on H800, where one small kernel takes 2.8, is several."""
    return raw.labels("op").map(lambda name: "composed" if name == "moe_gating_routing_topk" else "fused")


def _doubtful(raw: RawTable) -> dict[str, Mask]:
    models = raw.labels("model").map(lambda name: "norms" if name.lower().startswith(_WITH_NORMS) else "")
    composite = raw.labels("op").is_("attn_pre_proj") & models.is_("norms")
    return {"composite": composite, **doubtful_attention(raw)}


IMPORTER = Importer(
    name="frontier",
    file_name="ops_frontier.parquet",
    repository="NetX-lab/Frontier",
    commit="a4b22df8",
    origin="data/profiling/compute",
    licence="MIT",
    protocol="kernel",
    needs=column_set("op device protocol tp"),
    one_of=(
        column_set("m n_embd"),
        column_set("m hidden_dim num_experts"),
        column_set("n_q_head n_kv_head head_dim batch_size"),
    ),
    lacks=NOT_SERVING | column_set("q_len cfg layer dtype prefill_chunk n_decode"),
    reads=column_set(
        "model profiling_precision quant_signature n k n_expanded_embd "
        "vocab_size prefill_chunk_size kv_cache_size expert_parallel_size router_topk "
        "expert_hidden_dim is_prefill is_mixed_batch seq_lens load_distribution"
    ),
    groups=_groups,
    framework=_framework,
    implementation=_implementation,
    dtype=_dtype,
    protocol_of=_protocol,
    doubtful=_doubtful,
)
