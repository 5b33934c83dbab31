"""Fields of a ``config.json``, checked as they are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cdmpp.errors import FieldError

#: Largest accepted size: above every published model by a factor of more than 30.
MAX_SIZE, MAX_LAYERS = 2**24, 10_000


class Fields:
    """Fields of a configuration, checked as they are read."""

    def __init__(self, values: Mapping[str, Any], path: str) -> None:
        self.values, self.path = values, path

    def size(self, name: str, default: int | None = None, *, least: int = 1, most: int = MAX_SIZE) -> int:
        """A whole number of the configuration; without a default it is required.

        Raises
        ------
        FieldError
        """
        value = self.values.get(name)
        if value is None:
            value = default
        if value is None:
            raise self.error(name, "missing", f"a config.json of this model_type has {name}")
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.error(name, f"{str(value)[:80]!r} is not allowed", f"a whole number from {least} to {most}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """A truth value of the configuration.

        Raises
        ------
        FieldError
        """
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(name, f"{str(value)[:80]!r} is not allowed", "true or false")
        return value

    def text(self, name: str, default: str) -> str:
        """A text of the configuration.

        Raises
        ------
        FieldError
        """
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, str) or len(value) > 100:
            raise self.error(name, f"{str(value)[:80]!r} is not allowed", "a short text")
        return value

    def sizes(self, name: str) -> list[int]:
        """A list of whole numbers; empty where the field is not given.

        Raises
        ------
        FieldError
        """
        values = self.values.get(name)
        if values is None:
            return []
        if not isinstance(values, list) or not all(type(value) is int for value in values):
            raise self.error(name, f"{str(values)[:80]!r} is not allowed", "a list of whole numbers")
        return values

    def error(self, name: str, problem: str, hint: str = "") -> FieldError:
        """The error of one field."""
        path = f"{self.path}.{name}"
        return FieldError(f"{path}: {problem}", path=path, hint=hint)
