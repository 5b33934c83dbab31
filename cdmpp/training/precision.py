"""Precision of the matrix products of a training run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

#: Share of the steps, the last ones, that are always computed in full precision.
SETTLE = 0.1

#: In lower precision the leaves of a batch are filled up to a multiple of this, so that shapes repeat from
#: step to step: its matrix kernels are prepared once per shape, at some milliseconds each.
MULTIPLE = {"highest": 1, "medium": 512}

Precision = Literal["highest", "medium"]


@contextmanager
def matrix_precision(precision: Precision) -> Iterator[None]:
    """Float32 matrix products at this precision, then what it was.

    "medium" rounds their inputs to bfloat16 where the processor has units for it, and sums in float32.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def precision_of(share: float, precision: Precision) -> Precision:
    """Precision of a step where this share of a run is done: the last steps settle the weights in full."""
    return "highest" if share >= 1 - SETTLE else precision
