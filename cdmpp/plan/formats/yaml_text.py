"""YAML by PyYAML, which the extra ``plan`` installs."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from cdmpp.errors import FieldError, MissingDependencyError, install_hint

#: Values of a file, with those that an alias repeats; configurations have a few hundred.
MAX_VALUES = 100_000


def read_yaml(text: str) -> Any:
    """The value of a YAML text; no objects of Python are made.

    Raises
    ------
    FieldError
        The text is not YAML, it has more than :data:`MAX_VALUES` values, or a value contains itself.
    MissingDependencyError
        PyYAML is not installed.
    """
    yaml = _yaml()
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        place = " ".join(str(error).split())
        raise FieldError(f"the file is not YAML: {place[:200]}", hint="check the file") from None
    _check_size(value)
    return value


def _check_size(value: Any) -> None:
    """Aliases repeat a value without a copy: a short text may stand for any number of values, or for an endless one."""
    remaining, count = [value], 0
    while remaining:
        last = remaining.pop()
        items = list(last.values()) if isinstance(last, Mapping) else last if isinstance(last, list) else ()
        remaining += items
        count += len(items)
        if count > MAX_VALUES:
            raise FieldError(
                f"the file has more than {MAX_VALUES:,} values, or a value that contains itself",
                hint="check its anchors (&) and aliases (*)",
            )


def write_yaml(value: Any) -> str:
    """A value of JSON as YAML, keys in their order.

    Raises
    ------
    MissingDependencyError
        PyYAML is not installed.
    """
    text: str = _yaml().safe_dump(value, sort_keys=False)
    return text


def _yaml() -> ModuleType:
    try:
        import yaml
    except ModuleNotFoundError:
        raise MissingDependencyError("YAML files need PyYAML", hint=install_hint("plan")) from None
    module: ModuleType = yaml
    return module
