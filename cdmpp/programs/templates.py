"""Lowered structures of the operators, one per structural class, shipped with the package.

An operator's sizes rarely change the structure of its lowered TIR. Each class (operator, dtype and the
flags of :func:`cdmpp.programs.operators.structural_flags`) was lowered once by TVM with symbolic sizes;
its TVM JSON is stored here. Features of any number of shapes are then computed from it, without TVM.
``python -m cdmpp.programs.make_templates`` makes the file anew; a test compares it with TVM.
"""

from __future__ import annotations

import gzip
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np

from cdmpp.errors import UnsupportedOperatorError
from cdmpp.programs.attention import KV_GROUPS, cache_dtypes, projections
from cdmpp.programs.elements import LAYOUTS, combinations
from cdmpp.programs.operators import derived_sizes, lowered_operators, operator_types
from cdmpp.programs.products import BALANCES

FILE_NAME = "templates.json.gz"
#: Element types that no specification names stand in stored templates for a cache's and a weight's type.
CACHE_DTYPE, WEIGHT_DTYPE = "float8_e5m2", "float8_e3m4"
#: Element types that TVM names otherwise.
TVM_NAMES = {"float8_e4m3": "float8_e4m3fn", "float4_e2m1": "float4_e2m1fn"}


@cache
def _shipped() -> dict[str, str]:
    data = files("cdmpp.programs").joinpath(FILE_NAME).read_bytes()
    classes: dict[str, str] = json.loads(gzip.decompress(data))["classes"]
    return classes


def template_json(structural_class: str) -> str:
    """TVM JSON of a structural class, sizes symbolic and named like the specification's fields."""
    if not is_class(structural_class):
        raise UnsupportedOperatorError(
            f"no lowered structure for {structural_class}", hint="this operator does not exist for that dtype"
        )
    name, renamed = _stored_name(structural_class)
    text = _shipped()[name]
    if not renamed:
        return text
    pattern = "|".join(f'"{dtype}"' for dtype in renamed)
    return re.sub(pattern, lambda match: f'"{renamed[match[0][1:-1]]}"', text)


def is_class(name: str) -> bool:
    """Whether there is a structural class of this name."""
    return name in _classes()


@cache
def _classes() -> frozenset[str]:
    return frozenset(class_name(*known) for known in all_classes())


def _stored_name(structural_class: str) -> tuple[str, dict[str, str]]:
    operator, dtype, *flags = structural_class.split(":")
    dtype, stored_flags, renamed = stored_class(operator, dtype, dict(flag.split("=", 1) for flag in flags))
    return class_name(operator, dtype, stored_flags), renamed


def stored_class(operator: str, dtype: str, flags: Mapping[str, Any]) -> tuple[str, dict[str, Any], dict[str, str]]:
    """The class whose template a class uses: classes that differ in element types alone share one.

    Returns its type and flags, and element types in its template -> those of the class that was asked for, as TVM
    writes them.
    """
    # Routing changes the sizes of the lowered structure, and nothing else.
    kept_flags = {name: value for name, value in flags.items() if name != "balance"}
    renamed: dict[str, str] = {}
    if dtype == "tfloat32":
        dtype = "float32"
    elif dtype == "float16":
        dtype, renamed = "bfloat16", {"bfloat16": "float16"}
        if kept_flags.get("weight_dtype") == "bfloat16":
            kept_flags["weight_dtype"], renamed["float16"] = "float16", "bfloat16"
    elif dtype == "float4_e2m1":
        dtype, renamed = "float8_e4m3", {"float8_e4m3fn": "float4_e2m1fn"}
    if kept_flags.get("kv_dtype"):
        renamed[CACHE_DTYPE] = TVM_NAMES.get(kept_flags["kv_dtype"], kept_flags["kv_dtype"])
        kept_flags["kv_dtype"] = CACHE_DTYPE
    weight = kept_flags.get("weight_dtype")
    # A weight of another type than the activations is widened; integers are added up as integers.
    if weight in TVM_NAMES or (weight in ("int4", "int8") and dtype != "int8" and not operator.startswith("mla_")):
        renamed[WEIGHT_DTYPE] = TVM_NAMES.get(weight, weight)
        kept_flags["weight_dtype"] = WEIGHT_DTYPE
    return dtype, kept_flags, renamed


def class_name(operator: str, dtype: str, flags: Mapping[str, Any]) -> str:
    """Key of a structural class, as :meth:`OperatorSpec.structural_class` gives it."""
    return ":".join([operator, dtype, *(f"{k}={v}" for k, v in flags.items())])


def size_names(operator: str) -> list[str]:
    """The integer fields of an operator: the symbols of its templates."""
    return [name for name, field in operator_types()[operator].model_fields.items() if field.annotation is int]


@cache
def symbols(operator: str) -> tuple[str, ...]:
    """Symbols of an operator's templates: its integer fields and its derived sizes."""
    names = size_names(operator)
    example: dict[str, Any] = {**dict.fromkeys(names, 1), "balance": "balanced"}
    return tuple(dict.fromkeys([*names, *derived_sizes(operator, example)]))


def all_classes() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Every (operator, dtype, flags) that a specification can ask for."""
    for operator, dtype in ((name, dtype) for name, spec in lowered_operators().items() for dtype in spec.dtypes):
        for own_flags in _own_flags(operator, dtype):
            for shape in _shape_flags(operator):
                flags = {**own_flags, **shape}
                if not (flags.get("bias") and flags.get("direction", "fwd") != "fwd"):
                    yield operator, dtype, {name: value for name, value in flags.items() if value is not None}


def _product(axes: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    return (dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values()))


def _shape_flags(operator: str) -> Iterator[dict[str, Any]]:
    axes: dict[str, Sequence[Any]] = {}
    if operator == "conv2d":
        axes = {"padded": (False, True), "grouped": (False, True)}
    elif operator in ("max_pool2d", "avg_pool2d"):
        axes = {"padded": (False, True)}
    elif operator in ("attention_mixed", "attention_backward"):
        axes = {"kv": KV_GROUPS}
    elif operator.startswith("attention"):
        axes = {"kv": KV_GROUPS, "causal": (False, True) if operator == "attention_prefill" else (False,)}
    return _product(axes)


def _bare_flags(operator: str, dtype: str) -> Iterator[dict[str, Any]]:
    """How a bare product stores its operands and sums; at least one of the three is stated."""
    usual = operator_types()[operator].default_layout  # type: ignore[attr-defined]
    half = dtype in ("float16", "bfloat16")
    axes = {
        "layout": (None, *(name for name in LAYOUTS if name != usual)),
        "accumulate": (None, "float16") if dtype == "float16" else (None,),
        "out_dtype": (None, "float32") if half else (None,),
    }
    yield from (flags for flags in _product(axes) if any(flags.values()))


def _own_flags(operator: str, dtype: str) -> Iterator[dict[str, Any]]:
    """Structural fields, None among them, in the order of the specification."""
    expert = operator in ("moe", "moe_w13", "grouped_gemm")
    if operator in ("linear", "bmm") or expert:
        for weight, scaling in combinations(dtype, experts=expert):
            typed = {"weight_dtype": weight, "scaling": scaling}
            if operator in ("linear", "bmm"):
                biased = [{"bias": False}, {"bias": True}] if operator == "linear" else [{}]
                yield from ({**bias, **typed} for bias in biased)
                if scaling is None:
                    yield from ({**biased[0], **typed, **stored} for stored in _bare_flags(operator, dtype))
            elif operator == "grouped_gemm":
                yield from ({**typed, "balance": balance} for balance in BALANCES)
            elif expert:
                for flags in _product({"balance": BALANCES, "gated": (False, True)}):
                    yield {**typed, **flags}
    elif operator == "attention_backward":
        yield from _product({"causal": (False, True)})
    elif operator.startswith(("attention", "mla_")):
        for kv in cache_dtypes(dtype):
            if operator.startswith("attention"):
                yield {"kv_dtype": kv}
                continue
            for weight, scaling in projections(dtype):
                yield {"kv_dtype": kv, "module": True, "weight_dtype": weight, "scaling": scaling}
            yield {"kv_dtype": kv, "module": False}
    elif operator == "softmax_cross_entropy":
        yield from _product({"direction": ("fwd", "bwd", "fwd_bwd")})
    elif operator == "conv2d":
        yield from _product({"direction": ("fwd", "bwd_data", "bwd_weight"), "bias": (False, True)})
    elif operator in ("add", "sub", "mul", "div", "pow", "maximum", "minimum"):
        yield from _product({"inputs": (2, 3, 4)})
    elif operator == "copy":
        yield from _product({"transposed": (False, True)})
    else:
        yield {}


def partition(
    operator: str, fixed: Mapping[str, Any], sizes: Mapping[str, np.ndarray]
) -> Iterator[tuple[dict[str, Any], np.ndarray]]:
    """Split shapes of one operator into structural classes: flags of each, and its rows.

    ``fixed``: the specification's structural fields (``bias``, ``direction``, ``causal``, ``inputs``, ``transposed``).
    ``sizes``: every integer field, one element per shape.
    """
    count = len(next(iter(sizes.values())))
    columns: dict[str, np.ndarray] = {}
    if operator in ("conv2d", "max_pool2d", "avg_pool2d"):
        columns["padded"] = (sizes["pad_h"] > 0) | (sizes["pad_w"] > 0)
    if operator == "conv2d":
        columns["grouped"] = sizes["groups"] > 1
    elif operator.startswith("attention"):
        kv, heads = sizes["kv_heads"], sizes["heads"]
        columns["kv"] = np.where(kv == heads, "same", np.where(kv == 1, "one", "grouped"))
        if operator not in ("attention_mixed", "attention_backward"):
            columns["causal"] = (sizes["q_len"] > 1) & (operator == "attention_prefill")
    structure = {name: v for name in operator_types()[operator].structural_fields if (v := fixed.get(name)) is not None}
    if not columns:
        yield structure, np.arange(count)
        return
    codes = np.zeros(count, dtype=np.int64)
    levels: list[tuple[str, np.ndarray]] = []
    for name, values in columns.items():
        distinct, inverse = np.unique(values, return_inverse=True)
        codes = codes * len(distinct) + inverse
        levels.append((name, distinct))
    for code in np.unique(codes):
        rows = np.flatnonzero(codes == code)
        flags = {**structure, **{name: columns[name][rows[0]].item() for name, _ in levels}}
        yield flags, rows
