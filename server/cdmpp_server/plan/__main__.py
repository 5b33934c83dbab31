"""A planning process: ``python -m cdmpp_server.plan MEMORY_BYTES PARENT ROLE LIMITS``. Started by the service only.

SIGUSR1 ends the running search with its best plan so far, and a job of :mod:`cdmpp_server.planned` without an answer.
"""

from __future__ import annotations

import json
import select
import signal
import sys
from typing import Any

from cdmpp_server.sandbox import frames
from cdmpp_server.sandbox.confine import confine, give_way

_MAX_OPEN_FILES = 256
#: Seconds without a job after which code for other planners is compiled.
_IDLE_S = 0.2


def main(arguments: list[str]) -> None:
    """Serve jobs until the pipe closes."""
    replies = frames.Replies(int(arguments[1]))
    # All imports precede the memory limit, and no request waits for them.
    from cdmpp.plan.registry import PLANNERS
    from cdmpp.predict.requests.budget import SearchControl
    from cdmpp_server.plan import work
    from cdmpp_server.plan.warm import Warmth
    from cdmpp_server.planned import ENDPOINTS, PlannedJobs

    if arguments[2] == "inline":
        from cdmpp_server import curve, llm, training  # noqa: F401 - they fill ENDPOINTS

    for spec in PLANNERS.values():
        for model in spec.models():
            model.sibling("solver")
    limited = confine(int(arguments[0]), _MAX_OPEN_FILES, writes=True)
    give_way(arguments[2])
    reader, warmth, planned = work.PlanReader(json.loads(arguments[3])), Warmth(), PlannedJobs()
    running: list[SearchControl] = []

    def stop(*_: Any) -> None:
        for control in running:
            control.stop()
        planned.stop()

    def warm_while_idle() -> None:
        while warmth and not select.select([sys.stdin.buffer], [], [], _IDLE_S)[0]:
            warmth.warm()

    def run(header: dict[str, Any], payload: bytes) -> work.WorkerReply:
        running.clear()
        kind, body, prices = header["kind"], payload[: header["body"]], payload[header["body"] :]
        if kind in ENDPOINTS:
            return planned.run(header, payload)
        try:
            if header["do"] == "read":
                return work.read(reader, kind, body)
            warmth.warm(kind)
            if header["do"] == "check":
                return work.check(reader, kind, body, prices)
            progress = replies.send if header["progress"] else None
            return work.solve(reader, kind, body, prices, running.append, progress, header.get("figure", False))
        except Exception as error:
            refusal = work.problem(error)
            if refusal is None:
                raise
            return {"refused": refusal}, b""

    signal.signal(signal.SIGUSR1, stop)
    replies.send({"ready": True, "memory_limited": limited})
    frames.serve(replies, run, warm_while_idle)


if __name__ == "__main__":
    main(sys.argv[1:])
