"""Precision of the matrix products of a training run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

#: Share of the last steps, which always have full precision.
SETTLE = 0.1

#: In lower precision, leaves of a batch are padded to a multiple of this, so that shapes repeat: matrix kernels are
#: prepared once per shape, which takes some milliseconds.
MULTIPLE = {"highest": 1, "medium": 512}

Precision = Literal["highest", "medium"]


@contextmanager
def matrix_precision(precision: Precision) -> Iterator[None]:
    """Context manager that sets the precision of float32 matrix products.

    "medium" rounds their inputs to bfloat16 where the processor has units for it, and sums in float32.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def precision_of(share: float, precision: Precision) -> Precision:
    """Precision of a step at this completed share of a run; the last steps have full precision."""
    return "highest" if share >= 1 - SETTLE else precision
