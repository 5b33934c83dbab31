"""Protocol between the service and a worker: two lengths, a JSON header, and raw bytes.

Pickle is not used: a text that takes over a worker must not be able to take over the service.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO

from cdmpp_server.sandbox.confine import die_with_parent

#: Lengths of the header and of the payload.
PREFIX = struct.Struct("!IQ")
#: Largest header and payload of a reply: features of the largest program take 1 MB, an ONNX model of ten
#: thousand programs 5 MB.
MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES = 16 * 2**20, 16 * 2**20
#: Maximum length of names and messages, in characters: they may contain a client's text.
MAX_NAME, MAX_MESSAGE = 400, 1000
#: Most characters of a traceback in the log.
_MAX_TRACEBACK = 4000

#: Kinds of texts.
TIR_KINDS = ("tvm_json", "tvmscript")
ONNX_KIND = "onnx"


class BrokenFrameError(Exception):
    """The message violates the protocol."""


def pack(header: dict[str, Any], payload: bytes = b"") -> bytes:
    """Return a message as bytes."""
    text = json.dumps(header, allow_nan=False).encode()
    return PREFIX.pack(len(text), len(payload)) + text + payload


def lengths(prefix: bytes, max_header: int, max_payload: int) -> tuple[int, int]:
    """Return the lengths of the header and the payload that follow ``prefix``.

    Raises BrokenFrameError: a length exceeds its limit.
    """
    header, payload = PREFIX.unpack(prefix)
    if header > max_header or payload > max_payload:
        raise BrokenFrameError(f"a message of {header} and {payload} bytes is too long")
    return header, payload


def header_of(text: bytes) -> dict[str, Any]:
    """Parse a header.

    Raises BrokenFrameError: it is not a JSON object.
    """
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BrokenFrameError(f"the header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise BrokenFrameError("the header is not a JSON object")
    return header


def receive(stream: BinaryIO) -> tuple[dict[str, Any], bytes] | None:
    """Read the next message of a blocking stream; None at its end. For the worker, which trusts the service."""
    prefix = stream.read(PREFIX.size)
    if len(prefix) < PREFIX.size:
        return None
    header, payload = PREFIX.unpack(prefix)
    text, data = stream.read(header), stream.read(payload)
    return (header_of(text), data) if len(data) == payload else None


class Replies:
    """The worker's replies to the service, the process ``parent``; the worker ends with it.

    They have a separate descriptor, because libraries print to standard output.
    """

    def __init__(self, parent: int) -> None:
        die_with_parent(parent)
        self._stream = os.fdopen(os.dup(1), "wb", closefd=True)
        os.dup2(2, 1)

    def send(self, header: dict[str, Any], payload: bytes = b"") -> None:
        """Send a reply."""
        self._stream.write(pack(header, payload))
        self._stream.flush()


def serve(
    replies: Replies,
    run: Callable[[dict[str, Any], bytes], tuple[dict[str, Any], bytes]],
    before: Callable[[], None] | None = None,
) -> None:
    """Run jobs from standard input, one at a time, until it ends or memory runs out; a bug's reply is its traceback.

    ``before`` is called before each job is read.
    """
    while True:
        if before is not None:
            before()
        message = receive(sys.stdin.buffer)
        if message is None:
            return
        try:
            reply, payload = run(*message)
        except MemoryError:
            replies.send({"memory": True})
            return
        except Exception as error:
            reply, payload = {"bug": "".join(traceback.format_exception(error))[-_MAX_TRACEBACK:]}, b""
        replies.send(reply, payload)
