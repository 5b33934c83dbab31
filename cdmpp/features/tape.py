"""Arithmetic on arrays of sizes, recorded once and repeated for other sizes.

The features of a structural class are some hundred numpy operations on its sizes, found by walking its template. The
walk takes most of the time and is the same for all sizes. The first walk is made with :class:`Traced` sizes, which
record the operations; later batches repeat these. Where the walk depends on a comparison of sizes, the outcome is
recorded too, and the record counts only for sizes with the same outcome.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

Array = np.ndarray[Any, np.dtype[Any]]


class Traced(NDArrayOperatorsMixin):
    """An array of one value per shape, whose operations are recorded; ``place`` is its index among
    the tape's values."""

    __slots__ = ("place", "tape", "value")

    def __init__(self, tape: Tape, place: int, value: Array) -> None:
        self.tape, self.place, self.value = tape, place, value

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        if method != "__call__" or options:
            return NotImplemented
        return self.tape.apply(ufunc, inputs)

    def __bool__(self) -> bool:
        return self.tape.outcome(self)

    def all(self) -> Traced:
        """Itself: its truth value is whether all its elements are true."""
        return self


def choose(condition: Traced, a: Any, b: Any) -> Traced:
    """``numpy.where``."""
    return condition.tape.apply(np.where, (condition, a, b))


def as_integers(value: Traced) -> Traced:
    """``value.astype(numpy.int64)``."""
    return value.tape.apply(_as_integers, (value,))


def _as_integers(value: Any) -> Any:
    return np.asarray(value).astype(np.int64)


def _choose_one(condition: Any, a: Any, b: Any) -> Any:
    return a if condition else b


#: The same operation on numbers, which takes a tenth of the time of arrays with one element.
_OF_NUMBERS: dict[Callable[..., Any], Callable[..., Any]] = {
    np.add: operator.add,
    np.subtract: operator.sub,
    np.multiply: operator.mul,
    np.divide: operator.truediv,
    np.floor_divide: operator.floordiv,
    np.remainder: operator.mod,
    np.negative: operator.neg,
    np.bitwise_and: operator.and_,
    np.equal: operator.eq,
    np.not_equal: operator.ne,
    np.less: operator.lt,
    np.less_equal: operator.le,
    np.greater: operator.gt,
    np.greater_equal: operator.ge,
    np.maximum: max,
    np.minimum: min,
    np.where: _choose_one,
    _as_integers: int,
}


class Tape:
    """Operations on the arrays of ``sizes``, in the order in which they were made; ``traced`` has the sizes to
    compute with."""

    def __init__(self, sizes: Mapping[str, Array]) -> None:
        self._names = tuple(sizes)
        self._steps: list[tuple[Callable[..., Any], tuple[int, ...], int]] = []
        self._steps_of_numbers = self._steps
        self._constants: list[Any] = [None] * len(sizes)
        self._known: dict[Any, Traced] = {}
        self._constant_places: dict[Any, int] = {}
        self._outcomes: list[tuple[int, bool]] = []
        self._outputs: tuple[int, ...] = ()
        self.traced = {name: Traced(self, i, value) for i, (name, value) in enumerate(sizes.items())}

    def apply(self, function: Callable[..., Any], inputs: Sequence[Any]) -> Traced:
        """Compute and record ``function(*inputs)``; the same operation on the same inputs is made once."""
        places = tuple(self._place(value) for value in inputs)
        known = self._known.get((function, places))
        if known is None:
            value = function(*(value.value if isinstance(value, Traced) else value for value in inputs))
            self._constants.append(None)
            known = self._known[function, places] = Traced(self, len(self._constants) - 1, value)
            self._steps.append((function, places, known.place))
        return known

    def outcome(self, condition: Traced) -> bool:
        """Whether all elements are true; recorded."""
        result = bool(np.all(condition.value))
        self._outcomes.append((condition.place, result))
        return result

    def finish(self, outputs: Sequence[Any]) -> None:
        """Keep the operations that ``outputs`` (traced values and numbers) and the outcomes depend on."""
        self._outputs = tuple(self._place(value) for value in outputs)
        self._outcomes = list(dict.fromkeys(self._outcomes))
        wanted = {*self._outputs, *(place for place, _ in self._outcomes)}
        kept = []
        for step in reversed(self._steps):
            if step[2] in wanted:
                wanted.update(step[1])
                kept.append(step)
        self._steps = kept[::-1]
        self._steps_of_numbers = [
            (_OF_NUMBERS.get(function, function), places, place) for function, places, place in kept[::-1]
        ]
        # Nothing is recorded any more.
        self.traced, self._known, self._constant_places = {}, {}, {}

    def repeat(self, sizes: Mapping[str, Any]) -> list[Any] | None:
        """The outputs for other sizes, arrays or numbers; None if a comparison of them has another outcome."""
        values = self._constants.copy()
        given = [sizes[name] for name in self._names]
        values[: len(given)] = given
        numbers = all(type(size) is int for size in given)
        for function, places, place in self._steps_of_numbers if numbers else self._steps:
            if len(places) == 2:
                values[place] = function(values[places[0]], values[places[1]])
            else:
                values[place] = function(*[values[i] for i in places])
        truth = bool if numbers else np.all
        if any(truth(values[place]) != result for place, result in self._outcomes):
            return None
        return [values[place] for place in self._outputs]

    @staticmethod
    def key(value: Any) -> Any:
        """Equal for the same traced value, and for equal numbers of one type: 1, 1.0 and True have different keys."""
        return value.place if isinstance(value, Traced) else (type(value), value)

    def _place(self, value: Any) -> int:
        if isinstance(value, Traced):
            return value.place
        key = self.key(value)
        place = self._constant_places.get(key)
        if place is None:
            place = self._constant_places[key] = len(self._constants)
            self._constants.append(value)
        return place
