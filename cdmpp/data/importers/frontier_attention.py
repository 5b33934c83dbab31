"""Attention rows of Frontier: which part of a batch was timed, and with which lengths.

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
    head_dim, one = raw.ints("head_dim"), IntColumn.constant(1, len(raw))
    sizes = {"past_len": batches.past, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    for name, columns in _VIEWS.items():
        views = IntColumn.constant(columns, len(raw))
        yield Group("copy", empty & op.is_(name), {"rows": batches.tokens, "cols": views})
    yield Group(
        "attention_prefill", op.is_("attn_prefill") & ~empty, {"batch": batches.batch, "q_len": batches.new, **sizes}
    )
    yield Group("attention_decode", op.is_("attn_decode") & ~empty, {"batch": batches.batch, "q_len": one, **sizes})
    saved = kv_heads.times(head_dim).times(IntColumn.constant(2, len(raw)))
    yield Group("kv_cache_save", op.is_("attn_kv_cache_save"), {"rows": batches.tokens, "cols": saved})


def doubtful_attention(raw: RawTable) -> dict[str, Mask]:
    """Attention rows of doubtful meaning, by the rule that leaves them out of training."""
    op, batches = raw.labels("op"), _Batches(raw)
    timed = op.is_("attn_prefill") | op.is_("attn_decode") | op.is_("attn_kv_cache_save")
    old = raw.labels("protocol").is_("not stated")
    return {"no_sizes": timed & batches.unknown, "paged_copy": op.is_("attn_kv_cache_save") & old & batches.prefill}
