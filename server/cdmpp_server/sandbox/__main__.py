"""A reading worker: ``python -m cdmpp_server.sandbox MEMORY_BYTES PARENT [tvm]``. Started by the service only.

It reads one job at a time from standard input and writes the reply to the original standard output.
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

#: Seconds after a job's time limit at which the worker ends itself, in case the service has ended.
_GRACE_S = 2


def main(arguments: list[str]) -> None:
    """Run jobs until the pipe closes."""
    memory_bytes, parent = int(arguments[0]), int(arguments[1])
    die_with_parent(parent)
    # Replies use a separate descriptor, because libraries print to standard output.
    replies = os.fdopen(os.dup(1), "wb", closefd=True)
    os.dup2(2, 1)
    # Before the imports: later threads inherit it, and libraries loaded later are in the same folders.
    files_kept = keep_to_code()
    has_tvm = "tvm" in arguments[2:] and _import_tvm()
    import onnx
    import onnx.checker
    import onnx.inliner
    import onnx.shape_inference  # noqa: F401 - all imports precede the memory limit

    from cdmpp_server.sandbox.jobs import run

    limited = confine(memory_bytes)
    ready = {"ready": True, "tvm": has_tvm, "memory_limited": limited, "files_kept": files_kept}
    replies.write(frames.pack(ready))
    replies.flush()
    while (message := frames.receive(sys.stdin.buffer)) is not None:
        header, payload = message
        signal.alarm(int(header["timeout_s"]) + _GRACE_S)
        try:
            reply, data = run(header, payload)
        except MemoryError:
            replies.write(frames.pack({"memory": True}))
            replies.flush()
            return
        signal.alarm(0)
        replies.write(frames.pack(reply, data))
        replies.flush()


def _import_tvm() -> bool:
    """Import TVM if it is installed, without torch, which TVM would import needlessly; return whether it is."""
    sys.modules["torch"] = cast(ModuleType, None)
    with contextlib.suppress(ImportError):
        import cdmpp.programs.frontends.tir

        cdmpp.programs.frontends.tir.prepare()
        return True
    return False


if __name__ == "__main__":
    main(sys.argv[1:])
