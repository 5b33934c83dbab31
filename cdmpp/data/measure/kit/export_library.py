"""Export of library operators and of the host part as part files.

The operators of a job are implementations of given operators, operators of new sizes, and operators without a
specification.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from cdmpp.data.measure.kit.parts import HOME, JOB, Entry, write_parts
from cdmpp.data.measure.runtime import host
from cdmpp.data.measure.runtime.call_problems import call_problem
from cdmpp.data.measure.runtime.further_calls import FIELDS, composed_problem
from cdmpp.data.physics import needed_bytes
from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import CdmppError, DataError, InvalidDeviceError
from cdmpp.programs.operators import OperatorSpec, make_operator, parse_operator
from cdmpp.utils.writing import check_new_folder

#: Backends of ``scaled_dot_product_attention``; those without float32 are first.
_HALF_BACKENDS, _BACKENDS = ("FLASH_ATTENTION", "CUDNN_ATTENTION"), ("EFFICIENT_ATTENTION", "MATH")
#: Programs of families that few measurements have, as starting points of new sizes.
_RARE = (
    *(
        text + f",dtype={dtype}"
        for dtype in ("float32", "float16", "bfloat16")
        for text in (
            "max_pool2d:n=32,c=64,h=112,w=112,kh=3,kw=3,stride_h=2,stride_w=2,pad_h=1,pad_w=1",
            "avg_pool2d:n=32,c=256,h=28,w=28,kh=2,kw=2,stride_h=2,stride_w=2",
            "batch_norm:n=32,c=128,h=56,w=56",
            "conv2d:n=32,c_in=192,h=28,w=28,c_out=192,kh=3,kw=3,pad_h=1,pad_w=1,groups=192",
            "conv2d:n=8,c_in=384,h=56,w=56,c_out=384,kh=7,kw=7,pad_h=3,pad_w=3,groups=384",
            "softmax:rows=8192,cols=1024",
            "layernorm:rows=8192,cols=1024",
            "rmsnorm:rows=4096,cols=4096",
            "rotary_embedding:rows=4096,cols=5120,head_dim=128",
            "gelu:rows=8192,cols=4096",
            "silu:rows=8192,cols=4096",
            "silu_and_mul:rows=4096,cols=11008",
            "reduce_mean:rows=8192,cols=4096",
            "argmax:rows=256,cols=32000",
            "copy:rows=4096,cols=4096,transposed=true",
            "embedding:rows=8192,cols=4096,table_rows=32000",
            "attention_encoder:batch=16,q_len=512,heads=16,kv_heads=16,head_dim=64",
            "attention_prefill:batch=2,q_len=2048,heads=32,kv_heads=8,head_dim=128",
        )
    ),
    "linear:m=4096,n=4096,k=4096,dtype=tfloat32",
    "bmm:batch=32,m=512,n=512,k=64,dtype=tfloat32",
    "linear:m=4096,n=4096,k=4096,dtype=float8_e4m3",
)
#: Sizes that vary; windows, strides, groups and head sizes stay.
_VARIED = frozenset(
    ("m", "n", "k", "batch", "rows", "cols", "table_rows", "q_len", "past_len", "c", "c_in", "c_out", "h", "w")
)
#: New sizes are within this factor of the old, in powers of two. Sizes from 64 on are multiples of 16 in this share.
_POWERS, _ALIGNED = 1.5, 0.8
#: Sizes of operators without a specification, from which each draw takes one.
_SIZES: Mapping[str, Sequence[int]] = {
    "n": (1, 2, 4, 8, 16, 32, 64),
    "c_in": (16, 32, 64, 128, 256, 512),
    "c_out": (16, 32, 64, 128, 256, 512),
    "c": (32, 64, 128, 256, 512),
    "length": (128, 512, 1000, 3000, 16000),
    "depth": (4, 8, 16, 32),
    "h": (7, 14, 28, 56, 112),
    "w": (7, 14, 28, 56, 112),
    "kernel": (1, 2, 3, 5, 7),
    "stride": (1, 1, 2),
    "pad": (0, 1, 2, 3),
    "groups": (1, 1, 1, 2, 8, 16),
    "batch": (1, 4, 16, 64, 128),
    "steps": (1, 16, 64, 256, 512),
    "input": (64, 128, 256, 512, 1024),
    "hidden": (64, 128, 256, 512, 1024),
    "layers": (1, 1, 2, 4),
    "bidirectional": (0, 1),
    "rows": (1, 8, 64, 512, 2048, 8192, 32768),
    "cols": (64, 256, 1000, 1024, 4096, 16384, 32000, 128256),
    "axis": (0, 1),
}
_TYPES = ("float32", "float16", "bfloat16")
#: Limits of elements of a tensor and of multiplications, so that each takes some milliseconds at most.
_MAX_ELEMENTS, _MAX_PRODUCTS = 2**27, 10**11
_BACKWARD_SHARE = 0.4
_MAX_DRAWS = 200
#: Seconds for each item: allocating, choosing kernels, capturing and tracing; and compiling it. Estimates.
_ITEM_S, _COMPILED_S = 0.4, 2.0
#: Runs of an item in three protocols, and their least duration in seconds.
_RUNS, _RUN_S = 21, 2e-3
#: Estimated seconds of a host part.
HOST_S = 120.0


@dataclass(frozen=True)
class Variant:
    """One item of a library part.

    Attributes
    ----------
    operator : dict
        Fields of the operator.
    implementation : {"library", "composed", "compiled", "extra"}
    sdpa : str
        Backend of attention; "": PyTorch chooses.
    origin : {"training", "new"}
        Whether the model's training data have the operator.
    """

    operator: Mapping[str, Any]
    implementation: str
    sdpa: str = ""
    origin: str = "new"

    @property
    def kind(self) -> str:
        """Implementation and backend: variants of one operator differ in it."""
        return f"{self.implementation} {self.sdpa}".strip()

    def item(self) -> dict[str, Any]:
        """The variant as an item of a part; ``id`` is a hash of its content without the origin."""
        content = {"operator": dict(self.operator), "implementation": self.implementation, "sdpa": self.sdpa}
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        identity = hashlib.sha256(text.encode()).hexdigest()[:24]
        return {"id": identity, **content, "protocols": ["eager", "kernel", "graph"], "origin": self.origin}


def variants_of(spec: OperatorSpec, origin: str, memory_bytes: float) -> Iterator[Variant]:
    """Yield the variants of an operator that PyTorch has; none if it has no call of it."""
    fields = spec.canonical()
    if not call_problem(fields):
        yield Variant(fields, "library", origin=origin)
        if spec.operator.startswith("attention"):
            backends = _BACKENDS if spec.dtype == "float32" else _HALF_BACKENDS + _BACKENDS
            for backend in backends:
                if backend != "MATH" or needed_bytes(spec) <= memory_bytes:
                    yield Variant(fields, "library", backend, origin)
    if not composed_problem(fields):
        yield Variant(fields, "composed", origin=origin)
        yield Variant(fields, "compiled", origin=origin)


def new_sizes(pool: Iterable[OperatorSpec], rng: np.random.Generator, per_operator: int) -> list[OperatorSpec]:
    """Vary the sizes of a pool's operators; the result has no operator of the pool.

    Parameters
    ----------
    pool : iterable of OperatorSpec
    rng : Generator
    per_operator : int
        Number of draws for each operator.
    """
    known = {spec.hash(): spec for spec in pool}
    starts = [*known.values(), *(parse_operator(text) for text in _RARE)]
    found: dict[str, OperatorSpec] = {}
    for start in starts:
        for _ in range(per_operator):
            try:
                spec = make_operator(_varied(start, rng))
            except CdmppError:  # sizes that contradict each other
                continue
            if spec.hash() not in known:
                found[spec.hash()] = spec
    return list(found.values())


def _varied(start: OperatorSpec, rng: np.random.Generator) -> dict[str, Any]:
    fields = start.canonical()
    is_depthwise = fields.get("groups", 1) > 1
    factors = {name: 2.0 ** rng.uniform(-_POWERS, _POWERS) for name in sorted(_VARIED & fields.keys())}
    if is_depthwise:
        fields["groups"] = fields["c_in"] = fields["c_out"] = _rounded(fields["c_in"] * factors["c_in"], rng)
        factors = {name: factor for name, factor in factors.items() if name not in ("c_in", "c_out")}
    for name, factor in factors.items():
        fields[name] = _rounded(fields[name] * factor, rng)
    if "head_dim" in fields and "cols" in fields:
        fields["cols"] = max(1, round(fields["cols"] / fields["head_dim"])) * fields["head_dim"]
    if fields["dtype"] in ("int8", "float8_e4m3"):
        fields.update({name: max(16, fields[name] // 16 * 16) for name in ("n", "k") if name in fields})
    return fields


def _rounded(size: float, rng: np.random.Generator) -> int:
    step = 16 if size >= 64 and rng.random() < _ALIGNED else 1
    return max(1 if size >= 0.5 else 0, round(size / step) * step)


def extra_variants(forward: Sequence[Mapping[str, Any]], count: int, rng: np.random.Generator) -> list[Variant]:
    """Draw distinct operators that have no specification yet, backward passes among them.

    Parameters
    ----------
    forward : sequence of dict
        Operators with a specification whose backward passes may be drawn.
    count : int
    rng : Generator
    """
    names = [name for name in FIELDS if name != "backward"]
    differentiable = [fields for fields in forward if _is_differentiable(fields)]
    found: dict[str, Variant] = {}
    for draw in range(_MAX_DRAWS * count):
        if len(found) == count:
            break
        fields = _drawn(names[draw % len(names)], rng)
        if rng.random() < _BACKWARD_SHARE:
            if differentiable and rng.random() < 0.5:
                fields = differentiable[int(rng.integers(len(differentiable)))]
            fields = {"operator": "backward", "of": dict(fields)} if _is_small(fields) else fields
        if _is_small(fields.get("of", fields)):
            variant = Variant(fields, "extra")
            found[variant.item()["id"]] = variant
    return list(found.values())


def _drawn(operator: str, rng: np.random.Generator) -> Mapping[str, Any]:
    sizes = {name: int(rng.choice(_SIZES[name])) for name in FIELDS[operator]}
    if "pad" in sizes:
        sizes["pad"] = min(sizes["pad"], sizes["kernel"] // 2)
    return {"operator": operator, "dtype": _TYPES[int(rng.integers(len(_TYPES)))], **sizes}


def _is_small(fields: Mapping[str, Any]) -> bool:
    """Whether an operator fits the limits and its sizes agree; operators with a specification do."""
    operator = fields["operator"]
    if operator not in FIELDS:
        return True
    spatial = [fields[name] for name in ("length", "depth", "h", "w") if name in fields]
    if spatial and min(spatial) < fields.get("kernel", 1):
        return False
    if any(fields[name] % fields.get("groups", 1) for name in ("c", "c_in", "c_out") if name in fields):
        return False
    if "steps" in fields:
        cells = fields["steps"] * fields["batch"] * fields["layers"] * (1 + fields["bidirectional"])
        products = 4 * cells * fields["hidden"] * (fields["hidden"] + fields["input"])
        return bool(cells * 4 * fields["hidden"] <= _MAX_ELEMENTS and products <= _MAX_PRODUCTS)
    if "rows" in fields:
        return int(fields["rows"] * fields["cols"]) <= _MAX_ELEMENTS
    channels = fields.get("c", 0) or max(fields["c_in"], fields["c_out"])
    elements = fields["n"] * channels * prod(spatial) * (4 if operator == "conv_transpose2d" else 1)
    window = fields.get("kernel", 1) ** len(spatial) * fields.get("c_in", 1) // fields.get("groups", 1)
    return bool(elements <= _MAX_ELEMENTS and elements * window <= _MAX_PRODUCTS)


def _is_differentiable(fields: Mapping[str, Any]) -> bool:
    """Whether PyTorch has the backward pass of an operator's call."""
    has_none = ("argmax", "batch_norm", "copy", "embedding")
    return (
        fields["dtype"] in _TYPES
        and fields["operator"] not in has_none
        and fields.get("direction", "fwd") == "fwd"
        and not call_problem(fields)
    )


def export_library(
    variants: Sequence[Variant],
    expected_s: Sequence[float],
    device: DeviceSpec,
    folder: Path,
    *,
    part_mib: float = 18.0,
    seed: int = 0,
    about: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Write a job of kinds "library" and "host".

    The order is random, so that an incomplete run has a fair sample.

    Parameters
    ----------
    variants : sequence of Variant
    expected_s : sequence of float
        Predicted latency of each in seconds; NaN: not known.
    device : DeviceSpec
        A GPU.
    folder : Path
        A new folder.
    part_mib : float
        Largest size of a part file in MiB.
    seed : int
    about : dict, optional
        Facts for the import.

    Returns
    -------
    dict
        Content of ``home/job.json``.

    Raises
    ------
    DataError
        The folder has a job or other files, or cannot be written.
    InvalidDeviceError
        The device is not a GPU.
    """
    check_target(device, folder)
    order = np.random.default_rng(seed).permutation(len(variants)).tolist()
    estimate_s = math.fsum(_item_seconds(v, s) for v, s in zip(variants, expected_s, strict=True))
    facts = {"estimate_s": round(estimate_s, 1), **(about or {})}
    entries = {"library": [Entry(variants[i].item()) for i in order], "host": [Entry(item) for item in host.items()]}
    try:
        return write_parts(folder, entries, device=device.name, part_mib=part_mib, about={"library": facts})
    except OSError as error:
        raise DataError(f"cannot write {folder / HOME / JOB}: {error.strerror}", hint="choose another --out") from None


def check_target(device: DeviceSpec, folder: Path) -> None:
    """Raise an error unless the device is a GPU and the folder is new; errors as of :func:`export_library`."""
    if device.kind != "gpu":
        raise InvalidDeviceError(f"{device.name} is a {device.kind}, not a GPU", hint="cdmpp select measures a CPU")
    check_new_folder(folder)


def _item_seconds(variant: Variant, latency_s: float) -> float:
    """Estimate the seconds that an item takes on the GPU machine."""
    run_s = _RUN_S if math.isnan(latency_s) else max(_RUN_S, latency_s)
    return _ITEM_S + _RUNS * run_s + (_COMPILED_S if variant.implementation == "compiled" else 0.0)
