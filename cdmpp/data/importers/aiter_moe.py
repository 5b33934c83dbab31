"""aiter's tuned layers of experts: the best pair of kernels found per size on AMD GPUs (profiler kernel time).

``moe``: ``tokens`` = ``token``, ``hidden`` = ``model_dim``, ``intermediate`` = ``inter_dim`` of one rank, so tp is 1;
``experts`` = ``expert`` with a shared expert counted where the source does (257), balanced routing. ``use_g1u1``
says whether the layer is gated. ``q_dtype_a``, ``q_dtype_w`` and ``q_type`` are the types:

=============  =================================================================
``q_type``     here
=============  =================================================================
``No``         bare products of ``q_dtype_a``
``per_Token``  channel; ``per_1x128`` block128
``per_1x32``   mx32, but block128 for int4 weights, whose scales mx32 does not have
=============  =================================================================

The framework ``aiter`` stands for best_of_tuning. ``act_type`` and ``doweight_stage1`` select a variant of equal work
and are not kept. ``us1``, ``us2``, ``block_m``, ``ksplit``, ``config_file`` and ``n_rep`` are never read.
"""

from __future__ import annotations

from collections.abc import Iterator

from cdmpp.data.assemble import Group
from cdmpp.data.importers.base import Importer, always
from cdmpp.data.importers.element_types import FP8, Types, joined, plain
from cdmpp.data.labels import Labels
from cdmpp.data.raw import RawTable

_SIZES = {"tokens": "token", "hidden": "model_dim", "intermediate": "inter_dim", "experts": "expert", "topk": "topk"}
_SCALING = {"per_Token": "channel", "per_Tensor": "tensor", "per_1x128": "block128", "per_1x32": "mx32"}
#: Scaling of layers whose column ``q_type`` is absent.
_USUAL = {FP8: "tensor", "float4_e2m1": "mx32", "int8": "channel", "int4": "block128"}


def _types(activations: str, weights: str, scales: str) -> Types:
    dtype, weight = (plain(name.removesuffix("_x2")).dtype for name in (activations, weights))
    scaling = _SCALING.get(scales) or (_USUAL.get(weight) if scales != "No" else None)
    if weight == "int4":
        scaling = "block128"
    return Types(dtype, None if weight == dtype else weight, scaling)


def _groups(raw: RawTable, op: Labels) -> list[Group]:
    return list(_each_group(raw, op))


def _each_group(raw: RawTable, op: Labels) -> Iterator[Group]:
    sizes = {field: raw.ints(column) for field, column in _SIZES.items()}
    stated = raw.labels("dtype", "bfloat16")
    activations = raw.labels("q_dtype_a") if "q_dtype_a" in raw.columns else stated
    weights = raw.labels("q_dtype_w") if "q_dtype_w" in raw.columns else activations
    label, parts = joined(op, activations, weights, raw.labels("q_type"), raw.labels("use_g1u1", "1"))
    for number, (name, a, w, scales, gate) in enumerate(parts):
        if name == "fused_moe":
            types = _types(a, w, scales)
            flags = {**types.flags, "balance": "balanced", "gated": gate not in ("0", "0.0", "false", "False")}
            yield Group("moe", label.is_(str(number)), sizes, flags, dtype=types.dtype)


IMPORTER = Importer(
    name="aiter_moe",
    file_name="ops_aiter_moe.parquet",
    repository="ROCm/aiter",
    commit="e4048607",
    origin="aiter/configs/**/*fmoe*.csv",
    licence="MIT",
    protocol="kernel",
    needs=frozenset({"op", "device", *_SIZES.values()}),
    lacks=frozenset(
        {"framework", "program", "tokens", "num_tokens", "m", "rows", "in_hw", "q_len", "direction", "message_bytes"}
    ),
    reads=frozenset({"dtype", "q_dtype_a", "q_dtype_w", "q_type", "use_g1u1"}),
    groups=_groups,
    framework=always("aiter"),
)
