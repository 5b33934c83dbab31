"""QSync's indicator of how much a lower precision of one operator disturbs training.

With stochastic rounding to a grid of step S an element gets an error of variance S^2 / 6 on average.
Through a product with weights w the errors of the input v reach the output with at most
||w||^2 S_v^2 D_v / 6 (D: number of elements, Cauchy-Schwarz), and those of the weights with
||v||^2 S_w^2 D_w / 6. An error of the forward pass meets every operator after this one, an error of the
backward pass every operator before it, so

    indicator = gamma (depth_total - depth) forward + depth backward.

For int8, S is the largest magnitude over 127. For a floating type S = 2^(e - k), e the exponent of the
tensor's root mean square and k the bits of the mantissa. QSync takes k = 9 for float16, one less than the
type stores; likewise k = 6 for bfloat16 here. As in QSync, gradients of an int8 operator are float16.

QSync's code differs from its derivation in two places: it multiplies the float16 terms by the exponent instead
of raising two to its power, and it does not square the norm of a gradient. This module follows the derivation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

#: Mantissa bits k of each floating type.
MANTISSA = {"float16": 9, "bfloat16": 6}


@dataclass(frozen=True)
class TensorStatistics:
    """Statistics of a tensor that the indicator uses.

    Attributes
    ----------
    elements : float
    norm2 : float
        Squared Euclidean norm.
    max_abs : float
    """

    elements: float
    norm2: float
    max_abs: float

    def step(self, dtype: str) -> float:
        """Distance of neighbouring values of a type near the tensor's typical magnitude."""
        if dtype == "float32" or not self.elements or self.norm2 == 0.0:
            return 0.0
        if dtype == "int8":
            return self.max_abs / 127.0
        _, exponent = math.frexp(math.sqrt(self.norm2 / self.elements))
        return math.ldexp(1.0, exponent - MANTISSA[dtype])


@dataclass(frozen=True)
class OperatorStatistics:
    """Tensors of one operator in a training step; ``weight`` is None for an activation (one-input rule).

    Attributes
    ----------
    input, weight, gradient : TensorStatistics
        Its input, its weights, and the gradient of its output.
    """

    input: TensorStatistics
    weight: TensorStatistics | None = None
    gradient: TensorStatistics | None = None


def gradient_dtype(dtype: str) -> str:
    """Type of an operator's backward pass: float16 for int8, else the same type."""
    return "float16" if dtype == "int8" else dtype


def variances(tensors: OperatorStatistics, dtype: str) -> tuple[float, float]:
    """Variance that a type adds in the forward and in the backward pass of an operator."""
    v, w, g = tensors.input, tensors.weight, tensors.gradient
    of_input = v.step(dtype) ** 2 * v.elements / 6.0
    if w is None:
        return of_input, 0.0
    forward = w.norm2 * of_input + v.norm2 * w.step(dtype) ** 2 * w.elements / 6.0
    if g is None:
        return forward, 0.0
    of_gradient = g.step(gradient_dtype(dtype)) ** 2 * g.elements / 6.0
    return forward, g.norm2 * of_input + v.norm2 * of_gradient


def indicator(
    tensors: Mapping[str, OperatorStatistics],
    depths: Mapping[str, int],
    dtypes: tuple[str, ...] = ("int8", "float16", "float32"),
    gamma: float = 1.0,
) -> dict[str, dict[str, float]]:
    """Sensitivity of each operator to each type.

    Parameters
    ----------
    tensors : mapping of str to OperatorStatistics
        Statistics by operator.
    depths : mapping of str to int
        Operators on the longest path that ends with this one: 1 for the first.
    gamma : float
        Weight of forward errors.

    Returns
    -------
    dict of str to dict of str to float
        Operator -> type -> indicator; 0 for float32.
    """
    total = max(depths.values(), default=0)
    out: dict[str, dict[str, float]] = {}
    for name, statistics in tensors.items():
        out[name] = {}
        for dtype in dtypes:
            forward, backward = variances(statistics, dtype)
            out[name][dtype] = gamma * (total - depths[name]) * forward + depths[name] * backward
    return out
