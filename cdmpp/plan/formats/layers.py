"""Layers as the symbols of Megatron-LM's pipeline layout, and the sizes of units and nodes.

``Et*3|t*4|t*4L``: stages are separated by ``|``; E is the embedding, t a decoder layer, m a layer of multi-token
prediction, L the loss. ``x*n`` repeats a symbol, ``(...)*n`` a part; commas mean nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Literal

from pydantic import Field

from cdmpp.errors import FieldError
from cdmpp.plan.formats.registry import PlanExporter
from cdmpp.predict.requests.request import Count, Request

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


class LayerExporter(PlanExporter):
    """Base of the formats that place layers of a decoder on stages."""

    tp: Count | None = Field(
        None, description="Tensor-parallel ranks of a stage; default: ranks of the request's programs."
    )
    symbols: dict[str, Symbol] = Field(
        default_factory=dict, description="Symbol of a layer by its name: E, t, m, L, or empty to leave it out."
    )


def symbol(name: str, given: Mapping[str, Symbol]) -> Symbol:
    """Symbol of a layer: the one given for its name, or by what the name contains; empty for the final norm."""
    if name in given:
        return given[name]
    return next((letter for letter, pattern in _NAMES if re.search(pattern, name.lower())), "t")


def layout_text(stages: Sequence[str]) -> str:
    """The layout of stages that are given as symbols: ["Ettt", "tt", "L"] is ``Et*3|t*2|L``."""
    return "|".join("".join(_run(letter, len(list(run))) for letter, run in groupby(stage)) for stage in stages)


def _run(letter: str, count: int) -> str:
    return letter if count == 1 else f"{letter}*{count}"


def parse_layout(text: str) -> list[str]:
    """Symbols of each stage: ``Et*3|(tt|)*2L`` is ["Ettt", "tt", "tt", "L"].

    Raises FieldError: the text is no layout.
    """
    expanded = text.replace(",", "").replace(" ", "")
    for pattern in (r"\(([^()]+)\)\*(\d{1,9})", r"(.)\*(\d{1,9})"):
        size = len(expanded) + sum(len(part) * int(count) for part, count in re.findall(pattern, expanded))
        if size > _MAX_LAYERS:
            raise FieldError.at(_OPTION, f"more than {_MAX_LAYERS} symbols", hint="correct its numbers")
        expanded = re.sub(pattern, lambda match: match.group(1) * int(match.group(2)), expanded)
    wrong = set(expanded) - set(SYMBOLS + "|")
    if wrong or not set(expanded) - {"|"}:
        raise FieldError.at(
            _OPTION,
            f"{text[:80]!r} is no pipeline layout" + (f": {min(wrong)!r} is no symbol" if wrong else ""),
            hint='stages of E, t, m and L, separated by |, such as "Et*3|t*4|t*4L"',
        )
    return expanded.split("|")


def tensor_parallel(given: int | None, request: Request[Any], *fields: str) -> tuple[int, list[str]]:
    """Tensor-parallel ranks: given, or of a request's language model or the all-reduces among its programs; else 1.

    ``fields``: fields of the request to look at; default: all. The notes name the source of the number.
    Raises FieldError: they have different numbers of ranks, or a language model has several stages.
    """
    if given is not None:
        return given, []
    values = request.model_dump(mode="json", include=set(fields) or None)
    ranks = sorted(set(_all_reduces(values)))
    if len(ranks) > 1:
        raise FieldError.at(
            "tp", f"programs of the request have {' and '.join(map(str, ranks))} ranks", hint="give the option tp"
        )
    if ranks:
        return ranks[0], [f"tp {ranks[0]}: ranks of the programs in the request"]
    return 1, ["tp 1: no program of the request has several ranks"]


def _all_reduces(value: Any) -> Iterator[int]:
    """Ranks of every all-reduce that is one of several programs, and of every language model."""
    if isinstance(value, Mapping):
        model = value.get("llm")
        if isinstance(model, Mapping):
            if model["pp"] > 1:
                raise FieldError(
                    f"llm: a unit has {model['pp']} stages, and the format has none",
                    path="llm.pp",
                    hint="give the option tp: GPUs of a unit",
                )
            yield int(model["tp"])
        program = value.get("program")
        if isinstance(program, Mapping) and program.get("operator") == "all_reduce":
            yield int(program["ranks"])
        for item in value.values():
            yield from _all_reduces(item)
    elif isinstance(value, list):
        for item in value:
            yield from _all_reduces(item)


def check_fills_nodes(unit_gpus: int, node_gpus: int) -> None:
    """Raise FieldError for a unit that is larger than a node and no multiple of it."""
    if unit_gpus > node_gpus and unit_gpus % node_gpus:
        raise FieldError.at(
            "tp",
            f"a unit of {unit_gpus} GPUs does not fill nodes of {node_gpus}",
            hint="choose a multiple of the option node_gpus",
        )


def nodes(units: int, unit_gpus: int, node_gpus: int) -> tuple[int, int]:
    """Nodes and GPUs of each node for the units of a pool.

    Returns ``nodes, gpus``: the fewest nodes with equal numbers of GPUs, on which no unit is divided unnecessarily.
    Raises FieldError: a unit is larger than a node and no multiple of it.
    """
    if unit_gpus > node_gpus:
        check_fills_nodes(unit_gpus, node_gpus)
        return units * unit_gpus // node_gpus, node_gpus
    per_node = max(n for n in range(1, min(node_gpus // unit_gpus, units) + 1) if units % n == 0)
    return units // per_node, per_node * unit_gpus
