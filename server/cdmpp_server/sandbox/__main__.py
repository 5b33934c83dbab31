"""A reading worker: ``python -m cdmpp_server.sandbox MEMORY_BYTES PARENT [tvm]``. Started by the service only.

It reads one job at a time from standard input and writes the reply to the original standard output.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from types import ModuleType
from typing import Any, cast

from cdmpp_server.sandbox import frames
from cdmpp_server.sandbox.confine import confine, keep_to_code

#: Seconds after a job's time limit at which the worker ends itself, in case the service has ended.
_GRACE_S = 2


def main(arguments: list[str]) -> None:
    """Run jobs until the pipe closes."""
    replies = frames.Replies(int(arguments[1]))
    # Before the imports: later threads inherit it, and libraries loaded later are in the same folders.
    files_kept = keep_to_code()
    has_tvm = "tvm" in arguments[2:] and _import_tvm()
    import onnx
    import onnx.checker
    import onnx.inliner
    import onnx.shape_inference  # noqa: F401 - all imports precede the memory limit

    from cdmpp_server.sandbox import jobs

    def run(header: dict[str, Any], payload: bytes) -> jobs.Reply:
        signal.alarm(int(header["timeout_s"]) + _GRACE_S)
        reply = jobs.run(header, payload)
        signal.alarm(0)
        return reply

    limited = confine(int(arguments[0]))
    replies.send({"ready": True, "tvm": has_tvm, "memory_limited": limited, "files_kept": files_kept})
    frames.serve(replies, run)


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
