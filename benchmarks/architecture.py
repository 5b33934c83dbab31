"""Picture of the packages, from the layers in ``pyproject.toml`` (``make figures``)."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: Title and colour of each row, by its uppermost package. A row ends where the next one begins.
ROWS = {
    "cdmpp_server": ("HTTP service", "#1f6f8b"),
    "demo": ("Command line", "#3f7f6e"),
    "integrations": ("Tools, clusters, sweeps", "#5b5f97"),
    "planning": ("Plans and replay", "#a23b72"),
    "client": ("Models, curves, tables", "#b0622a"),
    "predictor": ("Predictions", "#1f6f8b"),
    "adaptation": ("Training and measuring", "#3f7f6e"),
    "inference": ("Model", "#5b5f97"),
    "data": ("Measurements", "#a23b72"),
    "frontends": ("Programs and devices", "#b0622a"),
    "errors": ("Basics", "#6b7280"),
}
#: Packages that answer ``POST /predict``, in their order (docs/architecture.md).
PATH = ("cdmpp_server", "frontends", "predictor", "features", "inference", "nn", "domain", "prediction")
WIDTH, LEFT, ROOM_HEIGHT, GAP, LETTER = 1000, 250, 32, 10, 8.4


def layers() -> list[str]:
    """Packages from top to bottom, without the prefix ``cdmpp.``."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    [contract] = [c for c in settings["tool"]["importlinter"]["contracts"] if c["id"] == "layers"]
    names = [name for layer in contract["layers"] for name in re.findall(r"[\w.]+", layer)]
    return [name.removeprefix("cdmpp.") for name in names]


def rows() -> list[tuple[str, str, list[str]]]:
    """Title, colour and packages of each row."""
    found: list[tuple[str, str, list[str]]] = []
    for name in layers():
        if name in ROWS:
            found.append((*ROWS[name], []))
        found[-1][2].append(name)
    return found


def picture() -> str:
    """The picture as SVG."""
    parts, y = [], GAP
    for title, colour, names in rows():
        rooms, height = [], ROOM_HEIGHT
        x, top = LEFT, y + GAP
        for name in names:
            number = PATH.index(name) + 1 if name in PATH else 0
            width = round(LETTER * len(name) + 24 + (22 if number else 0))
            if x + width > WIDTH - 2 * GAP:
                x, top, height = LEFT, top + ROOM_HEIGHT + GAP, height + ROOM_HEIGHT + GAP
            rooms += _room(name, number, colour, x, top, width)
            x += width + GAP
        height += 2 * GAP
        parts.append(f'<rect x="{GAP}" y="{y}" width="{WIDTH - 2 * GAP}" height="{height}" rx="8" fill="#f4f6f8"/>')
        parts.append(f'<rect x="{GAP}" y="{y}" width="6" height="{height}" rx="3" fill="{colour}"/>')
        parts.append(f'<text x="30" y="{y + height / 2 + 5:g}" font-weight="600" fill="#1f2933">{escape(title)}</text>')
        parts += rooms
        y += height + GAP
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" font-family="sans-serif" font-size="14">'
    return "\n".join([head, f'<rect width="{WIDTH}" height="{y}" fill="#ffffff"/>', *parts, "</svg>", ""])


def _room(name: str, number: int, colour: str, x: int, y: int, width: int) -> Iterator[str]:
    """A box with the name of a package; those of the path of a request are filled and have a number."""
    fill, text = (colour, "#ffffff") if number else ("#ffffff", "#1f2933")
    yield f'<rect x="{x}" y="{y}" width="{width}" height="{ROOM_HEIGHT}" rx="6" fill="{fill}" stroke="{colour}"/>'
    if number:
        yield f'<circle cx="{x + 18}" cy="{y + 16}" r="10" fill="#ffffff"/>'
        yield f'<text x="{x + 18}" y="{y + 21}" text-anchor="middle" font-weight="600" fill="{colour}">{number}</text>'
    centre = x + width / 2 + (11 if number else 0)
    yield f'<text x="{centre:g}" y="{y + 21}" text-anchor="middle" fill="{text}">{name}</text>'
