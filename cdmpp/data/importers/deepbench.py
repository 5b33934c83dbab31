"""DeepBench: vendors' GEMM and convolution libraries on older devices (statistic not stated).

``gemm`` is column-major BLAS: its C[m, n] is the row-major [n, m], so it becomes ``linear`` with m = the
table's ``n`` and n = its ``m``; the transpositions change no sizes and are not kept. ``conv2d`` keeps its
direction (``batch`` becomes n; no dilation, groups or bias). ``precision`` is the sheet's own wording and is
mapped by :func:`element_type`: the arithmetic's own precision (fp16 with fp16 or with fp32 products) is not
kept, since a user cannot ask for it. ``suite`` is never read.
"""

from __future__ import annotations

from cdmpp.data.assemble import Group
from cdmpp.data.importers.base import Importer, always, column_set
from cdmpp.data.importers.rocm import DIRECTIONS
from cdmpp.data.labels import Labels
from cdmpp.data.raw import RawTable

#: Column of each size.
_CONV = {"n": "batch"} | {n: n for n in column_set("c_in h w c_out kh kw stride_h stride_w pad_h pad_w")}


def element_type(precision: str) -> str:
    """Element type of the inputs, from the sheet's wording; unknown wordings stay as they are."""
    words = precision.lower()
    if "int8" in words:
        return "int8"
    if words.startswith("16 bit inputs"):
        return "float16"
    return "float32" if words in ("float", "32 bit") else precision


def _groups(raw: RawTable, op: Labels) -> list[Group]:
    gemm = {"m": raw.ints("n"), "n": raw.ints("m"), "k": raw.ints("k")}
    conv = {field: raw.ints(column) for field, column in _CONV.items()}
    direction = raw.labels("direction")
    is_conv = op.is_("conv2d")
    return [
        Group("linear", op.is_("gemm"), gemm),
        *(Group("conv2d", is_conv & direction.is_(d), conv, {"direction": d}) for d in DIRECTIONS),
    ]


IMPORTER = Importer(
    name="deepbench",
    file_name="ops_deepbench.csv.gz",
    repository="baidu-research/DeepBench",
    commit="da81ba7",
    origin="results/**/*.xlsx",
    licence="Apache-2.0",
    protocol="kernel",
    needs=column_set("op device precision"),
    one_of=(column_set("m n k"), column_set("direction").union(_CONV.values())),
    groups=_groups,
    framework=always("vendor"),
    dtype=lambda raw: raw.labels("precision").map(element_type),
)
