"""InferSim: fp8 products, grouped products and attention on H800.

=====================  =======================================================================================
in the table           here
=====================  =======================================================================================
``gemm``               ``linear``, float8_e4m3 with scaling block128 (DeepGEMM)
``grouped_gemm_up``    ``grouped_gemm``: ``num_local_experts`` groups of ``tokens_per_expert`` rows,
                       k = ``hidden_size``, n = 2 * ``intermediate_size``, float8_e4m3 with block128 (DeepGEMM)
``grouped_gemm_down``  the same with k = ``intermediate_size``, n = ``hidden_size``
``mha``                ``attention_decode`` or ``attention_prefill``; ``cfg`` is heads-kv_heads-head_dim (FlashInfer)
``mla``                ``mla_decode``, ``cfg`` heads-latent-rope; ``mla_prefill``, ``cfg`` heads-nope-rope (FlashMLA)
``dsa`` attention      ``mla_decode`` over the selected keys; ``cfg`` is attn-heads-(latent + rope)-keys. In a prefill
                       each of ``q_len`` tokens gathers keys of its own, as a decoding sequence does
``dsa`` logits         scores of all keys by the indexer; ``cfg`` is logits-heads-head_dim. It is predicted as
                       attention in float8_e4m3 with one key head of half the ``head_dim``, which has the same
                       arithmetic and reads the same bytes
=====================  =======================================================================================

``kv_len`` counts the new tokens. The source states neither statistic nor launch cost. ``mha`` is flat at 26 us up to
32,768 keys, where FlashInfer's kernel takes 7 us on the same device (Frontier), so it is ``eager``. The other rows
are ``kernel``. Stand-ins are left out of training (``stand_in``). ``mfu`` is never read.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from cdmpp.data.assemble import Group
from cdmpp.data.importers.base import NOT_SERVING, Importer, column_set, combinations
from cdmpp.data.labels import Labels, Mask
from cdmpp.data.raw import IntColumn, RawTable

_FP8 = "float8_e4m3"
_BLOCK = {"scaling": "block128"}
_GEMM = column_set("m n k")
_GROUPED = column_set("num_local_experts tokens_per_expert hidden_size intermediate_size")


def _numbers(config: str) -> list[int] | None:
    """Whole numbers of a ``cfg``, or None where it is none: "attn-128-576-2048" has 128, 576 and 2048."""
    parts = config.removeprefix("attn-").removeprefix("logits-").split("-")
    return [int(part) for part in parts] if len(parts) > 1 and all(part.isdecimal() for part in parts) else None


def _or(first: IntColumn, second: IntColumn) -> IntColumn:
    """``first``, but ``second`` where it is missing."""
    return IntColumn(
        np.where(first.missing, second.values, first.values),
        first.missing & second.missing,
        np.where(first.missing, second.invalid, first.invalid),
    )


def _groups(raw: RawTable, op: Labels) -> list[Group]:
    local, each = raw.ints("num_local_experts"), raw.ints("tokens_per_expert")
    hidden, inner = raw.ints("hidden_size"), raw.ints("intermediate_size")
    rows = {"groups": local, "rows": local.times(each)}
    up = {**rows, "k": hidden, "n": inner.times(IntColumn.constant(2, len(raw)))}
    return [
        Group("linear", op.is_("gemm"), {name: raw.ints(name) for name in sorted(_GEMM)}, _BLOCK, _FP8),
        Group("grouped_gemm", op.is_("grouped_gemm_up"), up, _BLOCK, _FP8),
        Group("grouped_gemm", op.is_("grouped_gemm_down"), {**rows, "k": inner, "n": hidden}, _BLOCK, _FP8),
        *_attention(raw, op),
    ]


def _attention(raw: RawTable, op: Labels) -> Iterator[Group]:
    """Groups of the rows that share operator, phase, ``cfg`` and types."""
    phase, config = raw.labels("phase"), raw.labels("cfg")
    types, cache = raw.labels("dtype").map(_type), raw.labels("kv_dtype").map(_type)
    ones = IntColumn.constant(1, len(raw))
    batch = _or(raw.ints("batch_size"), ones)
    for rows, (name, when, cfg, dtype, kv) in combinations(op, phase, config, types, cache):
        dims = _numbers(cfg)
        if name not in ("mha", "mla", "dsa") or dims is None or when not in ("prefill", "decode"):
            continue
        new = _or(raw.ints("q_len"), ones if when == "decode" else raw.ints("seq_len"))
        keys = _or(raw.ints("kv_len"), raw.ints("seq_len"))
        lengths = {"batch": batch, "q_len": new, "past_len": keys.minus(new)}
        group = _one_attention(name, when, cfg, dims, lengths)
        if group is not None:
            operator, sizes = group
            constant = {
                key: v if isinstance(v, IntColumn) else IntColumn.constant(v, len(raw)) for key, v in sizes.items()
            }
            scores = cfg.startswith("logits-")
            types_of = _FP8 if scores else dtype or "bfloat16"
            flags = {"kv_dtype": kv} if kv and kv != types_of and not scores else {}
            yield Group(operator, rows, constant, flags, types_of)


def _one_attention(
    name: str, phase: str, cfg: str, dims: list[int], lengths: dict[str, IntColumn]
) -> tuple[str, dict[str, IntColumn | int]] | None:
    """Operator and sizes of attention rows with one ``cfg``; None where it has another form."""
    if name == "mha" and len(dims) == 3:
        return f"attention_{phase}", {**lengths, "heads": dims[0], "kv_heads": dims[1], "head_dim": dims[2]}
    if name == "mla" and len(dims) == 3:
        special = {"nope": dims[1], "rope": dims[2]} if phase == "prefill" else {"latent": dims[1], "rope": dims[2]}
        return f"mla_{phase}", {**lengths, "heads": dims[0], **special}
    if name == "dsa" and cfg.startswith("attn-") and len(dims) == 3 and dims[1] > 64 and dims[2] > 1:
        sequences = lengths["batch"].times(lengths["q_len"])
        gathered = {"past_len": dims[2] - 1, "heads": dims[0], "latent": dims[1] - 64, "rope": 64}
        return "mla_decode", {"batch": sequences, "q_len": 1, **gathered}
    if name == "dsa" and cfg.startswith("logits-") and len(dims) == 2:
        return f"attention_{phase}", {**lengths, "heads": dims[0], "kv_heads": 1, "head_dim": max(dims[1] // 2, 1)}
    return None


def _type(name: str) -> str:
    return {"bf16": "bfloat16", "fp16": "float16", "fp8": _FP8}.get(name, name)


def _protocol(raw: RawTable) -> Labels:
    return raw.labels("op").map(lambda name: "eager" if name == "mha" else "kernel")


def _framework(raw: RawTable) -> Labels:
    """DeepGEMM's products and scores, FlashInfer's attention; FlashMLA is no framework of the queries."""
    op, scores = raw.labels("op"), raw.labels("cfg").map(lambda cfg: cfg.partition("-")[0])
    codes = np.zeros(len(raw), dtype=np.int32)
    for name in ("gemm", "grouped_gemm_up", "grouped_gemm_down"):
        codes[op.is_(name)] = 1
    codes[op.is_("dsa") & scores.is_("logits")] = 1
    codes[op.is_("mha")] = 2
    return Labels(codes, ("", "deepgemm", "flashinfer"))


def _doubtful(raw: RawTable) -> dict[str, Mask]:
    return {"stand_in": raw.labels("op").is_("dsa")}


IMPORTER = Importer(
    name="infersim",
    file_name="ops_infersim.csv.gz",
    repository="alibaba/InferSim",
    commit="f2293dab",
    origin="bench_data",
    licence="Apache-2.0",
    protocol="kernel",
    needs=column_set("op device cfg"),
    one_of=(_GEMM, _GROUPED, column_set("phase kv_len"), column_set("phase seq_len")),
    lacks=NOT_SERVING | column_set("n_out token protocol layer n_embd hidden_dim n_q_head prefill_chunk n_decode"),
    reads=column_set("phase dtype kv_dtype batch_size q_len kv_len seq_len"),
    groups=_groups,
    framework=_framework,
    protocol_of=_protocol,
    doubtful=_doubtful,
)
