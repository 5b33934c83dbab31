"""Texts of other frameworks: command lines of shell scripts as options and their values, and YAML."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

from cdmpp.errors import FieldError, MissingDependencyError, install_hint
from cdmpp.predict.requests.fields import MAX_COUNT

#: Option without a value.
FLAG = True
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}|\$(\w+)")
Value = str | bool | list[str]
#: Values of a file, with those that an alias repeats; configurations have a few hundred.
MAX_VALUES = 100_000
#: Most characters of a YAML text, whose reading takes some seconds for each million.
MAX_YAML = 2**19


def words(text: str) -> list[str]:
    """Words of a shell line or script, without comments, line continuations and array brackets.

    A variable is replaced where the text assigns it before: ``TP=4`` or ``TP=${TP:-4}``.

    Raises
    ------
    FieldError
        A quotation has no end.
    """
    try:
        found = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise FieldError(f"the text is no shell line: {error}", hint="check its quotation marks") from None
    variables: dict[str, str] = {}
    expanded = []
    for word in found:
        value = _VARIABLE.sub(lambda name: variables.get(name[1] or name[3], name[2] or name[0]), word)
        if assigned := re.fullmatch(r"([A-Za-z_]\w*)=([^(]*)", value):
            variables[assigned[1]] = assigned[2]
        expanded.append(re.sub(r"^\w+\+?=\((.*)$", r"\1", value))
    return [word.rstrip(")") if word.endswith(")") and "(" not in word else word for word in expanded if word != ")"]


def options(text: str) -> dict[str, Value]:
    """Options of a command line by name, without dashes: ``--name value``, ``--name=value``, ``--name``.

    An option with several values has a list. Where an option is repeated, the last one counts, as in argparse.
    """
    found: dict[str, Value] = {}
    name = ""
    for word in filter(None, words(text)):
        option = re.fullmatch(r"--?([A-Za-z][\w.\-]*)(?:=(.*))?", word, re.DOTALL)
        if option is not None:
            name = option.group(1)
            found[name] = FLAG if option.group(2) is None else option.group(2)
        elif name:
            before = found[name]
            found[name] = word if before is FLAG else [*(before if isinstance(before, list) else [str(before)]), word]
    return found


def overrides(text: str) -> dict[str, Any]:
    """Overrides of a Hydra command line, ``a.b=value``, by name; a leading ``+`` is removed."""
    found = {}
    for word in words(text):
        item = re.fullmatch(r"\+{0,2}([A-Za-z_]\w*(?:\.\w+)+)=(.*)", word, re.DOTALL)
        if item is not None:
            found[item.group(1)] = item.group(2)
    return found


def line(values: Iterable[tuple[str, Any]]) -> str:
    """Options as text, one on each line; an option that is True has no value, one that is None or False is left out."""
    rows = [
        f"--{name}" if value is True else f"--{name} {shlex.quote(str(value))}"
        for name, value in values
        if value is not None and value is not False
    ]
    return "\n".join(rows) + "\n"


class CommandOptions:
    """Options of a file, of which a reader takes those that it knows.

    Attributes
    ----------
    remaining : dict
        Options that were not taken.
    """

    def __init__(self, values: dict[str, Value]) -> None:
        self.remaining = dict(values)

    def whole(self, name: str, default: int | None = None, *others: str) -> int | None:
        """A whole number from 1 to :data:`MAX_COUNT`, by any of its names.

        Raises
        ------
        FieldError
            The value is not such a number.
        """
        value = self.text(name, None, *others)
        if value is None:
            return default
        if not re.fullmatch(r"\d{1,12}", value) or not 1 <= int(value) <= MAX_COUNT:
            raise FieldError(
                f"--{name}: {value[:40]!r} is not a whole number from 1 to {MAX_COUNT}",
                path=f"--{name}",
                hint="write the number, or assign the variable in the same text",
            )
        return int(value)

    def text(self, name: str, default: str | None = None, *others: str) -> str | None:
        """A value as text, by any of its names."""
        for candidate in (name, *others):
            if candidate in self.remaining:
                value = self.remaining.pop(candidate)
                return str(value[0]) if isinstance(value, list) else str(value)
        return default

    def flag(self, name: str) -> bool:
        """Whether an option is there, and is not "false"."""
        return str(self.remaining.pop(name, False)).lower() not in ("false", "0")

    def ignored(self) -> tuple[str, ...]:
        """Options that were not taken, as they are in the file."""
        return tuple(f"--{name}" for name in self.remaining)


def read_yaml(text: str) -> Any:
    """The value of a YAML text; no objects of Python are made.

    Raises
    ------
    FieldError
        The text is not YAML, is too long, has more than :data:`MAX_VALUES` values, or a value contains itself.
    MissingDependencyError
        PyYAML is not installed.
    """
    yaml = _yaml()
    if len(text) > MAX_YAML:
        raise FieldError(
            f"the file has {len(text):,} characters of YAML, not up to {MAX_YAML:,}", hint="check the path"
        )
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
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
