"""cuDNN front end: attention and norms of its benchmarks, forward and backward.

``attention_forward`` with values as wide as keys becomes ``attention_prefill`` where it is causal, else
``attention_encoder``. With keys of 192 and values of 128 columns it becomes ``mla_prefill``, which is causal.
``attention_backward`` has both widths. Left out (``unknown_operator``): a window, scales per 32 elements (mxfp8), and
deterministic gradients, which are another kernel.

Norms: ``cudnn`` and PyTorch's module are one kernel, ``torch_compile`` is a compiler's.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from cdmpp.data.assemble import Group
from cdmpp.data.importers.base import FP8, Importer, always, column_set, combinations
from cdmpp.data.labels import Labels
from cdmpp.data.raw import IntColumn, RawTable

_HEADS = column_set("batch q_len heads kv_heads head_dim")
_TYPES = {"bfloat16": "bfloat16", "fp8": FP8}
#: Columns of keys and of values of a latent attention that reads expanded keys.
_KEY, _VALUE = 192, 128


def _attention(raw: RawTable, op: Labels) -> Iterator[Group]:
    size = {name: raw.ints(name) for name in (*sorted(_HEADS), "kv_len", "head_dim_v", "window")}
    value = {name: column.values for name, column in size.items()}
    stated = (value["q_len"] == value["kv_len"]) & (value["window"] == 0) & ~size["window"].missing
    equal = value["head_dim"] == value["head_dim_v"]
    latent = (value["head_dim"] == _KEY) & (value["head_dim_v"] == _VALUE) & (value["heads"] == value["kv_heads"])
    heads = {name: size[name] for name in sorted(_HEADS)}
    widths = {"nope": _VALUE, "rope": _KEY - _VALUE, "v_dim": _VALUE, "past_len": 0}
    expanded = {name: size[name] for name in ("batch", "q_len", "heads")}
    expanded |= {name: IntColumn.constant(width, len(raw)) for name, width in widths.items()}
    columns = (raw.labels(name).map(str.lower) for name in ("causal", "deterministic", "dtype"))
    for rows, (name, causal, deterministic, text) in combinations(op, *columns):
        rows, dtype = rows & stated, _TYPES.get(text)
        if dtype is None or deterministic == "true":
            continue
        if name == "attention_backward":
            wide = {**heads, "v_dim": size["head_dim_v"]}
            yield Group(name, rows, wide, {"causal": causal == "true"}, dtype)
        elif name == "attention_forward" and causal == "true":
            yield Group("attention_prefill", rows & equal, heads, {}, dtype)
            yield Group("mla_prefill", rows & latent, expanded, {"module": False}, dtype)
        elif name == "attention_forward":
            yield Group("attention_encoder", rows & equal, heads, {}, dtype)


def _norms(raw: RawTable, op: Labels) -> Iterator[Group]:
    sizes = {name: raw.ints(name) for name in ("rows", "cols")}
    for source, operator in (("rms_norm", "rmsnorm"), ("layer_norm", "layernorm")):
        yield Group(operator, op.is_(f"{source}_forward"), sizes)
        yield Group(f"{operator}_backward", op.is_(f"{source}_backward"), sizes)


_importer = partial(Importer, repository="NVIDIA/cudnn-frontend", commit="3929da2e", licence="MIT", protocol="kernel")
ATTENTION = _importer(
    name="cudnn_attention",
    file_name="ops_cudnn_attention.csv.gz",
    origin="benchmark/sdpa_benchmark_training/results",
    needs=_HEADS | column_set("op device dtype causal kv_len head_dim_v window deterministic"),
    groups=_attention,
    framework=always("vendor"),
)
NORMS = _importer(
    name="cudnn_norms",
    file_name="ops_cudnn_norms.csv.gz",
    origin="benchmark/norms/results",
    needs=column_set("op device provider dtype rows cols"),
    groups=_norms,
    framework=lambda raw: raw.labels("provider").map(lambda name: "vendor" if name == "cudnn" else "pytorch"),
    implementation=lambda raw: raw.labels("provider").map(
        lambda name: "compiled" if name == "torch_compile" else "fused"
    ),
)
