"""Checking what a reading worker says: it has read hostile bytes, so nothing in it is believed unseen."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from cdmpp.errors import CdmppError, InvalidProgramError, MissingDependencyError, UnsupportedOperatorError
from cdmpp.features.bulk import MAX_COLUMN, MAX_POSITION, MAX_TOTAL
from cdmpp.features.encode import PROGRAM_COLUMNS, EncodedPrograms
from cdmpp.features.encoded import TIR, EncodedProgram
from cdmpp.features.schedule import SCHEDULE_WIDTH
from cdmpp.features.schema import WIDTH
from cdmpp.features.walk import MAX_LEAVES
from cdmpp.programs.program import TensorProgram
from cdmpp.programs.query_options import Backend
from cdmpp_server.sandbox.frames import MAX_MESSAGE, MAX_NAME

_ERRORS: dict[str, type[CdmppError]] = {
    kind.code: kind for kind in (InvalidProgramError, UnsupportedOperatorError, MissingDependencyError)
}
_HASH = re.compile(r"[0-9a-f]{32}")
_DTYPE = re.compile(r"[a-z][a-z0-9_]{0,31}")
#: More launches than any network has; sums of them stay exact.
_MAX_COUNT = 10**6


class DistrustedAnswerError(Exception):
    """A worker's answer is not what its code can say: it is taken over or broken."""


@dataclass(frozen=True)
class Unsupported:
    """Nodes of an ONNX model that no program stands for."""

    operator: str
    count: int
    reason: str


@dataclass(frozen=True)
class ModelSummary:
    """An ONNX model as the library kernels that it launches.

    Attributes
    ----------
    programs : tuple of TensorProgram
        Distinct operators.
    counts : tuple of int
        How often each is launched.
    unsupported : tuple of Unsupported
    """

    programs: tuple[TensorProgram, ...]
    counts: tuple[int, ...]
    unsupported: tuple[Unsupported, ...]


def encoded_program(said: dict[str, Any], payload: bytes, backend: Backend) -> EncodedProgram:
    """An encoded TIR program.

    Raises
    ------
    CdmppError
        The worker found the text to be none (its error, with its message).
    DistrustedAnswerError
        The answer has another form.
    """
    _raise_error(said)
    name = _text(said.get("name"), MAX_NAME)
    digest, dtype = _text(said.get("hash"), 32), _text(said.get("dtype"), 32)
    if not _HASH.fullmatch(digest) or not _DTYPE.fullmatch(dtype):
        raise DistrustedAnswerError("a hash or an element type that is none")
    try:
        arrays = safetensors.numpy.load(payload)
    except (safetensors.SafetensorError, ValueError) as error:
        raise DistrustedAnswerError(f"arrays that cannot be read: {error}") from None
    if set(arrays) != {"leaves", "positions", "totals"}:
        raise DistrustedAnswerError("other arrays than a program has")
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
        raise DistrustedAnswerError("arrays of other shapes or values than a program has")
    return EncodedProgram(name, digest, backend, TIR, EncodedPrograms(leaves, positions, totals, dtype, TIR))


def tvm_json(said: dict[str, Any], payload: bytes) -> str:
    """TVM JSON that a worker wrote; as trustworthy as if a client had sent it.

    Raises
    ------
    CdmppError, DistrustedAnswerError
        As in :func:`encoded_program`.
    """
    _raise_error(said)
    try:
        return payload.decode()
    except UnicodeDecodeError:
        raise DistrustedAnswerError("TVM JSON that is no text") from None


def model_summary(said: dict[str, Any], max_programs: int) -> ModelSummary:
    """The programs of an ONNX model: operator objects are checked as if a client had sent them.

    Raises
    ------
    CdmppError, DistrustedAnswerError
        As in :func:`encoded_program`.
    """
    _raise_error(said)
    programs = _objects(said.get("programs"), max_programs, {"program", "count"})
    unsupported = _objects(said.get("unsupported"), None, {"operator", "count", "reason"})
    try:
        made = tuple(TensorProgram.from_operator(_object(p["program"])) for p in programs)
    except CdmppError as error:
        raise DistrustedAnswerError(f"an operator that is none: {error.message}") from None
    return ModelSummary(
        made,
        tuple(_count(p["count"]) for p in programs),
        tuple(
            Unsupported(_text(u["operator"], MAX_NAME), _count(u["count"]), _text(u["reason"], MAX_MESSAGE))
            for u in unsupported
        ),
    )


def _has(array: np.ndarray[Any, Any], dtype: str, shape: tuple[int, ...]) -> bool:
    return bool(array.dtype == np.dtype(dtype)) and array.shape == shape


def _raise_error(said: dict[str, Any]) -> None:
    if "error" not in said:
        return
    error = _object(said["error"])
    kind = _ERRORS.get(_text(error.get("code"), 64))
    if kind is None:
        raise DistrustedAnswerError("an error of no known kind")
    raise kind(_text(error.get("message"), MAX_MESSAGE), hint=_text(error.get("hint"), MAX_MESSAGE))


def _objects(value: Any, limit: int | None, keys: set[str]) -> list[dict[str, Any]]:
    if not isinstance(value, list) or (limit is not None and len(value) > limit):
        raise DistrustedAnswerError("no list, or too long a one")
    if not all(isinstance(part, dict) and set(part) == keys for part in value):
        raise DistrustedAnswerError("a list of something else")
    return value


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DistrustedAnswerError("no object where one should be")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or not 1 <= value <= _MAX_COUNT:
        raise DistrustedAnswerError("a count that is none")
    return value


def _text(value: Any, longest: int) -> str:
    if not isinstance(value, str) or len(value) > longest:
        raise DistrustedAnswerError("no text, or too long a one")
    return value
