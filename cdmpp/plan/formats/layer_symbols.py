"""Layers of a model as the symbols of Megatron-LM's pipeline layout, and the grammar of the layout.

``Et*3|t*4|t*4L``: stages are separated by ``|``; E is the embedding, t a decoder layer, m a layer of multi-token
prediction, L the loss. ``x*n`` repeats a symbol, ``(...)*n`` a part; commas mean nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Literal

from cdmpp.errors import FieldError

Symbol = Literal["E", "t", "m", "L", ""]
SYMBOLS = "EtmL"
#: Names of layers by symbol; a name of none of them is a decoder layer.
_NAMES: tuple[tuple[Symbol, str], ...] = (
    ("E", r"emb|wte|wpe"),
    ("m", r"mtp"),
    ("L", r"head|loss|logits|^output$"),
    ("", r"^(final_?)?(layer_?)?norm$|^ln_f$"),
)
_MAX_LAYERS = 100_000
_OPTION = "--pipeline-model-parallel-layout"


def symbol(name: str, given: Mapping[str, Symbol]) -> Symbol:
    """Symbol of a layer: the one given for its name, or by what the name contains; empty for the final norm."""
    if name in given:
        return given[name]
    return next((found for found, pattern in _NAMES if re.search(pattern, name.lower())), "t")


def layout_text(stages: Sequence[str]) -> str:
    """The layout of stages that are given as symbols: ["Ettt", "tt", "L"] is ``Et*3|t*2|L``."""
    return "|".join("".join(_run(letter, len(list(run))) for letter, run in groupby(stage)) for stage in stages)


def _run(letter: str, count: int) -> str:
    return letter if count == 1 else f"{letter}*{count}"


def parse_layout(text: str) -> list[str]:
    """Symbols of each stage: ``Et*3|(tt|)*2L`` is ["Ettt", "tt", "tt", "L"].

    Raises
    ------
    FieldError
        The text is no layout.
    """
    expanded = text.replace(",", "").replace(" ", "")
    for pattern in (r"\(([^()]+)\)\*(\d{1,9})", r"(.)\*(\d{1,9})"):
        size = len(expanded) + sum(len(part) * int(count) for part, count in re.findall(pattern, expanded))
        if size > _MAX_LAYERS:
            raise FieldError(f"{_OPTION}: more than {_MAX_LAYERS} symbols", path=_OPTION, hint="correct its numbers")
        expanded = re.sub(pattern, lambda found: found.group(1) * int(found.group(2)), expanded)
    wrong = set(expanded) - set(SYMBOLS + "|")
    if wrong or not set(expanded) - {"|"}:
        raise FieldError(
            f"{_OPTION}: {text[:80]!r} is no pipeline layout" + (f": {min(wrong)!r} is no symbol" if wrong else ""),
            path=_OPTION,
            hint='stages of E, t, m and L, separated by |, such as "Et*3|t*4|t*4L"',
        )
    return expanded.split("|")
