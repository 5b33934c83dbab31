"""An adapting process: ``python -m cdmpp_server.adapt MEMORY_BYTES PARENT``. Started by the service only.

The service kills it at a request's deadline.
"""

from __future__ import annotations

import sys
from functools import partial

from cdmpp_server.sandbox import frames
from cdmpp_server.sandbox.confine import confine, give_way

_MAX_OPEN_FILES = 256


def main(arguments: list[str]) -> None:
    """Run jobs until the pipe closes."""
    replies = frames.Replies(int(arguments[1]))
    from cdmpp_server.adapt import work  # all imports precede the memory limit

    limited = confine(int(arguments[0]), _MAX_OPEN_FILES, writes=True)
    replies.send({"ready": True, "memory_limited": limited})
    give_way("inline")
    frames.serve(replies, partial(work.run, work.Bases()))


if __name__ == "__main__":
    main(sys.argv[1:])
