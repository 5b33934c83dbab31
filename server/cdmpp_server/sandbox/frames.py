"""What the service and a reading worker say to each other: a JSON header and raw bytes, length first.

Never pickle: a worker that a text has taken over must not own the service as well.
"""

from __future__ import annotations

import json
import struct
from typing import Any, BinaryIO

#: Lengths of the header and of the bytes behind it.
PREFIX = struct.Struct("!IQ")
#: Bounds on what a worker may answer: features of the largest program take 1 MB, an ONNX model of ten
#: thousand programs 5 MB.
MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES = 16 * 2**20, 16 * 2**20
#: Names and messages are cut here (characters): they may hold whatever a stranger wrote.
MAX_NAME, MAX_MESSAGE = 400, 1000

#: What a worker reads.
TIR_KINDS = ("tvm_json", "tvmscript")
ONNX_KIND = "onnx"


class BrokenFrameError(Exception):
    """The other side does not speak the protocol."""


def pack(header: dict[str, Any], payload: bytes = b"") -> bytes:
    """One message as bytes."""
    text = json.dumps(header, allow_nan=False).encode()
    return PREFIX.pack(len(text), len(payload)) + text + payload


def lengths(prefix: bytes, max_header: int, max_payload: int) -> tuple[int, int]:
    """Lengths of the header and the payload that follow ``prefix``.

    Raises
    ------
    BrokenFrameError
        Longer than either may be.
    """
    header, payload = PREFIX.unpack(prefix)
    if header > max_header or payload > max_payload:
        raise BrokenFrameError(f"a message of {header} and {payload} bytes")
    return header, payload


def header_of(text: bytes) -> dict[str, Any]:
    """The header as an object.

    Raises
    ------
    BrokenFrameError
        Not a JSON object.
    """
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BrokenFrameError(f"a header that is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise BrokenFrameError("a header that is no object")
    return header


def receive(stream: BinaryIO) -> tuple[dict[str, Any], bytes] | None:
    """The next message of a blocking stream; None at its end. For the worker, which trusts the service."""
    prefix = stream.read(PREFIX.size)
    if len(prefix) < PREFIX.size:
        return None
    header, payload = PREFIX.unpack(prefix)
    text, data = stream.read(header), stream.read(payload)
    return (header_of(text), data) if len(data) == payload else None
