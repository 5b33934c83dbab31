"""Index expressions as intervals: nothing that a loop nest computes lies outside."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cdmpp.features.affine import (
    AffineRange,
    add,
    floor_divide,
    floor_modulo,
    hull,
    maximum,
    minimum,
    multiply,
    negate,
    where,
)

EXTENTS = (1, 2, 3, 5)


@dataclass
class Both:
    """An expression as an interval, and as a function of the loops."""

    linear: AffineRange
    value: Callable[[tuple[int, ...]], int]


def constants() -> st.SearchStrategy[Both]:
    return st.integers(-6, 6).map(lambda c: Both(AffineRange(c, c), lambda _: c))


def loops() -> st.SearchStrategy[Both]:
    def make(p: int) -> Both:
        return Both(AffineRange(0, EXTENTS[p] - 1, {p: 1}), lambda at: at[p])

    return st.integers(0, len(EXTENTS) - 1).map(make)


def divisors() -> st.SearchStrategy[Both]:
    """Positive: a constant, or one more than a loop."""

    def after(p: int) -> Both:
        return Both(AffineRange(1, EXTENTS[p], {p: 1}), lambda at: at[p] + 1)

    constant = st.integers(1, 5).map(lambda d: Both(AffineRange(d, d), lambda _: d))
    return st.one_of(constant, st.integers(0, len(EXTENTS) - 1).map(after))


def combine(children: st.SearchStrategy[Both]) -> st.SearchStrategy[Both]:
    def sum_of(ab: tuple[Both, Both]) -> Both:
        a, b = ab
        return Both(add(a.linear, b.linear), lambda at: a.value(at) + b.value(at))

    def minus(a: Both) -> Both:
        return Both(negate(a.linear), lambda at: -a.value(at))

    def product(ab: tuple[Both, Both]) -> Both:
        a, b = ab
        return Both(multiply(a.linear, b.linear), lambda at: a.value(at) * b.value(at))

    def quotient(ad: tuple[Both, Both]) -> Both:
        a, d = ad
        return Both(floor_divide(a.linear, d.linear), lambda at: a.value(at) // d.value(at))

    def rest(ad: tuple[Both, Both]) -> Both:
        a, d = ad
        return Both(floor_modulo(a.linear, d.linear), lambda at: a.value(at) % d.value(at))

    def smaller(ab: tuple[Both, Both]) -> Both:
        a, b = ab
        return Both(hull(a.linear, b.linear), lambda at: min(a.value(at), b.value(at)))

    pairs, divided = st.tuples(children, children), st.tuples(children, divisors())
    return st.one_of(
        pairs.map(sum_of),
        children.map(minus),
        pairs.map(product),
        divided.map(quotient),
        divided.map(rest),
        pairs.map(smaller),
    )


EXPRESSIONS = st.recursive(st.one_of(constants(), loops()), combine, max_leaves=6)
ITERATIONS = list(itertools.product(*map(range, EXTENTS)))


@settings(max_examples=200)
@given(EXPRESSIONS)
def test_every_value_is_inside_the_interval(expression: Both) -> None:
    values = [expression.value(at) for at in ITERATIONS]
    assert expression.linear.low <= min(values)
    assert max(values) <= expression.linear.high


@settings(max_examples=200)
@given(st.lists(st.integers(-9, 9), min_size=5, max_size=5), st.integers(1, 5))
def test_a_loop_that_is_not_named_changes_nothing(coefficients: list[int], divisor: int) -> None:
    """The rest of a linear expression. Behind a division a step is a mean: a loop may be dropped there that
    still changes the rest a little."""
    total = AffineRange(coefficients[0], coefficients[0])
    for p, c in enumerate(coefficients[1:]):
        total = add(total, multiply(AffineRange(c, c), AffineRange(0, EXTENTS[p] - 1, {p: 1})))
    rest = floor_modulo(total, AffineRange(divisor, divisor))
    for p in set(range(len(coefficients) - 1)) - set(rest.steps):
        for at in ITERATIONS:
            if at[p] == 0:
                others = {
                    (coefficients[0] + int(np.dot(coefficients[1:], (*at[:p], i, *at[p + 1 :])))) % divisor
                    for i in range(EXTENTS[p])
                }
                assert len(others) == 1


@settings(max_examples=200)
@given(st.lists(st.integers(-9, 9), min_size=5, max_size=5))
def test_interval_and_steps_of_a_linear_expression_are_exact(coefficients: list[int]) -> None:
    total = AffineRange(coefficients[0], coefficients[0])
    for p, c in enumerate(coefficients[1:]):
        total = add(total, multiply(AffineRange(c, c), AffineRange(0, EXTENTS[p] - 1, {p: 1})))
    values = [coefficients[0] + int(np.dot(coefficients[1:], at)) for at in ITERATIONS]
    assert (total.low, total.high) == (min(values), max(values))
    assert total.steps == dict(enumerate(coefficients[1:]))


@given(EXPRESSIONS, EXPRESSIONS)
def test_arrays_and_integers_give_the_same(one: Both, two: Both) -> None:
    """A structural class evaluates with one array element per shape what a program does with integers."""

    def as_array(a: AffineRange) -> AffineRange:
        return AffineRange(np.array([a.low]), np.array([a.high]), {p: np.array([s]) for p, s in a.steps.items()})

    three = AffineRange(3, 3)
    operations: list[Callable[[AffineRange, AffineRange], AffineRange]] = [
        add,
        multiply,
        hull,
        lambda a, _: floor_divide(a, three),
        lambda a, _: floor_modulo(a, three),
    ]
    for operation in operations:
        plain = operation(one.linear, two.linear)
        arrays = operation(as_array(one.linear), as_array(two.linear))
        assert (plain.low, plain.high) == (arrays.low, arrays.high)
        for p, step in arrays.steps.items():
            # A class cannot drop a loop whose step vanishes for some shapes: it stays with step 0.
            assert plain.steps.get(p, 0) == step


def test_choices_element_by_element() -> None:
    a, b = np.array([1, 5]), np.array([2, 3])
    assert maximum(a, b).tolist() == [2, 5]
    assert minimum(a, b).tolist() == [1, 3]
    assert where(a > b, a, b).tolist() == [2, 5]
    assert (maximum(1, 2), minimum(1, 2), where(True, 1, 2)) == (2, 1, 1)
