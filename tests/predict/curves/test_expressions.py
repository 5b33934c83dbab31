"""Sizes as expressions: exact arithmetic, nothing but arithmetic, and errors in words."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdmpp.errors import InvalidProgramError
from cdmpp.predict.curves.template import MAX_LENGTH, Expression, exact

AT = {"batch": 4, "tokens": Fraction(10), "density": exact(0.7), "zero": 0}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("batch", 4),
        ("batch*tokens", 40),
        ("batch+tokens*2", 24),
        ("(batch+tokens)*2", 28),
        ("tokens//3", 3),
        ("tokens-batch-1", 5),
        ("-batch+5", 1),
        ("12/batch", 3),
        ("tokens//3*3", 9),
        ("ceil(tokens*density)", 7),
        ("floor(tokens*0.75)", 7),
        ("ceil(tokens/batch)", 3),
        ("max(batch, tokens, 3)", 10),
        ("min(batch,tokens)", 4),
        ("max(batch)", 4),
        (" 7 ", 7),
        ("ceil( max(1, tokens * 0.001) )", 1),
        ("--batch", 4),
        ("2*-3+10", 4),
        ("0.5*batch", 2),
    ],
)
def test_arithmetic(text: str, value: int) -> None:
    assert Expression(text)(AT) == value


def test_names_are_known() -> None:
    assert Expression("ceil(batch*tokens/8)+batch").names == {"batch", "tokens"}


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "batch tokens", "batch**2", "batch %2", "(batch", "batch)", "max()", "ceil(1,2)", "1_000", "2x"),
        *("batch.real", "batch[0]", "'a'", "batch=1", "ceil", "0x10", "1e9", "٣", "*2", "batch*", "batch,tokens"),
        *("__import__('os')", "lambda: 0", "batch if tokens else 3", "5 and 3", "not 3", "1 2"),
        *("x" * (MAX_LENGTH + 1), "(" * 100 + "1" + ")" * 100, "-" * 150 + "1", "1+" * 45 + "1"),
    ],
)
def test_what_is_no_expression(text: str) -> None:
    with pytest.raises(InvalidProgramError) as caught:
        Expression(text)({**AT, "x": Fraction(1)})
    assert "expression" in caught.value.message


def test_a_fraction_and_a_division_by_zero_are_said() -> None:
    with pytest.raises(InvalidProgramError, match="not a whole number") as caught:
        Expression("tokens/3")(AT)
    assert "ceil" in caught.value.hint
    for text in ("1/zero", "1//zero"):
        with pytest.raises(InvalidProgramError, match="zero"):
            Expression(text)(AT)


@pytest.mark.parametrize("tiny", [1e-300, 5e-324, 1.2345678901234567e-290])
def test_figures_of_thousands_of_digits_are_not_computed(tiny: float) -> None:
    # Each would take milliseconds, and the first too much for what a text of it may have.
    for text in ("1" + "/a" * 39, "*".join("a" * 39), "ceil(" + "+".join(["1/a"] * 19) + ")", "a//b//b//b"):
        with pytest.raises(InvalidProgramError, match="out of all bounds"):
            Expression(text)({"a": exact(tiny), "b": exact(tiny)})
    assert Expression("ceil(a)")({"a": exact(tiny)}) == 1


def test_a_large_fraction_is_said() -> None:
    with pytest.raises(InvalidProgramError):
        Expression("*".join("a" * 39))({"a": exact(1e15 - 0.125)})


@given(st.text(max_size=60) | st.text("batchtokens0123456789+-*/(),. ceilmaxmin", max_size=80))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        expression = Expression(text)
        if expression.names <= set(AT):
            expression(AT)
    except InvalidProgramError as error:
        assert error.message
