"""Texts of other frameworks: command lines of shell scripts as options and their values, and YAML."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any

from cdmpp.errors import FieldError, MissingDependencyError, install_hint
from cdmpp.plan.formats.shell import Unknown, commands, known
from cdmpp.predict.requests.fields import MAX_COUNT
from cdmpp.utils.files import parse_json

#: Option without a value.
FLAG = True
#: Names of variables that hold several options.
_LISTS = re.compile(r"(?i)(args?|argv|opts?|options?|flags?|params?|parameters|overrides?|extras?)(\W*$|[\[:%])")
Value = str | bool | list[str]
#: Values of a file, with those that an alias repeats; configurations have a few hundred.
MAX_VALUES = 100_000
#: Most characters of a YAML text, whose reading takes some seconds for each million.
MAX_YAML = 2**19


def options(text: str) -> dict[str, Value]:
    """Options of a command line or script by name, without dashes: ``--name value``, ``--name=value``, ``--name``.

    An option with several values has a list. Where an option is repeated, the last one counts, as in argparse. A value
    that the script does not determine is :class:`cdmpp.plan.formats.shell.Unknown`.

    Raises FieldError: the text is no shell script, or a part of it that cannot be expanded may hold any options.
    """
    return _merged(text, _options)


def overrides(text: str) -> dict[str, Any]:
    """Overrides of a Hydra command line, ``a.b=value``, by name, without a leading ``+``. Errors: :func:`options`."""
    return _merged(text, _overrides)


def _options(words: list[str]) -> dict[str, Value]:
    values: dict[str, Value] = {}
    name = ""
    for number, word in enumerate(words):
        option = re.fullmatch(r"--?([A-Za-z][\w.\-]*)(?:=(.*))?", word, re.DOTALL)
        if option is not None:
            name = option.group(1)
            values[name] = FLAG if option.group(2) is None else _part(word, option.group(2))
        elif name:
            _check_single(word, values[name] is not FLAG)
            given = values[name]
            before = given if isinstance(given, list) else [] if isinstance(given, bool) else [given]
            values[name] = [*before, word] if before else word
        elif number:
            _check_single(word, True)
    return values


def _overrides(words: list[str]) -> dict[str, Value]:
    values: dict[str, Value] = {}
    for before, word in zip(["-", *words], words, strict=False):
        item = re.fullmatch(r"\+{0,2}([A-Za-z_]\w*(?:\.\w+)+)=(.*)", word, re.DOTALL)
        if item is not None:
            values[item.group(1)] = _part(word, item.group(2))
        else:
            _check_single(word, not before.startswith("-") or "=" in before)
    return values


def _part(word: str, value: str) -> str:
    return Unknown(value, word.why) if isinstance(word, Unknown) else value


def _check_single(word: str, alone: bool) -> None:
    """Refuse a word that may stand for any number of options. ``alone``: no option before it takes it as its value."""
    if isinstance(word, Unknown) and word.whole and (alone or _LISTS.search(word)):
        raise FieldError(word.why, hint="it may hold options: assign it in the text, or remove it")


def _merged(text: str, read: Callable[[list[str]], dict[str, Value]]) -> dict[str, Value]:
    """Values of all commands; those that a condition, a loop or a function decides are not known."""
    merged: dict[str, Value] = {}
    programs: dict[str, list[tuple[str, dict[str, Value]]]] = {}
    for words, block in commands(text):
        if values := read(words):
            merged |= values
            programs.setdefault(words[0], []).append((block, values))
    for runs in programs.values():
        block = next((block for block, _ in runs if block), "")
        times = Counter(name for _, values in runs for name in values)
        for _, values in runs if block else ():
            for name, value in values.items():
                if times[name] < len(runs) or value != runs[0][1][name]:
                    merged[name] = Unknown(str(merged[name]), f"its value is not known: {block} decides it")
    return merged


def assumptions(what: str, framework: str, assumed: Mapping[str, int]) -> list[str]:
    """A note on the defaults that stand for what a file does not have."""
    values = ", ".join(f"{name} {value}" for name, value in assumed.items())
    return [f"missing {what} have {framework}'s defaults: {values}"] if assumed else []


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

    ``remaining``: options that were not taken. ``assumed``: defaults of numbers that are not in the file.
    """

    def __init__(self, values: dict[str, Value]) -> None:
        self.remaining = dict(values)
        self.assumed: dict[str, int] = {}

    def whole(self, name: str, default: int | None = None, *others: str) -> int | None:
        """A whole number from 1 to :data:`MAX_COUNT`, by any of its names.

        Raises FieldError: the value is not such a number.
        """
        try:
            value = self.text(name, None, *others)
        except FieldError as error:
            error.message += "; it is not a whole number"
            raise
        if value is None:
            if default is not None:
                self.assumed[f"--{name}"] = default
            return default
        if not re.fullmatch(r"\d{1,12}", value) or not 1 <= int(value) <= MAX_COUNT:
            raise FieldError.at(
                f"--{name}",
                f"{value[:40]!r} is not a whole number from 1 to {MAX_COUNT}",
                hint="write the number, or assign the variable in the same text",
            )
        return int(value)

    def text(self, name: str, default: str | None = None, *others: str) -> str | None:
        """A value as text, by any of its names."""
        for candidate in (name, *others):
            if candidate in self.remaining:
                value = self.remaining.pop(candidate)
                first = value[0] if isinstance(value, list) else value
                return known(first, f"--{candidate}") if isinstance(first, str) else str(first)
        return default

    def flag(self, name: str) -> bool:
        """Whether an option is there, and is not "false"."""
        return str(self.text(name, "false")).lower() not in ("false", "0")

    def ignored(self) -> tuple[str, ...]:
        """Options that were not taken, as they are in the file."""
        return tuple(f"--{name}" for name in self.remaining)


def read_json(text: str, hint: str) -> Any:
    """The value of a JSON text; FieldError with a hint where it is none."""
    try:
        return parse_json(text)
    except ValueError as error:
        raise FieldError(f"the file is not JSON: {error}", hint=hint) from None


def read_yaml(text: str) -> Any:
    """The value of a YAML text; no objects of Python are made.

    Raises FieldError: the text is not YAML, is too long, has more than :data:`MAX_VALUES` values, or a value contains
    itself.
    Raises MissingDependencyError: PyYAML is not installed.
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
    """A value of JSON as YAML, keys in their order. Raises MissingDependencyError: PyYAML is not installed."""
    text: str = _yaml().safe_dump(value, sort_keys=False)
    return text


def _yaml() -> ModuleType:
    try:
        import yaml
    except ModuleNotFoundError:
        raise MissingDependencyError("YAML files need PyYAML", hint=install_hint("plan")) from None
    module: ModuleType = yaml
    return module
