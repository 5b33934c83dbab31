"""Command lines of shell scripts as options and their values."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from typing import Any

from cdmpp.errors import FieldError
from cdmpp.predict.requests.fields import MAX_COUNT

#: Option without a value.
FLAG = True
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}|\$(\w+)")
Value = str | bool | list[str]


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


class Arguments:
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
