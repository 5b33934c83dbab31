"""A reading worker: ``python -m cdmpp_server.sandbox MEMORY_BYTES PARENT [tvm]``. Started by the service only.

Reads jobs from standard input and writes replies to what was standard output, one at a time.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from types import ModuleType
from typing import cast

from cdmpp_server.sandbox import frames
from cdmpp_server.sandbox.confine import confine, die_with_parent, keep_to_code

#: Seconds past a job's time after which the worker ends itself, should nobody be left to end it.
_GRACE_S = 2


def main(arguments: list[str]) -> None:
    """Serve jobs until the pipe closes."""
    memory_bytes, parent = int(arguments[0]), int(arguments[1])
    die_with_parent(parent)
    # Replies go to a descriptor of their own: libraries print to the usual one.
    replies = os.fdopen(os.dup(1), "wb", closefd=True)
    os.dup2(2, 1)
    # Before the imports: libraries that are read late are in the same folders, and threads take it over.
    files_kept = keep_to_code()
    has_tvm = "tvm" in arguments[2:] and _import_tvm()
    import onnx
    import onnx.checker
    import onnx.inliner
    import onnx.shape_inference  # noqa: F401 - before the limits, like all that is imported here

    from cdmpp_server.sandbox.jobs import run

    limited = confine(memory_bytes)
    ready = {"ready": True, "tvm": has_tvm, "memory_limited": limited, "files_kept": files_kept}
    replies.write(frames.pack(ready))
    replies.flush()
    while (message := frames.receive(sys.stdin.buffer)) is not None:
        header, payload = message
        signal.alarm(int(header["timeout_s"]) + _GRACE_S)
        try:
            said, data = run(header, payload)
        except MemoryError:
            replies.write(frames.pack({"memory": True}))
            replies.flush()
            return
        signal.alarm(0)
        replies.write(frames.pack(said, data))
        replies.flush()


def _import_tvm() -> bool:
    """Whether TVM is there; without torch, which it would import for nothing where that is installed."""
    sys.modules["torch"] = cast(ModuleType, None)
    with contextlib.suppress(ImportError):
        import cdmpp.frontends.tir

        cdmpp.frontends.tir.prepare()
        return True
    return False


if __name__ == "__main__":
    main(sys.argv[1:])
