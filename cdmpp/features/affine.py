"""Index expressions as intervals with linear coefficients.

An index of a buffer access is turned into ``AffineRange``: the interval [low, high] that it sweeps while the
loops run, and per loop the step that one iteration makes. ``//`` and ``%`` (fused and split loops) are
followed exactly where a loop's step divides the constant, and by their average step elsewhere.

Values are Python integers for a concrete program and int64 arrays (one element per shape) for a
structural class: the same code serves both, which is what makes the bulk features equal to the direct.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cdmpp.features.tape import Traced, choose

#: int, float or an array with one element per shape of the class.
Num = Any
_ARRAYS = (np.ndarray, Traced)


def maximum(a: Num, b: Num) -> Num:
    """Larger of two values, element by element when one is an array."""
    if type(a) in _ARRAYS or type(b) in _ARRAYS:
        return np.maximum(a, b)
    return a if a > b else b


def minimum(a: Num, b: Num) -> Num:
    """Smaller of two values, element by element when one is an array."""
    if type(a) in _ARRAYS or type(b) in _ARRAYS:
        return np.minimum(a, b)
    return a if a < b else b


def where(condition: Any, a: Num, b: Num) -> Num:
    """``a`` where the condition holds, else ``b``."""
    if type(condition) is Traced:
        return choose(condition, a, b)
    if type(condition) is np.ndarray:
        return np.where(condition, a, b)
    return a if condition else b


#: Of a loop: iterations until it crosses a multiple at a place that depends on other loops; the same where it starts at
#: a multiple; whether the divisor is a power of two.
Crossing = tuple[float, float, bool]
_NO_CROSSINGS: Mapping[int, Crossing] = {}


@dataclass(slots=True)
class AffineRange:
    """Interval and per-loop steps of an integer expression."""

    # Smallest and largest value while the loops run.
    low: Num
    high: Num
    # Loop (by its position in the program's loop table) -> change per iteration. A key's presence means that the
    # expression depends on that loop, whatever the extents.
    steps: dict[int, Num] = field(default_factory=dict)
    indirect: bool = False  # the expression loads from memory: its values are not known before the run
    # Loops of a concrete program in a quotient or remainder, and when they cross a multiple of its divisor. ``v`` in
    # ``(64 * o + v) % 48`` does after 16 iterations, as multiples of 16 come before them; in ``(96 * o + v) % 48`` it
    # starts at 0 and does after 48.
    crossings: Mapping[int, Crossing] = field(default_factory=lambda: _NO_CROSSINGS)

    def is_constant(self) -> bool:
        """No loop and no load in it (it may still be one of two values: see :func:`hull`)."""
        return not self.steps and not self.indirect

    def is_number(self) -> bool:
        """One value, known before the run (for each shape of a class)."""
        if not self.is_constant():
            return False
        same = self.low == self.high
        return bool(np.all(same)) if type(same) is np.ndarray else bool(same)


def add(a: AffineRange, b: AffineRange) -> AffineRange:
    """a + b."""
    if not b.steps:
        steps = a.steps
    elif not a.steps:
        steps = b.steps
    else:
        steps = dict(a.steps)
        for loop, step in b.steps.items():
            steps[loop] = steps[loop] + step if loop in steps else step
    return AffineRange(a.low + b.low, a.high + b.high, steps, a.indirect or b.indirect, _merged(a, b))


def _merged(a: AffineRange, b: AffineRange) -> Mapping[int, Crossing]:
    """Crossings of an expression of both."""
    if not a.crossings or not b.crossings:
        return a.crossings or b.crossings
    return {k: _earliest(a.crossings.get(k), b.crossings.get(k)) for k in (*a.crossings, *b.crossings)}


def _earliest(a: Crossing | None, b: Crossing | None) -> Crossing:
    first, second = a or b, b or a
    assert first is not None and second is not None
    return min(first[0], second[0]), min(first[1], second[1]), first[2] and second[2]


def crossings(a: AffineRange, divisor: Num, loops: Sequence[Any]) -> Mapping[int, Crossing]:
    """:attr:`AffineRange.crossings` of a // divisor and a % divisor; ``loops`` have an extent each."""
    if type(divisor) is not int or type(a.low) is not int or a.low // divisor == a.high // divisor:
        return a.crossings
    kept, moving = dict(a.crossings), {p: s for p, s in a.steps.items() if loops[p].extent != 1}
    for loop, step in moving.items():
        if type(step) is int and step % divisor:
            others = [s for other, s in moving.items() if other != loop]
            aligned = math.gcd(divisor, *others) if all(type(s) is int for s in others) else 1
            after = aligned / abs(step)
            late, static = (after, math.inf) if aligned != divisor else (math.inf, after)
            kept[loop] = _earliest(kept.get(loop), (late, static, divisor & (divisor - 1) == 0))
    return kept


def negate(a: AffineRange) -> AffineRange:
    """-a."""
    return AffineRange(-a.high, -a.low, {loop: -s for loop, s in a.steps.items()}, a.indirect, a.crossings)


def multiply(a: AffineRange, b: AffineRange) -> AffineRange:
    """a * b; linear when one side is a constant, an interval with mean steps otherwise."""
    if a.is_number() and not b.is_number():
        a, b = b, a
    if b.is_number():
        factor = b.low
        low, high = a.low * factor, a.high * factor
        return AffineRange(
            minimum(low, high), maximum(low, high), {k: s * factor for k, s in a.steps.items()}, a.indirect, a.crossings
        )
    corners = (a.low * b.low, a.low * b.high, a.high * b.low, a.high * b.high)
    low, high = corners[0], corners[0]
    for corner in corners[1:]:
        low, high = minimum(low, corner), maximum(high, corner)
    steps = {k: s * b.high for k, s in a.steps.items()}
    for loop, step in b.steps.items():
        steps[loop] = steps.get(loop, 0) + step * a.high
    return AffineRange(low, high, steps, a.indirect or b.indirect, _merged(a, b))


def floor_divide(a: AffineRange, b: AffineRange) -> AffineRange:
    """a // b for positive b: a loop's mean step is its step over b."""
    divisor = maximum(b.low, 1)
    if not b.is_number():
        last = maximum(b.high, 1)
        low = minimum(a.low // divisor, a.low // last)
        high = maximum(a.high // divisor, a.high // last)
        steps: dict[int, Num] = dict.fromkeys(b.steps, 0.0)
        steps |= {k: s / divisor for k, s in a.steps.items()}
        return AffineRange(low, high, steps, a.indirect or b.indirect)
    if a.is_constant():
        return AffineRange(a.low // divisor, a.high // divisor)
    low, high = a.low // divisor, a.high // divisor
    # A quotient that stays the same takes no step at all.
    steps = {k: where(low == high, 0.0, s / divisor) for k, s in a.steps.items()}
    return AffineRange(low, high, steps, a.indirect)


def floor_modulo(a: AffineRange, b: AffineRange) -> AffineRange:
    """a % b for positive b; a loop whose step is a multiple of a constant b vanishes."""
    divisor = maximum(b.low, 1)
    if not b.is_number():
        return AffineRange(0, maximum(b.high, 1) - 1, {**b.steps, **a.steps}, a.indirect or b.indirect)
    within = a.low // divisor == a.high // divisor
    low = where(within, a.low % divisor, 0)
    high = where(within, a.high % divisor, divisor - 1)
    if a.is_constant():
        return AffineRange(low, high)
    steps = {}
    for loop, step in a.steps.items():
        if type(step) in _ARRAYS or type(divisor) in _ARRAYS:
            steps[loop] = where(step % divisor == 0, 0, step)
        elif step % divisor:
            steps[loop] = step
    return AffineRange(low, high, steps, a.indirect)


def hull(a: AffineRange, b: AffineRange) -> AffineRange:
    """An expression that is sometimes a, sometimes b (min, max, select)."""
    steps = dict(a.steps)
    for loop, step in b.steps.items():
        steps.setdefault(loop, step)
    return AffineRange(minimum(a.low, b.low), maximum(a.high, b.high), steps, a.indirect or b.indirect, _merged(a, b))
