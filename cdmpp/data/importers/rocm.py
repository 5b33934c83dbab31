"""ROCm: tables of AMD GPUs from aiter, Tensile and MIOpen (kernel time, no launch cost).

aiter GEMM
----------
The best kernel that aiter's tuning found per size (profiler kernel time). ``linear`` (``bmm`` where ``op`` says so):
a8w8 of float8_e4m3fn or int8 has scaling channel, ``fp8_blockscale`` block128, ``a4w4_mxfp4`` mx32. Rows of the family
``bf16/other`` are bare bfloat16 products, also where their ``dtype`` says a8w8: they are from bf16 files and take 1.3
to 2.0 times the int8 rows of equal sizes. ``outdtype`` float32 is a wider result. The framework ``aiter`` stands for
best_of_tuning. ``libtype``, ``kernelName``, ``splitK``, ``errRatio``, ``config_file`` and ``n_rep`` are never read.

aiter MoE
---------
The best pair of kernels that aiter's tuning found per size of a layer of experts (profiler kernel time). ``moe``:
``tokens`` = ``token``, ``hidden`` = ``model_dim``, ``intermediate`` = ``inter_dim`` of one rank, so tp is 1;
``experts`` = ``expert`` with a shared expert counted where the source does (257), balanced routing. ``use_g1u1`` says
whether the layer is gated. ``q_dtype_a``, ``q_dtype_w`` and ``q_type`` are the types:

=============  =================================================================
``q_type``     here
=============  =================================================================
``No``         bare products of ``q_dtype_a``
``per_Token``  channel; ``per_1x128`` block128
``per_1x32``   mx32, but block128 for int4 weights, whose scales mx32 does not have
=============  =================================================================

The framework ``aiter`` stands for best_of_tuning. ``act_type`` and ``doweight_stage1`` select a variant of equal work
and are not kept. ``us1``, ``us2``, ``block_m``, ``ksplit``, ``config_file`` and ``n_rep`` are never read.

Tensile
-------
Logic files: the winning kernel of rocBLAS and hipBLASLt per size of a product. ``gemm`` becomes ``linear`` and ``bmm``
stays ``bmm``: C[m, n] = A[m, k] B[k, n], row-major. These are bare products. ``trans_a`` and ``trans_b`` are the layout
("nt", A as written and B transposed, is a linear's own, "nn" that of ``bmm``), ``acc`` of type fp16 keeps sums in 16
bits, and ``tensile_type`` HSS or BSS writes float32. fp8/fp16 mixed and fp16xfp8 are float16 with float8_e4m3 weights
and static scales; layout and result type are not kept for them. fp8 covers e4m3 and e5m2 and int8 covers results of 8
and 32 bits; both are one type here.

A latency is that of the best of many kernels: the framework (the column ``library``) stands for best_of_tuning.
``gflops``, ``gflops_min``, ``logic_file``, ``logic_kind`` and ``n_rep`` are never read.

MIOpen
------
Find-db: the fastest solver of a convolution. Every row is ``conv2d`` with its
``direction``, written as the forward problem; sizes keep their names, no bias. ``best_solver`` and ``n_solvers`` are
never read. The source holds rows of up to 180 s: see :mod:`cdmpp.data.physics` for the rule that leaves such rows out
of training.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from cdmpp.data.assemble import Group
from cdmpp.data.importers.base import FP8, LINEAR, Importer, ProductTypes, always, column_set, combinations, plain
from cdmpp.data.labels import Labels
from cdmpp.data.raw import IntColumn, RawTable

_importer = partial(Importer, licence="MIT", protocol="kernel", implementation=always("tuned"))
_aiter_importer = partial(_importer, repository="ROCm/aiter", commit="e4048607", framework=always("aiter"))

_TYPES = {name: LINEAR[name] for name in ("fp8_blockscale", "a4w4_mxfp4")} | {
    "int8": ProductTypes("int8", None, "channel"),
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "fp8"), ProductTypes(FP8, None, "channel")),
}


def _product_sizes(raw: RawTable) -> dict[str, dict[str, IntColumn]]:
    """Sizes by operator; a table without batches has one matrix in each row."""
    sizes = {name: raw.ints(name) for name in ("m", "n", "k")}
    batch = raw.ints("batch") if "batch" in raw.columns else IntColumn.constant(1, len(raw))
    return {"linear": sizes, "bmm": {"batch": batch, **sizes}}


def _aiter_gemm_types(family: str, dtype: str) -> ProductTypes:
    if family == "bf16/other" and dtype == "a8w8":
        return ProductTypes("bfloat16")
    return _TYPES.get(dtype) or plain(dtype)


def _aiter_gemm_groups(raw: RawTable, op: Labels) -> Iterator[Group]:
    sizes = _product_sizes(raw)
    for rows, (name, family, dtype, out) in combinations(op, *map(raw.labels, ("family", "dtype", "outdtype"))):
        if name not in ("linear", "bmm"):
            continue
        types = _aiter_gemm_types(family, dtype)
        bare = types.scaling is None and types.dtype in ("float16", "bfloat16")
        wide = bare and plain(out).dtype == "float32"
        flags: dict[str, bool | int | str | None] = {**types.flags, "out_dtype": "float32" if wide else None}
        if name == "linear":
            flags["bias"] = False
        yield Group(name, rows, sizes[name], flags, dtype=types.dtype)


AITER_GEMM = _aiter_importer(
    name="aiter_gemm",
    file_name="ops_aiter_gemm.parquet",
    origin="aiter/configs/**, aiter/ops/flydsl",
    needs=column_set("op device family dtype m n k"),
    lacks=column_set("framework precision trans_a program protocol model rows in_hw direction"),
    reads=column_set("outdtype batch"),
    groups=_aiter_gemm_groups,
)


_AITER_MOE_SIZES = {
    "tokens": "token",
    "hidden": "model_dim",
    "intermediate": "inter_dim",
    "experts": "expert",
    "topk": "topk",
}
_SCALING = {"per_Token": "channel", "per_Tensor": "tensor", "per_1x128": "block128", "per_1x32": "mx32"}
#: Scaling of layers whose column ``q_type`` is absent.
_USUAL = {FP8: "tensor", "float4_e2m1": "mx32", "int8": "channel", "int4": "block128"}


def _aiter_moe_types(activations: str, weights: str, scales: str) -> ProductTypes:
    dtype, weight = (plain(name.removesuffix("_x2")).dtype for name in (activations, weights))
    scaling = _SCALING.get(scales) or (_USUAL.get(weight) if scales != "No" else None)
    if weight == "int4":
        scaling = "block128"
    return ProductTypes(dtype, None if weight == dtype else weight, scaling)


def _aiter_moe_groups(raw: RawTable, op: Labels) -> Iterator[Group]:
    sizes = {field: raw.ints(column) for field, column in _AITER_MOE_SIZES.items()}
    stated = raw.labels("dtype", "bfloat16")
    activations = raw.labels("q_dtype_a") if "q_dtype_a" in raw.columns else stated
    weights = raw.labels("q_dtype_w") if "q_dtype_w" in raw.columns else activations
    columns = (op, activations, weights, raw.labels("q_type"), raw.labels("use_g1u1", "1"))
    for rows, (name, a, w, scales, gate) in combinations(*columns):
        if name == "fused_moe":
            types = _aiter_moe_types(a, w, scales)
            flags = {**types.flags, "balance": "balanced", "gated": gate not in ("0", "0.0", "false", "False")}
            yield Group("moe", rows, sizes, flags, dtype=types.dtype)


AITER_MOE = _aiter_importer(
    name="aiter_moe",
    file_name="ops_aiter_moe.parquet",
    origin="aiter/configs/**/*fmoe*.csv",
    needs=column_set("op device").union(_AITER_MOE_SIZES.values()),
    lacks=column_set("framework program tokens num_tokens m rows in_hw q_len direction message_bytes"),
    reads=column_set("dtype q_dtype_a q_dtype_w q_type use_g1u1"),
    groups=_aiter_moe_groups,
)


_MIXED = dict.fromkeys(("fp8/fp16 mixed", "fp16xfp8"), ProductTypes("float16", FP8, "tensor"))
_TENSILE_OPERATORS = {"gemm": ("linear", "nt"), "bmm": ("bmm", "nn")}


def _tensile_groups(raw: RawTable, op: Labels) -> Iterator[Group]:
    sizes = _product_sizes(raw)
    result = raw.labels("tensile_type").map(lambda code: code[:3] if code[:3] in ("HSS", "BSS") else "")
    columns = (raw.labels("dtype"), raw.labels("acc"), result, raw.labels("trans_a"), raw.labels("trans_b"))
    for rows, (name, dtype, acc, written, a, b) in combinations(op, *columns):
        if name not in _TENSILE_OPERATORS:
            continue
        operator, usual = _TENSILE_OPERATORS[name]
        types = _MIXED.get(dtype) or plain(dtype)
        layout = (a + b).lower()
        flags: dict[str, bool | int | str | None] = {**types.flags, "layout": None, "accumulate": None}
        if types.scaling is None:
            flags["layout"] = layout if len(layout) == 2 and set(layout) <= set("nt") and layout != usual else None
            flags["accumulate"] = "float16" if (types.dtype, acc) == ("float16", "fp16") else None
            wide = written and types.dtype in ("float16", "bfloat16")
            flags["out_dtype"] = "float32" if wide else None
        if operator == "linear":
            flags["bias"] = False
        yield Group(operator, rows, sizes[operator], flags, dtype=types.dtype)


TENSILE = _importer(
    name="tensile_gemm",
    file_name="ops_tensile_gemm.parquet",
    repository="ROCm/rocBLAS, ROCm/hipBLASLt",
    commit="b520bc83, 7d9fb683",
    origin="library/src/blas3/Tensile/Logic/asm_full, .../Tensile/Logic/asm_full",
    needs=column_set("op device dtype m n k trans_a trans_b"),
    lacks=column_set("precision framework family program protocol rows in_hw direction q_len"),
    reads=column_set("library acc tensile_type batch"),
    groups=_tensile_groups,
    framework=lambda raw: raw.labels("library").map(str.lower),
)


_MIOPEN_SIZES = column_set("n c_in h w c_out kh kw pad_h pad_w stride_h stride_w dil_h dil_w groups")
DIRECTIONS = ("fwd", "bwd_data", "bwd_weight")


def _miopen_groups(raw: RawTable, op: Labels) -> list[Group]:
    sizes = {name: raw.ints(name) for name in _MIOPEN_SIZES}
    direction = raw.labels("direction")
    conv = op.is_("conv2d")
    return [Group("conv2d", conv & direction.is_(d), sizes, {"direction": d}) for d in DIRECTIONS]


MIOPEN = _importer(
    name="miopen",
    file_name="ops_miopen_conv2d.parquet",
    repository="ROCm/MIOpen",
    commit="2d1fd997",
    origin="src/kernels/*.HIP.fdb.txt.bz2",
    needs=column_set("op device dtype direction").union(_MIOPEN_SIZES),
    lacks=column_set("precision"),
    groups=_miopen_groups,
    framework=always("miopen"),
)
