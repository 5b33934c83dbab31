"""``--dim NAME=VALUE``, of the commands that take ONNX models."""

from __future__ import annotations

from collections.abc import Sequence

import typer


def parse_sizes(texts: Sequence[str]) -> dict[str, int]:
    """``--dim batch=4`` as a mapping."""
    sizes: dict[str, int] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        try:
            size = int(value)
        except ValueError:
            size = 0
        if not name or not equals or size < 1:
            raise typer.BadParameter(f"{text!r} is not NAME=VALUE, VALUE from 1", param_hint="--dim")
        sizes[name] = size
    return sizes
