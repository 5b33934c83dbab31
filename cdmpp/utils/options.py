"""Options as plain dataclasses whose numbers have ranges: they can be read where pydantic is not installed.

A pydantic model takes such a dataclass as a field, checks the types of its values and refuses unknown names.
"""

from __future__ import annotations

import operator
from dataclasses import field, fields
from typing import Any, ClassVar


def number(
    default: float | None,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
) -> Any:
    """A field of :class:`Options` with a range; ``least`` and ``most`` are in it, ``above`` and ``below`` are not."""
    limits = {"at least": least, "above": above, "at most": most, "below": below}
    return field(default=default, metadata={name: limit for name, limit in limits.items() if limit is not None})


class Options:
    """Base of frozen dataclasses; checks the ranges of their numbers.

    Raises ValueError: a number is outside of its range; the message names the field.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        for option in fields(self):  # type: ignore[arg-type]  # every subclass is a dataclass
            value = getattr(self, option.name)
            for limit, bound in option.metadata.items():
                if value is not None and not _HOLDS[limit](value, bound):
                    raise ValueError(f"{option.name} is {value}, it must be {limit} {bound}")


_HOLDS = {"at least": operator.ge, "above": operator.gt, "at most": operator.le, "below": operator.lt}
