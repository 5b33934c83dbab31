"""Printed figures: three significant digits and the unit that suits."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdmpp.utils.units import format_latency, format_si


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (3.12e-5, "31.2 µs"),
        (4e-10, "0.400 ns"),
        (1e-9, "1.00 ns"),
        (9.994e-7, "999 ns"),
        (9.996e-7, "1.00 µs"),
        (9.995e-6, "10.0 µs"),
        (9.999e-4, "1.00 ms"),
        (0.0123, "12.3 ms"),
        (1.0, "1.00 s"),
        (180.0, "180 s"),
        (123456.0, "123456 s"),
        (0.0, "0 s"),
        (6.94e-18, "0 s"),
    ],
)
def test_latency(seconds: float, text: str) -> None:
    assert format_latency(seconds) == text


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1e-6])
def test_impossible_figures_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="finite and not negative"):
        format_latency(bad)
    with pytest.raises(ValueError, match="finite and not negative"):
        format_si(bad, "B")


@given(st.floats(1e-9, 999.0))
def test_printed_latency_is_within_half_a_percent(seconds: float) -> None:
    number, unit = format_latency(seconds).split()
    scale = {"ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1.0}[unit]
    assert float(number) * scale == pytest.approx(seconds, rel=0.0051)
    assert 1.0 <= float(number) < 1000.0
    assert len(number.replace(".", "")) == 3


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(1.555e12, "B/s", "1.55 TB/s"), (312e12, "flop/s", "312 Tflop/s"), (40.0, "W", "40.0 W"), (0.0, "B", "0 B")],
)
def test_prefixes(value: float, unit: str, text: str) -> None:
    assert format_si(value, unit) == text
