"""Tensile's logic files: the winning kernel of rocBLAS and hipBLASLt per size of a product on AMD GPUs.

``gemm`` becomes ``linear`` and ``bmm`` stays ``bmm``: C[m, n] = A[m, k] B[k, n], row-major. These are bare products.
``trans_a`` and ``trans_b`` are the layout ("nt", A as written and B transposed, is a linear's own, "nn" that of
``bmm``), ``acc`` of type fp16 keeps sums in 16 bits, and ``tensile_type`` HSS or BSS writes float32. fp8/fp16 mixed and
fp16xfp8 are float16 with float8_e4m3 weights and static scales; layout and result type are not kept for them. fp8
covers e4m3 and e5m2 and int8 covers results of 8 and 32 bits; both are one type here.

A latency is that of the best of many kernels: the framework (the column ``library``) stands for best_of_tuning.
``gflops``, ``gflops_min``, ``logic_file``, ``logic_kind`` and ``n_rep`` are never read.
"""

from __future__ import annotations

from collections.abc import Iterator

from cdmpp.data.assemble import Group
from cdmpp.data.importers.base import Importer
from cdmpp.data.importers.element_types import FP8, Types, joined, plain
from cdmpp.data.labels import Labels
from cdmpp.data.raw import IntColumn, RawTable

_MIXED = dict.fromkeys(("fp8/fp16 mixed", "fp16xfp8"), Types("float16", FP8, "tensor"))
_OPERATORS = {"gemm": ("linear", "nt"), "bmm": ("bmm", "nn")}


def _groups(raw: RawTable, op: Labels) -> list[Group]:
    return list(_each_group(raw, op))


def _each_group(raw: RawTable, op: Labels) -> Iterator[Group]:
    sizes = {name: raw.ints(name) for name in ("m", "n", "k")}
    batch = raw.ints("batch") if "batch" in raw.columns else IntColumn.constant(1, len(raw))
    result = raw.labels("tensile_type").map(lambda code: code[:3] if code[:3] in ("HSS", "BSS") else "")
    columns = (raw.labels("dtype"), raw.labels("acc"), result, raw.labels("trans_a"), raw.labels("trans_b"))
    label, parts = joined(op, *columns)
    for number, (name, dtype, acc, written, a, b) in enumerate(parts):
        if name not in _OPERATORS:
            continue
        operator, usual = _OPERATORS[name]
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
        own = sizes if operator == "linear" else {"batch": batch, **sizes}
        yield Group(operator, label.is_(str(number)), own, flags, dtype=types.dtype)


IMPORTER = Importer(
    name="tensile_gemm",
    file_name="ops_tensile_gemm.parquet",
    repository="ROCm/rocBLAS, ROCm/hipBLASLt",
    commit="b520bc83, 7d9fb683",
    origin="library/src/blas3/Tensile/Logic/asm_full, .../Tensile/Logic/asm_full",
    licence="MIT",
    protocol="kernel",
    needs=frozenset({"op", "device", "dtype", "m", "n", "k", "trans_a", "trans_b"}),
    lacks=frozenset({"precision", "framework", "family", "program", "protocol", "rows", "in_hw", "direction", "q_len"}),
    reads=frozenset({"library", "acc", "tensile_type", "batch"}),
    groups=_groups,
    framework=lambda raw: raw.labels("library").map(str.lower),
)
