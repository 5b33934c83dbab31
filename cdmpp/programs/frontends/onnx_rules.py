"""Shared parts of the rules for ONNX nodes: outcomes, and helpers for shapes and types."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from cdmpp.errors import InvalidProgramError
from cdmpp.programs.frontends.onnx_fold import Array
from cdmpp.programs.frontends.onnx_graph import OnnxGraph, OnnxNode

Shape = tuple[int, ...]
Fields = dict[str, Any]

DTYPES = ("float32", "float16", "bfloat16", "int8")


class Unsupported(Exception):  # noqa: N818 - an outcome, not an error
    """The node has no operator specification; the message gives the reason."""


@dataclass(frozen=True)
class Free:
    """The node launches nothing: it only renames or reinterprets memory."""

    reason: str


@dataclass(frozen=True)
class Launch:
    """The node launches ``fields``, then whatever is in ``then`` (each with a suffix for its id)."""

    fields: Fields
    remark: str = ""
    then: tuple[tuple[str, Fields], ...] = field(default=())


Outcome = Launch | Free


#: What a rule runs into when shapes or attributes break the operator's definition past shape inference.
MALFORMED = (LookupError, TypeError, ValueError, ArithmeticError)


def malformed(graph: OnnxGraph, node: OnnxNode, error: Exception) -> InvalidProgramError:
    """The error to raise for one of :data:`MALFORMED`."""
    return InvalidProgramError(
        f"{graph.name}: node {node.id!r} ({node.label}) is malformed: {error}",
        hint="check the model with onnx.checker.check_model(path, full_check=True)",
    )


# -- helpers ----------------------------------------------------------------------------------


def shape_of(graph: OnnxGraph, value: str) -> Shape:
    """Shape of a value that must have one."""
    shape = graph.shape(value)
    if shape is None:
        raise Unsupported(f"the shape of {value!r} is not static" if value else "an input is left out")
    return shape


def dtype_of(graph: OnnxGraph, value: str) -> str:
    """Element type of a value, if programs may have it."""
    dtype = graph.dtype(value)
    if dtype not in DTYPES:
        raise Unsupported(f"element type {dtype}")
    return dtype


def rows_cols(shape: Shape) -> Fields:
    """A tensor as rows of its last axis."""
    return {"rows": math.prod(shape[:-1]), "cols": shape[-1] if shape else 1}


def over(graph: OnnxGraph, operator: str, value: str, **more: Any) -> Fields:
    """Fields of an operator on all elements of ``value``."""
    return {"operator": operator, "dtype": dtype_of(graph, value), **rows_cols(shape_of(graph, value)), **more}


def constant_ints(graph: OnnxGraph, node: OnnxNode, index: int, attribute: str) -> list[int] | None:
    """Integers given as an attribute (old operator sets) or as a constant input (newer ones)."""
    if attribute in node.attrs:
        return [int(v) for v in node.attrs[attribute]]
    name = node.input(index)
    if not name:
        return None
    value: Array | None = graph.value(name)
    if value is None:
        raise Unsupported(f"{attribute} is not constant")
    return [int(v) for v in value.reshape(-1)]
