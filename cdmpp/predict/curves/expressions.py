"""Sizes as expressions over axes: ``batch*tokens``, ``ceil(tokens*density)``.

The grammar has + - * / //, ceil, floor, min, max, numbers, names and brackets, with a bounded length; it is not
evaluated by Python. Numbers are exact fractions: 0.7 is seven tenths, so ``ceil(10*0.7)`` is 7.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction

from cdmpp.errors import InvalidProgramError

MAX_LENGTH, MAX_TOKENS = 200, 80
#: Maximum bits of an intermediate number, far above what sizes need.
MAX_BITS = 512
#: Maximum nesting of brackets and signs.
MAX_DEPTH = 24
#: Names that are functions and cannot be axes.
FUNCTIONS = ("ceil", "floor", "max", "min")
HINT = "an expression is made of axes, numbers, + - * / //, ceil, floor, min, max and brackets"

_TOKEN = re.compile(r"\s*(?:(\d{1,18}(?:\.\d{1,18})?)|([A-Za-z_]\w*)|(//|[-+*/(),]))", re.ASCII)
Number = int | Fraction
Values = Mapping[str, Number]
_Node = Callable[[Values], Number]


class Expression:
    """One expression, parsed once and evaluated for many points.

    Parameters
    ----------
    text : str
        At most :data:`MAX_LENGTH` characters.

    Attributes
    ----------
    names : frozenset of str
        The axes that it mentions.
    size : int
        Its parts: what it costs to evaluate.

    Raises
    ------
    InvalidProgramError
        The text is not an expression.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        if len(text) > MAX_LENGTH:
            raise self._wrong(f"has more than {MAX_LENGTH} characters")
        self._tokens = list(self._read())
        if len(self._tokens) > MAX_TOKENS:
            raise self._wrong(f"has more than {MAX_TOKENS} parts")
        self.size = len(self._tokens)
        self._place, self._depth = 0, 0
        names: set[str] = set()
        self._names = names
        self._root = self._sum()
        if self._place < len(self._tokens):
            raise self._wrong(f"is not understood from {self._tokens[self._place]!r} on")
        self.names = frozenset(names)

    def __call__(self, values: Values) -> int:
        """The size at a point.

        Raises
        ------
        InvalidProgramError
            Not a whole number, a division by zero, or figures that no size needs.
        """
        try:
            value = self._root(values)
        except ZeroDivisionError:
            raise self._wrong("divides by zero here") from None
        if value.denominator != 1:
            raise InvalidProgramError(
                f"{self.text!r} is {float(value):g} here, not a whole number",
                hint="write ceil(...) or floor(...) around it",
            )
        return value.numerator

    def _wrong(self, what: str) -> InvalidProgramError:
        return InvalidProgramError(f"expression {self.text[:MAX_LENGTH]!r} {what}", hint=HINT)

    def _read(self) -> Iterator[str]:
        place, text = 0, self.text.rstrip()
        while place < len(text):
            found = _TOKEN.match(text, place)
            if found is None:
                raise self._wrong(f"has {text[place:].lstrip()[:1]!r} in it")
            yield found[found.lastindex or 0]
            place = found.end()

    def _next(self) -> str:
        return self._tokens[self._place] if self._place < len(self._tokens) else ""

    def _take(self, wanted: str = "") -> str:
        token = self._next()
        if not token or (wanted and token != wanted):
            raise self._wrong(f"lacks {wanted!r}" if wanted else "ends too early")
        self._place += 1
        return token

    def _sum(self) -> _Node:
        node = self._product()
        while self._next() in ("+", "-"):
            node = _binary(self._take(), node, self._product())
        return node

    def _product(self) -> _Node:
        node = self._factor()
        while self._next() in ("*", "/", "//"):
            node = _binary(self._take(), node, self._factor())
        return node

    def _factor(self) -> _Node:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._wrong("is nested too deep")
        node = self._atom()
        self._depth -= 1
        return node

    def _atom(self) -> _Node:
        token = self._take()
        if token == "-":
            inner = self._factor()
            return lambda values: -inner(values)
        if token == "(":
            node = self._sum()
            self._take(")")
            return node
        if token[0].isdigit():
            number = int(token) if token.isdecimal() else Fraction(token)
            return lambda values: number
        if token in FUNCTIONS:
            return self._call(token)
        if not (token[0].isalpha() or token[0] == "_"):
            raise self._wrong(f"has {token!r} where a number or an axis should stand")
        self._names.add(token)
        return lambda values: values[token]

    def _call(self, name: str) -> _Node:
        self._take("(")
        arguments = [self._sum()]
        while self._next() == ",":
            self._take()
            arguments.append(self._sum())
        self._take(")")
        if name in ("ceil", "floor"):
            if len(arguments) != 1:
                raise self._wrong(f"gives {name} {len(arguments)} arguments; it takes one")
            step, only = (math.ceil if name == "ceil" else math.floor), arguments[0]
            return lambda values: step(only(values))
        choose = max if name == "max" else min
        return lambda values: choose(argument(values) for argument in arguments)


def _binary(sign: str, left: _Node, right: _Node) -> _Node:
    if sign == "+":
        return lambda values: _bounded(left(values) + right(values))
    if sign == "-":
        return lambda values: _bounded(left(values) - right(values))
    if sign == "*":
        return lambda values: _bounded(left(values) * right(values))
    if sign == "/":
        return lambda values: _bounded(Fraction(left(values)) / right(values))
    return lambda values: _bounded(left(values) // right(values))


def _bounded(value: Number) -> Number:
    if value.numerator.bit_length() + value.denominator.bit_length() > MAX_BITS:
        raise InvalidProgramError("an expression's numbers grow out of all bounds here", hint=HINT)
    return value


def exact(value: int | float) -> Number:
    """The number with this decimal form: 0.1 is a tenth."""
    return value if isinstance(value, int) else Fraction(repr(value))
