"""Picture of the rooms, from the layers in ``pyproject.toml`` and the docstring of each package (``make figures``)."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: Rooms that answer ``POST /predict``, in their order (docs/architecture.md).
PATH = ("cdmpp_server", "programs", "predict", "features", "model")
COLOURS = ("#1f6f8b", "#3f7f6e", "#5b5f97", "#a23b72", "#b0622a")
WIDTH, FLOOR, GAP, NAME = 1000, 46, 8, 170


def floors() -> list[list[str]]:
    """Rooms of each floor from top to bottom, without the prefix ``cdmpp.``."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    [contract] = [c for c in settings["tool"]["importlinter"]["contracts"] if c["id"] == "layers"]
    return [[name.removeprefix("cdmpp.") for name in re.findall(r"[\w.]+", layer)] for layer in contract["layers"]]


def purpose(room: str) -> str:
    """First sentence of a room's docstring."""
    path = ROOT / "server" / room if room == "cdmpp_server" else ROOT / "cdmpp" / room
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    text = ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or ""
    sentence = text.split("\n\n")[0].replace("\n", " ").partition(". ")[0].rstrip(".")
    return re.sub(r":\w+:`~?([\w.]+)`|``", r"\1", sentence)


def picture() -> str:
    """The picture as SVG."""
    parts: list[str] = []
    y = GAP
    for number, rooms in enumerate(floors()):
        width = (WIDTH - 2 * GAP - GAP * (len(rooms) - 1)) / len(rooms)
        for index, room in enumerate(rooms):
            text = [purpose(room), purpose(room).partition(":")[0], ""][len(rooms) - 1]
            parts += _room(room, text, COLOURS[number % len(COLOURS)], GAP + index * (width + GAP), y, width)
        y += FLOOR + GAP
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" font-family="sans-serif" font-size="14">'
    return "\n".join([head, f'<rect width="{WIDTH}" height="{y}" fill="#ffffff"/>', *parts, "</svg>", ""])


def _room(room: str, text: str, colour: str, x: float, y: int, width: float) -> Iterator[str]:
    """A box with the name of a room and its purpose."""
    middle = y + FLOOR / 2 + 5
    yield f'<rect x="{x:g}" y="{y}" width="{width:g}" height="{FLOOR}" rx="8" fill="#f4f6f8" stroke="{colour}"/>'
    yield f'<rect x="{x:g}" y="{y}" width="7" height="{FLOOR}" rx="3" fill="{colour}"/>'
    yield f'<text x="{x + 20:g}" y="{middle:g}" font-weight="600" fill="{colour}">{escape(room)}</text>'
    if room in PATH:
        centre = x + NAME - 18
        yield f'<circle cx="{centre:g}" cy="{y + FLOOR / 2:g}" r="11" fill="{colour}"/>'
        style = 'text-anchor="middle" font-weight="600" fill="#ffffff"'
        yield f'<text x="{centre:g}" y="{middle:g}" {style}>{PATH.index(room) + 1}</text>'
    yield f'<text x="{x + NAME + 8:g}" y="{middle:g}" fill="#1f2933">{escape(text)}</text>'
