"""Compiled inner loops, where numba is installed; the same functions as plain Python where it is not.

What is decorated works on numpy arrays and numbers alone and gives the same results to the last bit either
way: no fast-math, no parallel loops.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

try:
    import numba
except ImportError:  # extra `plan`
    COMPILED = False

    def jit(function: F) -> F:
        """Leave the function as it is: numba is not installed."""
        return function
else:
    COMPILED = True

    def jit(function: F) -> F:
        """Compile the function at its first call; later processes find it compiled."""
        made: F
        try:
            made = numba.njit(cache=True, nogil=True)(function)
        except RuntimeError:  # no folder to keep it in: neither beside the code nor in a home
            made = numba.njit(nogil=True)(function)
        return made
