"""An adapting process: ``python -m cdmpp_server.adapt MEMORY_BYTES PARENT``. Started by the service only.

Reads jobs from standard input and writes replies to the original standard output, one at a time. The service kills
it at a request's deadline.
"""

from __future__ import annotations

import os
import resource
import sys
import traceback
from typing import Any

from cdmpp_server.sandbox import frames
from cdmpp_server.sandbox.confine import die_with_parent, give_way, limit_memory

_MAX_OPEN_FILES = 256
#: Most characters of a traceback in the log.
_MAX_TRACEBACK = 4000


def main(arguments: list[str]) -> None:
    """Run jobs until the pipe closes."""
    memory_bytes, parent = int(arguments[0]), int(arguments[1])
    die_with_parent(parent)
    # Replies have a separate descriptor: libraries print to the usual one.
    replies = os.fdopen(os.dup(1), "wb", closefd=True)
    os.dup2(2, 1)
    from cdmpp_server.adapt import work  # all imports precede the memory limit

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (_MAX_OPEN_FILES, _MAX_OPEN_FILES))

    def send(header: dict[str, Any], payload: bytes = b"") -> None:
        replies.write(frames.pack(header, payload))
        replies.flush()

    send({"ready": True, "memory_limited": limit_memory(memory_bytes)})
    give_way("inline")
    bases = work.Bases()
    while (message := frames.receive(sys.stdin.buffer)) is not None:
        header, body = message
        try:
            reply, payload = work.run(bases, header, body)
        except MemoryError:
            send({"memory": True})
            return
        except Exception as error:
            reply, payload = {"bug": "".join(traceback.format_exception(error))[-_MAX_TRACEBACK:]}, b""
        send(reply, payload)


if __name__ == "__main__":
    main(sys.argv[1:])
