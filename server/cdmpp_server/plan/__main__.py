"""A planning process: ``python -m cdmpp_server.plan MEMORY_BYTES PARENT ROLE LIMITS``. Started by the service only.

Reads jobs from standard input and writes replies to the original standard output, one at a time. SIGUSR1 ends the
running search with its best plan so far.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import sys
import traceback
from collections.abc import Mapping
from typing import Any, BinaryIO

from cdmpp_server.sandbox import frames
from cdmpp_server.sandbox.confine import die_with_parent, give_way, limit_memory

_MAX_OPEN_FILES = 256
#: Seconds without a job after which code for other planners is compiled.
_IDLE_S = 0.2
#: Most characters of a traceback in the log.
_MAX_TRACEBACK = 4000


def main(arguments: list[str]) -> None:
    """Serve jobs until the pipe closes."""
    memory_bytes, parent, role = int(arguments[0]), int(arguments[1]), arguments[2]
    die_with_parent(parent)
    # Replies have a separate descriptor: libraries print to the usual one.
    replies = os.fdopen(os.dup(1), "wb", closefd=True)
    os.dup2(2, 1)
    from cdmpp.plan.registry import PLANNERS

    for spec in PLANNERS.values():
        for model in spec.models():
            model.sibling("solver")  # imported before the memory is limited, and before a request waits
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (_MAX_OPEN_FILES, _MAX_OPEN_FILES))
    replies.write(frames.pack({"ready": True, "memory_limited": limit_memory(memory_bytes)}))
    replies.flush()
    give_way(role)
    serve(sys.stdin.buffer, replies, json.loads(arguments[3]))


def serve(jobs: BinaryIO, replies: BinaryIO, limits: Mapping[str, float]) -> None:
    """Run jobs until the input ends; ``limits`` as in :class:`cdmpp_server.plan.work.Reader`."""
    from cdmpp.predict.requests.budget import SearchControl
    from cdmpp_server.plan import work
    from cdmpp_server.plan.warm import Warmth

    reader, warmth = work.Reader(limits), Warmth()
    running: list[SearchControl] = []

    def stop(*_: Any) -> None:
        for control in running:
            control.stop()

    signal.signal(signal.SIGUSR1, stop)

    def send(header: dict[str, Any], payload: bytes = b"") -> None:
        replies.write(frames.pack(header, payload))
        replies.flush()

    def next_job() -> tuple[dict[str, Any], bytes] | None:
        while warmth and not select.select([jobs], [], [], _IDLE_S)[0]:
            warmth.warm()
        return frames.receive(jobs)

    while (message := next_job()) is not None:
        header, payload = message
        running.clear()
        body, prices = payload[: header["body"]], payload[header["body"] :]
        try:
            if header["do"] == "read":
                reply, text = work.read(reader, header["kind"], body)
            elif header["do"] == "check":
                warmth.warm(header["kind"])
                reply, text = work.check(reader, header["kind"], body, prices)
            else:
                warmth.warm(header["kind"])
                progress = send if header["progress"] else None
                reply, text = work.solve(reader, header["kind"], body, prices, running.append, progress)
        except MemoryError:
            send({"memory": True})
            return
        except Exception as error:
            refusal = work.problem(error)
            reply, text = {"refused": refusal} if refusal is not None else {"bug": _bug(error)}, b""
        send(reply, text)


def _bug(error: Exception) -> str:
    """A traceback for the log of the service."""
    return "".join(traceback.format_exception(error))[-_MAX_TRACEBACK:]


if __name__ == "__main__":
    main(sys.argv[1:])
