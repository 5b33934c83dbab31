"""Integer fields of :class:`~cdmpp.programs.operators.OperatorSpec`, and its checks on arrays.

The models in :mod:`cdmpp.programs.operators` stay the one definition: ranges and defaults are read from
them, and a test compares :func:`contradictory` with ``spec.check()`` on random sizes of every operator.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import annotated_types
import numpy as np
from numpy.typing import NDArray

from cdmpp.programs.elements import MAX_ELEMENTS
from cdmpp.programs.operators import operator_types
from cdmpp.programs.vectors import output_hw

Sizes = Mapping[str, NDArray[np.int64]]


@dataclass(frozen=True)
class IntField:
    """One integer field of an operator: its range, and its default unless it must be given."""

    name: str
    low: int
    high: int
    default: int | None


@cache
def integer_fields(operator: str) -> tuple[IntField, ...]:
    """The integer fields of ``operator`` in declaration order (those of ``OperatorSpec.sizes()``)."""
    fields = []
    for name, info in operator_types()[operator].model_fields.items():
        if info.annotation is not int:
            continue
        low, high = 1, 2**31 - 1
        for bound in info.metadata:
            if isinstance(bound, annotated_types.Ge):
                low = int(bound.ge)  # type: ignore[call-overload]
            elif isinstance(bound, annotated_types.Le):
                high = int(bound.le)  # type: ignore[call-overload]
        fields.append(IntField(name, low, high, None if info.is_required() else int(info.default)))
    return tuple(fields)


@cache
def default_dtype(operator: str) -> str:
    """Element type of an operator that states none; "" for an unknown operator."""
    return str(operator_types()[operator].model_fields["dtype"].default) if operator in operator_types() else ""


@cache
def flag_defaults(operator: str) -> dict[str, bool | int | str | None]:
    """Structural fields of ``operator`` with their defaults."""
    spec = operator_types()[operator]
    return {name: spec.model_fields[name].default for name in spec.structural_fields}


def contradictory(operator: str, flags: Mapping[str, bool | int | str | None], sizes: Sizes) -> NDArray[np.bool_]:
    """Rows for which ``OperatorSpec.check()`` raises; ``sizes`` must be within their fields' ranges."""
    bad = operator_types()[operator].elements({n: v.astype(np.float64) for n, v in sizes.items()}) > MAX_ELEMENTS
    for broken, _, _ in operator_types()[operator].violations({**flags, **sizes}):
        bad |= broken
    if operator == "conv2d":
        groups = sizes["groups"]
        bad |= (sizes["c_in"] % groups != 0) | (sizes["c_out"] % groups != 0)
        bad |= np.minimum(*output_hw(sizes)) < 1
        if flags.get("bias") and flags.get("direction", "fwd") != "fwd":
            bad[:] = True
    elif operator in ("max_pool2d", "avg_pool2d"):
        bad |= sizes["h"] + 2 * sizes["pad_h"] < sizes["kh"]
        bad |= sizes["w"] + 2 * sizes["pad_w"] < sizes["kw"]
    return np.asarray(bad)
