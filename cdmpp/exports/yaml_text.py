"""YAML by PyYAML, which the extra ``plan`` installs."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from cdmpp.errors import FieldError, MissingDependencyError, install_hint


def read_yaml(text: str) -> Any:
    """The value of a YAML text; no objects of Python are made.

    Raises
    ------
    FieldError
        The text is not YAML.
    MissingDependencyError
        PyYAML is not installed.
    """
    yaml = _yaml()
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        place = " ".join(str(error).split())
        raise FieldError(f"the file is not YAML: {place[:200]}", hint="check the file") from None


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
