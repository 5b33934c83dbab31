"""Compiled inner loops, where numba is installed; the same functions as plain Python where it is not.

What is decorated works on numpy arrays and numbers alone and gives the same results to the last bit either
way: no fast-math, no parallel loops.
"""

from __future__ import annotations

import sys
import threading
import zlib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

COMPILED = find_spec("numba") is not None


def jit(function: F) -> F:
    """Compile the function at its first call; later processes find it compiled."""
    if not COMPILED:  # extra `plan`
        return function
    import numba

    made: F
    try:
        made = numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:  # no folder to keep it in: neither beside the code nor in a home
        made = numba.njit(nogil=True)(function)
    return made


class LazyJit:
    """Functions of several modules that are compiled together when there is enough to do.

    Importing numba takes longer than a few calls of the plain functions. Until :meth:`compile` they stay as they are.
    """

    def __init__(self) -> None:
        self._functions: dict[Callable[..., Any], str] = {}
        self._entry: Callable[[int], Callable[..., Any]] | None = None
        self._compiled: Callable[..., Any] | None = None
        self._lock = threading.Lock()

    def part(self, function: F) -> F:
        """Add a function that is called by compiled functions alone."""
        self._functions[function] = function.__module__
        return function

    def entry(self, make: Callable[[int], Callable[..., Any]]) -> None:
        """Name the maker of the function that Python calls.

        It is given a number that changes with the parts' source texts and uses it in the function: numba looks up
        compiled functions by the file of the function alone, and by the values that it has from outside.
        """
        self._entry = make

    @property
    def compiled(self) -> Callable[..., Any] | None:
        """The compiled entry; None before :meth:`compile` and without numba."""
        return self._compiled

    def compile(self) -> None:
        """Make :attr:`compiled`, from copies of the parts; the parts themselves stay as they are.

        No effect without numba.
        """
        with self._lock:
            if self._compiled is not None or not COMPILED or self._entry is None:
                return
            import numba

            modules = [sys.modules[name] for name in dict.fromkeys(self._functions.values())]
            stamp = 0
            for module in modules:
                stamp = zlib.crc32(Path(str(module.__file__)).read_bytes(), stamp)
            # A compiled part has no form that Python could call, so only compiled parts may find it by its name.
            names = {module.__name__: dict(vars(module)) for module in modules}
            inner = numba.njit(nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
            made = {part: inner(_among(names[module], part)) for part, module in self._functions.items()}
            for of_module in names.values():
                of_module.update({name: made[value] for name, value in of_module.items() if _known(value, made)})
            entry = self._entry(stamp)
            self._compiled = jit(_among(names[entry.__module__], entry))


def _among(names: dict[str, Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a function that looks up its global names among these."""
    made = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    made.__module__, made.__qualname__ = function.__module__, function.__qualname__
    return made


def _known(value: Any, made: dict[Callable[..., Any], Any]) -> bool:
    return isinstance(value, FunctionType) and value in made
