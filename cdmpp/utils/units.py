"""Text form of quantities: a number, a space, a unit.

Inside the package every quantity is in its base unit (seconds, bytes, flops per second), which its name states.
Only printed tables and plots use the scaled units made here.
"""

from __future__ import annotations

import math

#: Shorter durations are rounding errors of sums and differences: they are shown as 0 s.
MIN_SHOWN_S = 5e-13
_LATENCY_UNITS = ((1e-9, "ns"), (1e-6, "µs"), (1e-3, "ms"), (1.0, "s"))
_DECIMAL_PREFIXES = ("", "k", "M", "G", "T", "P", "E")


def _three_digits(value: float) -> str:
    """``value`` in [0, inf) with three significant digits, never in exponent form."""
    if value == 0.0:
        return "0"
    decimals = max(0, 2 - math.floor(math.log10(value)))
    text = f"{value:.{decimals}f}"
    # 9.999 rounds to 10.00, which has four digits: format the rounded value again.
    if decimals and math.floor(math.log10(float(text))) > math.floor(math.log10(value)):
        text = f"{value:.{decimals - 1}f}"
    return text


def format_latency(seconds: float) -> str:
    """Format a duration with three significant digits and the unit ns, µs, ms or s; below half a picosecond: "0 s".

    Parameters
    ----------
    seconds : float
        Duration, finite and not negative.

    Returns
    -------
    str
        For example ``"31.2 µs"``.

    Raises
    ------
    ValueError
        ``seconds`` is NaN, infinite or negative.

    Examples
    --------
    >>> format_latency(3.12e-05)
    '31.2 µs'
    >>> format_latency(9.999e-04)
    '1.00 ms'
    """
    if not math.isfinite(seconds) or seconds < 0:
        raise ValueError(f"a latency must be finite and not negative, got {seconds!r}")
    if seconds < MIN_SHOWN_S:
        return "0 s"
    for scale, unit in _LATENCY_UNITS:
        # 999.5 of a unit and more would print as 1000: use 1.00 of the next unit.
        if seconds / scale < 999.5 or unit == "s":
            break
    return f"{_three_digits(seconds / scale)} {unit}"


def format_si(value: float, unit: str) -> str:
    """Format a quantity with a decimal prefix, such as ``"1.56 TB/s"`` or ``"312 Tflop/s"``.

    Raises
    ------
    ValueError
        ``value`` is NaN, infinite or negative.

    Examples
    --------
    >>> format_si(1.555e12, "B/s")
    '1.55 TB/s'
    """
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"a quantity must be finite and not negative, got {value!r}")
    scaled = float(value)
    prefix = _DECIMAL_PREFIXES[0]
    for prefix in _DECIMAL_PREFIXES:
        if scaled < 999.5 or prefix == _DECIMAL_PREFIXES[-1]:
            break
        scaled /= 1000.0
    return f"{_three_digits(scaled)} {prefix}{unit}".rstrip()
