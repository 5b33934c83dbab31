"""Sizes of units and nodes that several formats need."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from cdmpp.errors import FieldError
from cdmpp.predict.requests.request import Request


def tensor_parallel(request: Request[Any], *fields: str) -> tuple[int, list[str]]:
    """Tensor-parallel ranks of a request: those of its language model, or of the all-reduces among its programs.

    Parameters
    ----------
    request : Request
    *fields : str
        Fields of the request to look at; default: all.

    Returns
    -------
    ranks : int
        1 without either.
    notes : list of str
        The source of the number.

    Raises
    ------
    FieldError
        They have different numbers of ranks, or a language model has several stages.
    """
    values = request.model_dump(mode="json", include=set(fields) or None)
    ranks = sorted(set(_all_reduces(values)))
    if len(ranks) > 1:
        raise FieldError(
            f"tp: programs of the request have {' and '.join(map(str, ranks))} ranks",
            path="tp",
            hint="give the option tp",
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


def nodes(units: int, unit_gpus: int, node_gpus: int) -> tuple[int, int]:
    """Nodes and GPUs of each node for the units of a pool.

    Parameters
    ----------
    units, unit_gpus, node_gpus : int
        Units of the pool, GPUs of a unit, GPUs of a node.

    Returns
    -------
    nodes, gpus : int
        The fewest nodes with equal numbers of GPUs, on which no unit is divided unnecessarily.

    Raises
    ------
    FieldError
        A unit is larger than a node and no multiple of it.
    """
    if unit_gpus > node_gpus:
        if unit_gpus % node_gpus:
            raise FieldError(
                f"tp: a unit of {unit_gpus} GPUs does not fill nodes of {node_gpus}",
                path="tp",
                hint="choose a multiple of the option node_gpus",
            )
        return units * unit_gpus // node_gpus, node_gpus
    per_node = max(n for n in range(1, min(node_gpus // unit_gpus, units) + 1) if units % n == 0)
    return units // per_node, per_node * unit_gpus
