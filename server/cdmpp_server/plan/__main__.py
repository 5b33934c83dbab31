"""A planning process: ``python -m cdmpp_server.plan MEMORY_BYTES PARENT ROLE``. Started by the service only.

Reads jobs from standard input and writes replies to what was standard output, one at a time. SIGUSR1 ends
the search under way with the best that it has.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import sys
import traceback
from typing import Any, BinaryIO

from cdmpp_server.sandbox import frames
from cdmpp_server.sandbox.confine import die_with_parent, limit_memory

_MAX_OPEN_FILES = 256
#: Seconds without a job after which something is compiled that may be needed.
_IDLE_S = 0.2
#: Characters of a traceback.
_MOST_TOLD = 4000


def main(arguments: list[str]) -> None:
    """Serve jobs until the pipe closes."""
    memory_bytes, parent, role = int(arguments[0]), int(arguments[1]), arguments[2]
    die_with_parent(parent)
    # Replies go to a descriptor of their own: libraries print to the usual one.
    replies = os.fdopen(os.dup(1), "wb", closefd=True)
    os.dup2(2, 1)
    from cdmpp.planning.registry import PLANNERS

    for kind in PLANNERS.values():
        kind.models()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (_MAX_OPEN_FILES, _MAX_OPEN_FILES))
    replies.write(frames.pack({"ready": True, "memory_limited": limit_memory(memory_bytes)}))
    replies.flush()
    give_way(role)
    serve(sys.stdin.buffer, replies)


def give_way(role: str) -> None:
    """Let the service's own threads run first: a search takes what processor time they leave.

    Searches that somebody waits for (``inline``) are placed before those of ``jobs``.
    """
    os.nice(5 if role == "inline" else 15)
    if hasattr(os, "SCHED_BATCH"):  # Linux; not SCHED_IDLE, which waits for ever on a busy machine
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    if role == "jobs" and hasattr(os, "sched_setaffinity"):
        # A thread that wakes up may have to wait for one of a lower priority to end its slice: one core is
        # never taken by a job, however many threads its search has.
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[1:] or cores)


def serve(jobs: BinaryIO, replies: BinaryIO) -> None:
    """Do jobs until there are no more."""
    from cdmpp.compose.budget import SearchControl
    from cdmpp_server.plan import work
    from cdmpp_server.plan.warm import Warmth

    reader, warmth = work.Reader(), Warmth()
    under_way: list[SearchControl] = []

    def stop(*_: Any) -> None:
        for watch in under_way:
            watch.stop()

    signal.signal(signal.SIGUSR1, stop)

    def tell(said: dict[str, Any], text: bytes) -> None:
        replies.write(frames.pack(said, text))
        replies.flush()

    def next_job() -> tuple[dict[str, Any], bytes] | None:
        while warmth and not select.select([jobs], [], [], _IDLE_S)[0]:
            warmth.warm()
        return frames.receive(jobs)

    while (message := next_job()) is not None:
        header, payload = message
        under_way.clear()
        body, prices = payload[: header["body"]], payload[header["body"] :]
        try:
            if header["do"] == "read":
                said, text = work.read(reader, header["kind"], body)
            else:
                warmth.warm(header["kind"])
                told = tell if header["progress"] else None
                said, text = work.solve(reader, header["kind"], body, prices, under_way.append, told)
        except MemoryError:
            tell({"memory": True}, b"")
            return
        except Exception as error:
            refusal = work.problem(error)
            said, text = {"refused": refusal} if refusal is not None else {"bug": _bug(error)}, b""
        tell(said, text)


def _bug(error: Exception) -> str:
    """For the service's log."""
    return "".join(traceback.format_exception(error))[-_MOST_TOLD:]


if __name__ == "__main__":
    main(sys.argv[1:])
