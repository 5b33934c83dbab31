"""Templates over axes: the programs at the points of a grid, and their sizes as expressions over the axes."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from cdmpp.errors import CdmppError, DataError, InvalidProgramError
from cdmpp.programs.operators import OperatorSpec, make_operator, operator_fields, operator_types
from cdmpp.programs.program import TensorProgram
from cdmpp.programs.query_options import Backend

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
    """A size as an expression over axes, parsed once and evaluated for many points: ``ceil(tokens*density)``.

    The grammar has + - * / //, ceil, floor, min, max, numbers, names and brackets, in at most :data:`MAX_LENGTH`
    characters; it is not evaluated by Python. Numbers are exact fractions: 0.7 is seven tenths, so ``ceil(10*0.7)`` is
    7. ``names``: the axes that it mentions. ``size``: its parts, which is what it costs to evaluate.
    Raises InvalidProgramError: the text is not an expression.
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

        Raises InvalidProgramError: not a whole number, a division by zero, or figures that no size needs.
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
            token = _TOKEN.match(text, place)
            if token is None:
                raise self._wrong(f"has {text[place:].lstrip()[:1]!r} in it")
            yield token[token.lastindex or 0]
            place = token.end()

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


#: Maximum number of queries: programs times points times devices.
MAX_POINTS = 10_000
MAX_AXES, MAX_VALUES, MAX_PROGRAMS, MAX_COUNT, MAX_TEXT = 6, 1000, 64, 1_000_000, 200
#: Maximum number of expression parts times points; about a second.
MAX_EVALUATIONS = 600_000
#: Largest number of an axis.
MAX_NUMBER = 1e15
#: Names that an axis must not have.
RESERVED = (*FUNCTIONS, "operator")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,31}")
Value = int | float | str | bool
Axes = Mapping[str, Sequence[Value]]


@dataclass(frozen=True)
class Template:
    """One operator with fields that depend on axes, and its number of runs."""

    #: An operator object. An axis replaces the field of its name; an integer field may be an expression over axes, as
    #: text.
    fields: Mapping[str, Any]
    count: int = 1

    @classmethod
    def parse(cls, text: str, count: int = 1) -> Template:
        """Parse a text such as ``linear:m=batch*tokens,n=4096,k=1024``.

        Raises InvalidProgramError: the text is not ``name:key=value,...``.
        """
        return cls(template_fields(text), count)


def template_fields(text: str) -> dict[str, Any]:
    """Fields of a template's text; raises as :meth:`Template.parse`."""
    return operator_fields(text, _value)


def _value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    return int(text) if re.fullmatch(r"\d{1,15}", text) else text


class Grid:
    """Programs of every point of the axes, last axis fastest.

    Raises DataError: no template uses an axis, or an axis has an invalid name or invalid values; InvalidProgramError or
    UnsupportedOperatorError: a template lacks a field, has an unknown field, or has an invalid expression.
    """

    def __init__(self, templates: Sequence[Template], axes: Axes) -> None:
        if not templates or len(templates) > MAX_PROGRAMS:
            raise DataError(f"a curve is of 1 to {MAX_PROGRAMS} programs, not {len(templates)}")
        self.axes = {name: list(values) for name, values in axes.items()}
        check_axes(self.axes)
        self._makers = [_Maker(template, self.axes) for template in templates]
        used = frozenset().union(*(maker.names for maker in self._makers))
        unused = [name for name in self.axes if name not in used]
        if unused:
            raise DataError(
                f"axis {unused[0]!r} is not used",
                hint="name it as a field of the operator, or mention it in an expression such as "
                f'"m": "{unused[0]}*128"',
            )

        cost = sum(maker.size * math.prod(len(self.axes[name]) for name in maker.names) for maker in self._makers)
        if cost > MAX_EVALUATIONS:
            raise DataError(
                f"the expressions have {cost:,} parts to evaluate over all points",
                hint=f"at most {MAX_EVALUATIONS:,}: shorten them, or ask for fewer points at once",
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of values of each axis."""
        return tuple(map(len, self.axes.values()))

    def __len__(self) -> int:
        return math.prod(self.shape)

    @property
    def programs_each(self) -> int:
        """Number of programs of a point."""
        return len(self._makers)

    @property
    def numeric(self) -> list[str]:
        """Numeric axes, in order."""
        return [name for name, values in self.axes.items() if is_numeric(values)]

    def points(self) -> Iterator[dict[str, Value]]:
        """Values of the axes, point by point."""
        for values in itertools.product(*self.axes.values()):
            yield dict(zip(self.axes, values, strict=True))

    def programs(self, at: Mapping[str, Value], backend: Backend) -> list[tuple[TensorProgram, int]] | CdmppError:
        """Programs of a point with their counts, or the error that prevents them."""
        try:
            return [(maker.program(at, backend), maker.count) for maker in self._makers]
        except CdmppError as error:
            return error


def is_numeric(values: Sequence[Value]) -> bool:
    """Whether an axis is numeric."""
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def check_axes(axes: Mapping[str, Sequence[Any]]) -> None:
    """Raise :class:`DataError` for invalid axes."""
    if len(axes) > MAX_AXES:
        raise DataError(f"{len(axes)} axes are too many", hint=f"at most {MAX_AXES}")
    for name, values in axes.items():
        if not _NAME.fullmatch(name) or name in RESERVED:
            raise DataError(
                f"{name[:40]!r} is not the name of an axis",
                hint="letters, digits and _, at most 32; not one of " + ", ".join(RESERVED),
            )
        if not 1 <= len(values) <= MAX_VALUES:
            raise DataError(f"axis {name!r} has {len(values)} values", hint=f"1 to {MAX_VALUES}")
        texts = all(isinstance(value, str) and len(value) <= MAX_TEXT for value in values)
        flags = all(isinstance(value, bool) for value in values)
        numbers = is_numeric(values) and all(abs(value) <= MAX_NUMBER for value in values)
        if not texts and not flags and not numbers:
            raise DataError(
                f"axis {name!r} is neither of numbers (up to {MAX_NUMBER:g}) nor of texts nor of truth values"
            )
        if len(set(values)) != len(values):
            raise DataError(f"axis {name!r} has a value twice")


class _Maker:
    """Makes programs of one template, each distinct one once."""

    def __init__(self, template: Template, axes: Axes) -> None:
        if not 1 <= template.count <= MAX_COUNT:
            raise DataError(f"a program runs {template.count} times", hint=f"1 to {MAX_COUNT:,}")
        self.count, self._fields = template.count, dict(template.fields)
        self._kind = _operator_type(self._fields)
        replaced = {name for name in axes if name in self._kind.model_fields}
        self._check_fields(replaced)
        self._expressions = {
            name: Expression(value)
            for name, value in self._fields.items()
            if isinstance(value, str) and name not in replaced and _is_integer(self._kind, name)
        }
        for expression in self._expressions.values():
            strange = sorted(expression.names - {n for n, values in axes.items() if is_numeric(values)})
            if strange:
                raise InvalidProgramError(f"{strange[0]!r} in {expression.text!r} is not an axis of numbers", hint=HINT)
        self._replaced = replaced
        self.names = frozenset(replaced).union(*(e.names for e in self._expressions.values()))
        self.size = sum(expression.size for expression in self._expressions.values())
        self._made: dict[tuple[Any, ...], TensorProgram | CdmppError] = {}

    def _check_fields(self, replaced: set[str]) -> None:
        name, known = self._fields["operator"], self._kind.model_fields
        given = {*self._fields, *replaced}
        missing = [f for f, info in known.items() if info.is_required() and f not in given]
        unknown = [str(f)[:40] for f in self._fields if f not in known]
        if missing or unknown:
            what = f"needs {', '.join(missing)}" if missing else f"has no {', '.join(unknown[:4])}"
            takes = ", ".join(
                f if info.is_required() else f"{f}={info.default}" for f, info in known.items() if f != "operator"
            )
            raise InvalidProgramError(
                f"{name} {what}", hint=f"{name} takes {takes}; an axis stands for the field of its name"
            )

    def program(self, at: Mapping[str, Value], backend: Backend) -> TensorProgram:
        """The program of a point; raises the errors of :func:`make_operator` and of expressions."""
        # The key includes types: True and 1 are equal, but not the same value of a field.
        key = tuple((type(at[name]), at[name]) for name in sorted(self.names))
        program = self._made.get(key)
        if program is None:
            program = self._made[key] = self._make(at, backend)
        if isinstance(program, CdmppError):
            raise program
        return program

    def _make(self, at: Mapping[str, Value], backend: Backend) -> TensorProgram | CdmppError:
        fields = {**self._fields, **{name: at[name] for name in self._replaced}}
        try:
            if self._expressions:
                values: dict[str, Number] = {
                    name: exact(value)
                    for name, value in at.items()
                    if isinstance(value, int | float) and not isinstance(value, bool)
                }
                fields |= {name: expression(values) for name, expression in self._expressions.items()}
            return TensorProgram.from_operator(make_operator(fields), backend)
        except CdmppError as error:
            return error


def _operator_type(fields: Mapping[str, Any]) -> type[OperatorSpec]:
    kind = operator_types().get(str(fields.get("operator")))
    if kind is None or not isinstance(fields["operator"], str):
        make_operator(fields)  # raises, with the list of operators
        raise AssertionError("an operator without a type was made")
    return kind


def _is_integer(kind: type[OperatorSpec], name: str) -> bool:
    return kind.model_fields[name].annotation is int
