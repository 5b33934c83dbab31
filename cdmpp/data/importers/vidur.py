"""Vidur: fp16 layers of language models, kernel time (median of 20 runs).

``linear`` becomes ``linear`` without bias (m tokens, n, k); the vector operators take rows = ``m`` and cols =
``n`` (``silu_and_mul`` reads 2n columns). ``add`` has two inputs, but three where ``model`` is
``microsoft/phi-2``, whose parallel residual adds three tensors; without the column ``model``, two.
pipeweave's fp8 GEMM has columns that a part of this table has, too: rows of type fp8 have the source
``pipeweave_gemm_fp8``. They are bare products of a vendor's library (kernel time, statistic not stated).
``mean_us``, ``min_us``, ``std_us``, ``role`` and ``tp`` are never read, nor is pipeweave's ``split``.
"""

from __future__ import annotations

from dataclasses import replace

from cdmpp.data.assemble import Group
from cdmpp.data.importers.base import Importer
from cdmpp.data.importers.element_types import FP8, plain
from cdmpp.data.labels import Labels
from cdmpp.data.raw import RawTable

_VECTOR = ("silu_and_mul", "rmsnorm", "layernorm", "gelu", "relu", "silu", "tanh", "mul", "softmax")
PIPEWEAVE_FP8 = "pipeweave_gemm_fp8"
_THREE_INPUTS = "microsoft/phi-2"


def _source(raw: RawTable) -> Labels:
    return raw.labels("dtype").map(lambda name: PIPEWEAVE_FP8 if plain(name).dtype == FP8 else IMPORTER.name)


def _framework(raw: RawTable) -> Labels:
    return _source(raw).map(lambda name: "vendor" if name == PIPEWEAVE_FP8 else "pytorch")


def _groups(raw: RawTable, op: Labels) -> list[Group]:
    m, n = raw.ints("m"), raw.ints("n")
    vector = {"rows": m, "cols": n}
    add, three = op.is_("add"), raw.labels("model").is_(_THREE_INPUTS)
    return [
        Group("linear", op.is_("linear"), {"m": m, "n": n, "k": raw.ints("k")}),
        Group("add", add & ~three, vector, {"inputs": 2}),
        Group("add", add & three, vector, {"inputs": 3}),
        *(Group(name, op.is_(name), vector) for name in _VECTOR if name in op.names),
    ]


IMPORTER = Importer(
    name="vidur",
    file_name="ops_vidur_fp16.parquet",
    repository="microsoft/vidur",
    commit="7d47513",
    origin="data/profiling/compute/*/*/*/mlp.csv",
    licence="MIT",
    protocol="kernel",
    needs=frozenset({"op", "device", "dtype", "m", "n"}),
    lacks=frozenset(
        {
            "framework",
            "batch",
            "rows",
            "q_len",
            "trans_a",
            "direction",
            "precision",
            "program",
            "family",
            "protocol",
            "cfg",
        }
    ),
    reads=frozenset({"model", "k"}),
    groups=_groups,
    framework=_framework,
    dtype=lambda raw: raw.labels("dtype").map(lambda name: plain(name).dtype),
    row_source=_source,
)
PIPEWEAVE_IMPORTER = replace(
    IMPORTER,
    name=PIPEWEAVE_FP8,
    file_name="ops_pipeweave_gemm_fp8.parquet",
    repository="zksainx/pipeweave",
    commit="55e03178",
    origin="dataset/gemm_fp8_*",
    licence="Apache-2.0",
    needs=frozenset({"op", "device", "dtype", "m", "n", "k"}),
    read_by=IMPORTER.name,
)
