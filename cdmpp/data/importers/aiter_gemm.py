"""aiter's tuned GEMMs: the best kernel found per size on AMD GPUs (profiler kernel time, no launch cost).

``linear`` (``bmm`` where ``op`` says so): a8w8 of float8_e4m3fn or int8 has scaling channel, ``fp8_blockscale``
block128, ``a4w4_mxfp4`` mx32. Rows of the family ``bf16/other`` are bare bfloat16 products, also where their ``dtype``
says a8w8: they are from bf16 files and take 1.3 to 2.0 times the int8 rows of equal sizes. ``outdtype`` float32 is a
wider result. The framework ``aiter`` stands for best_of_tuning. ``libtype``, ``kernelName``, ``splitK``, ``errRatio``,
``config_file`` and ``n_rep`` are never read.
"""

from __future__ import annotations

from collections.abc import Iterator

from cdmpp.data.assemble import Group
from cdmpp.data.importers.base import Importer, always
from cdmpp.data.importers.element_types import FP8, LINEAR, Types, joined, plain
from cdmpp.data.labels import Labels
from cdmpp.data.raw import IntColumn, RawTable

_TYPES = {name: LINEAR[name] for name in ("fp8_blockscale", "a4w4_mxfp4")} | {
    "int8": Types("int8", None, "channel"),
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "fp8"), Types(FP8, None, "channel")),
}


def _types(family: str, dtype: str) -> Types:
    if family == "bf16/other" and dtype == "a8w8":
        return Types("bfloat16")
    return _TYPES.get(dtype) or plain(dtype)


def _groups(raw: RawTable, op: Labels) -> list[Group]:
    return list(_each_group(raw, op))


def _each_group(raw: RawTable, op: Labels) -> Iterator[Group]:
    sizes = {name: raw.ints(name) for name in ("m", "n", "k")}
    batch = raw.ints("batch") if "batch" in raw.columns else IntColumn.constant(1, len(raw))
    label, parts = joined(op, raw.labels("family"), raw.labels("dtype"), raw.labels("outdtype"))
    for number, (name, family, dtype, out) in enumerate(parts):
        if name not in ("linear", "bmm"):
            continue
        types = _types(family, dtype)
        bare = types.scaling is None and types.dtype in ("float16", "bfloat16")
        wide = bare and plain(out).dtype == "float32"
        flags: dict[str, bool | int | str | None] = {**types.flags, "out_dtype": "float32" if wide else None}
        if name == "linear":
            flags["bias"] = False
        own = sizes if name == "linear" else {"batch": batch, **sizes}
        yield Group(name, label.is_(str(number)), own, flags, dtype=types.dtype)


IMPORTER = Importer(
    name="aiter_gemm",
    file_name="ops_aiter_gemm.parquet",
    repository="ROCm/aiter",
    commit="e4048607",
    origin="aiter/configs/**, aiter/ops/flydsl",
    licence="MIT",
    protocol="kernel",
    needs=frozenset({"op", "device", "family", "dtype", "m", "n", "k"}),
    lacks=frozenset(
        {"framework", "precision", "trans_a", "program", "protocol", "model", "rows", "in_hw", "direction"}
    ),
    reads=frozenset({"outdtype", "batch"}),
    groups=_groups,
    framework=always("aiter"),
)
