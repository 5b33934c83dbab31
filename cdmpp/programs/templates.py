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
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np

from cdmpp.errors import UnsupportedOperatorError
from cdmpp.programs.operators import lowered_operators, operator_types

FILE_NAME = "templates.json.gz"


@cache
def _shipped() -> dict[str, str]:
    data = files("cdmpp.programs").joinpath(FILE_NAME).read_bytes()
    classes: dict[str, str] = json.loads(gzip.decompress(data))["classes"]
    return classes


def template_json(structural_class: str) -> str:
    """TVM JSON of a structural class, sizes symbolic and named like the specification's fields."""
    try:
        return _shipped()[structural_class]
    except KeyError:
        raise UnsupportedOperatorError(
            f"no lowered structure for {structural_class}", hint="this operator does not exist for that dtype"
        ) from None


def is_class(name: str) -> bool:
    """Whether there is a structural class of this name."""
    return name in _shipped()


def class_name(operator: str, dtype: str, flags: Mapping[str, Any]) -> str:
    """Key of a structural class, as :meth:`OperatorSpec.structural_class` gives it."""
    return ":".join([operator, dtype, *(f"{k}={v}" for k, v in flags.items())])


def size_names(operator: str) -> list[str]:
    """The integer fields of an operator: the symbols of its templates."""
    return [name for name, field in operator_types()[operator].model_fields.items() if field.annotation is int]


def all_classes() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Every (operator, dtype, flags) that a specification can ask for."""
    for operator, dtype in ((name, dtype) for name, spec in lowered_operators().items() for dtype in spec.dtypes):
        axes: dict[str, tuple[Any, ...]] = {}
        if operator == "linear":
            axes = {"bias": (False, True)}
        elif operator == "conv2d":
            axes = {
                "direction": ("fwd", "bwd_data", "bwd_weight"),
                "bias": (False, True),
                "padded": (False, True),
                "grouped": (False, True),
            }
        elif operator in ("add", "sub", "mul", "div", "pow", "maximum", "minimum"):
            axes = {"inputs": (2, 3, 4)}
        elif operator == "copy":
            axes = {"transposed": (False, True)}
        elif operator in ("max_pool2d", "avg_pool2d"):
            axes = {"padded": (False, True)}
        elif operator.startswith("attention"):
            causal = (False, True) if operator == "attention_prefill" else (False,)
            axes = {"kv": ("same", "one", "grouped"), "causal": causal}
        for values in itertools.product(*axes.values()):
            flags = dict(zip(axes, values, strict=True))
            if not (flags.get("bias") and flags.get("direction", "fwd") != "fwd"):
                yield operator, dtype, flags


def partition(
    operator: str, fixed: Mapping[str, Any], sizes: Mapping[str, np.ndarray]
) -> Iterator[tuple[dict[str, Any], np.ndarray]]:
    """Split shapes of one operator into structural classes.

    Parameters
    ----------
    operator : str
    fixed : mapping
        The specification's structural fields (``bias``, ``direction``, ``inputs``, ``transposed``).
    sizes : mapping of str to int array
        Every integer field, one element per shape.

    Yields
    ------
    flags, rows
        Result of :func:`~cdmpp.programs.operators.structural_flags` for these rows.
    """
    count = len(next(iter(sizes.values())))
    choices: list[dict[str, np.ndarray]] = [{}]
    if operator == "conv2d":
        padded = (sizes["pad_h"] > 0) | (sizes["pad_w"] > 0)
        choices = [{"padded": padded, "grouped": sizes["groups"] > 1}]
    elif operator in ("max_pool2d", "avg_pool2d"):
        choices = [{"padded": (sizes["pad_h"] > 0) | (sizes["pad_w"] > 0)}]
    elif operator.startswith("attention"):
        kv, heads = sizes["kv_heads"], sizes["heads"]
        kind = np.where(kv == heads, "same", np.where(kv == 1, "one", "grouped"))
        causal = (sizes["q_len"] > 1) & (operator == "attention_prefill")
        choices = [{"kv": kind, "causal": causal}]
    columns = choices[0]
    own = {name: fixed[name] for name in operator_types()[operator].structural_fields}
    if not columns:
        yield own, np.arange(count)
        return
    codes = np.zeros(count, dtype=np.int64)
    levels: list[tuple[str, np.ndarray]] = []
    for name, values in columns.items():
        distinct, inverse = np.unique(values, return_inverse=True)
        codes = codes * len(distinct) + inverse
        levels.append((name, distinct))
    for code in np.unique(codes):
        rows = np.flatnonzero(codes == code)
        flags = {**own, **{name: columns[name][rows[0]].item() for name, _ in levels}}
        yield flags, rows
