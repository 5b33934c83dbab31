"""Validation of a reading worker's replies, which are untrusted because it has read untrusted bytes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from cdmpp.errors import CdmppError, InvalidProgramError, MissingDependencyError, UnsupportedOperatorError
from cdmpp.features.class_features import PROGRAM_COLUMNS
from cdmpp.features.encode import TIR, EncodedProgram, EncodedPrograms
from cdmpp.features.schedule import SCHEDULE_WIDTH
from cdmpp.features.schema import WIDTH
from cdmpp.features.walk import MAX_LEAVES
from cdmpp.predict.bulk import MAX_COLUMN, MAX_POSITION, MAX_TOTAL
from cdmpp.programs.program import TensorProgram
from cdmpp.programs.query_options import Backend
from cdmpp_server.sandbox.frames import MAX_MESSAGE, MAX_NAME

_ERRORS: dict[str, type[CdmppError]] = {
    kind.code: kind for kind in (InvalidProgramError, UnsupportedOperatorError, MissingDependencyError)
}
_HASH = re.compile(r"[0-9a-f]{32}")
_DTYPE = re.compile(r"[a-z][a-z0-9_]{0,31}")
#: Maximum number of launches; larger than in any network, and small enough for exact sums.
_MAX_COUNT = 10**6


class InvalidReplyError(Exception):
    """A reply that the worker's code cannot produce: the worker is broken or was taken over."""


@dataclass(frozen=True)
class UnsupportedReply:
    """Nodes of an ONNX model without a program."""

    operator: str
    count: int
    reason: str


@dataclass(frozen=True)
class ModelSummary:
    """The library kernels that an ONNX model launches."""

    #: Distinct operators.
    programs: tuple[TensorProgram, ...]
    #: Number of launches of each.
    counts: tuple[int, ...]
    unsupported: tuple[UnsupportedReply, ...]


def encoded_program(reply: dict[str, Any], payload: bytes, backend: Backend) -> EncodedProgram:
    """Decode an encoded TIR program.

    Raises CdmppError: the error of the text that the worker found; InvalidReplyError: the reply has another form.
    """
    _raise_error(reply)
    name = _text(reply.get("name"), MAX_NAME)
    digest, dtype = _text(reply.get("hash"), 32), _text(reply.get("dtype"), 32)
    if not _HASH.fullmatch(digest) or not _DTYPE.fullmatch(dtype):
        raise InvalidReplyError("an invalid hash or element type")
    try:
        arrays = safetensors.numpy.load(payload)
    except (safetensors.SafetensorError, ValueError) as error:
        raise InvalidReplyError(f"unreadable arrays: {error}") from None
    if set(arrays) != {"leaves", "positions", "totals"}:
        raise InvalidReplyError("unexpected arrays")
    leaves, positions, totals = arrays["leaves"], arrays["positions"], arrays["totals"]
    count = leaves.shape[1] if leaves.ndim == 3 else 0
    fits = (
        1 <= count <= MAX_LEAVES
        and _has(leaves, "float32", (1, count, WIDTH + SCHEDULE_WIDTH))
        and _has(positions, "int32", (count,))
        and _has(totals, "float64", (1, len(PROGRAM_COLUMNS)))
        and bool(np.isfinite(leaves).all() and (np.abs(leaves) <= MAX_COLUMN).all())
        and bool((totals >= 0).all() and (totals <= MAX_TOTAL).all())
        and bool((positions >= 0).all() and (positions <= MAX_POSITION).all())
    )
    if not fits:
        raise InvalidReplyError("arrays with invalid shapes or values")
    return EncodedProgram(name, digest, backend, TIR, EncodedPrograms(leaves, positions, totals, dtype, TIR))


def tvm_json(reply: dict[str, Any], payload: bytes) -> str:
    """Decode TVM JSON that a worker wrote; it is as untrusted as a client's text.

    Raises CdmppError, InvalidReplyError: as in :func:`encoded_program`.
    """
    _raise_error(reply)
    try:
        return payload.decode()
    except UnicodeDecodeError:
        raise InvalidReplyError("TVM JSON that is not UTF-8") from None


def model_summary(reply: dict[str, Any], max_programs: int) -> ModelSummary:
    """Decode the programs of an ONNX model; operators are validated like a client's.

    Raises CdmppError, InvalidReplyError: as in :func:`encoded_program`.
    """
    _raise_error(reply)
    programs = _objects(reply.get("programs"), max_programs, {"program", "count"})
    unsupported = _objects(reply.get("unsupported"), None, {"operator", "count", "reason"})
    try:
        operators = tuple(TensorProgram.from_operator(_object(p["program"])) for p in programs)
    except CdmppError as error:
        raise InvalidReplyError(f"an invalid operator: {error.message}") from None
    return ModelSummary(
        operators,
        tuple(_count(p["count"]) for p in programs),
        tuple(
            UnsupportedReply(_text(u["operator"], MAX_NAME), _count(u["count"]), _text(u["reason"], MAX_MESSAGE))
            for u in unsupported
        ),
    )


def _has(array: np.ndarray[Any, Any], dtype: str, shape: tuple[int, ...]) -> bool:
    return bool(array.dtype == np.dtype(dtype)) and array.shape == shape


def _raise_error(reply: dict[str, Any]) -> None:
    if "error" not in reply:
        return
    error = _object(reply["error"])
    kind = _ERRORS.get(_text(error.get("code"), 64))
    if kind is None:
        raise InvalidReplyError("an unknown kind of error")
    raise kind(_text(error.get("message"), MAX_MESSAGE), hint=_text(error.get("hint"), MAX_MESSAGE))


def _objects(value: Any, limit: int | None, keys: set[str]) -> list[dict[str, Any]]:
    if not isinstance(value, list) or (limit is not None and len(value) > limit):
        raise InvalidReplyError("a list is missing or too long")
    if not all(isinstance(part, dict) and set(part) == keys for part in value):
        raise InvalidReplyError("a list with invalid elements")
    return value


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidReplyError("an object is missing")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or not 1 <= value <= _MAX_COUNT:
        raise InvalidReplyError("an invalid count")
    return value


def _text(value: Any, longest: int) -> str:
    if not isinstance(value, str) or len(value) > longest:
        raise InvalidReplyError("a text is missing or too long")
    return value
