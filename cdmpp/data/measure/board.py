"""``python -m cdmpp.data.measure.board``: TVM's RPC server, restarted after a crash.

After a program has crashed in a session, TVM 0.27's ``tvm.exec.rpc_server`` keeps running but serves no more
sessions. This server ends and restarts instead, so that a crash costs one program and not the board.
"""

from __future__ import annotations

import argparse
import logging
import os
import platform
import signal
import sys
import threading
import time

from cdmpp.data.measure.tracker import parse_tracker
from cdmpp.errors import CdmppError

logger = logging.getLogger("cdmpp.board")

_PAUSE_S = 0.2
#: Function of the server that returns its processor, as `platform.machine`.
MACHINE = "cdmpp.data.measure.board.machine"


def serve(tracker: str, key: str, host: str = "0.0.0.0", port: int = 9090) -> None:
    """Serve until the process ends.

    Parameters
    ----------
    tracker : str
        ``HOST:PORT``.
    key : str
        Kind of board, as ``cdmpp collect --key`` names it.
    host : str
        Address to listen on.
    port : int
        First port to try; the next ninety-nine are tried too.

    Raises
    ------
    MeasurementError
        The tracker's address is invalid.
    """
    at = parse_tracker(tracker, key)
    os.environ.setdefault("TVM_USE_RUNTIME_LIB", "1")
    from tvm import rpc

    while True:
        server = rpc.Server(
            host,
            port,
            port + 100,
            key=key,
            tracker_addr=(at.host, at.port),
            silent=not logger.isEnabledFor(logging.INFO),
            server_init_callback=_begin,
        )
        try:
            server.proc.join()
        finally:
            server.terminate()
        logger.warning("the server ended: a program crashed, or the tracker is unreachable; restarting")
        time.sleep(_PAUSE_S)


def _begin() -> None:
    """Set up the server's process: register its processor, and end the process if a thread fails."""
    import tvm_ffi

    tvm_ffi.register_global_func(MACHINE, platform.machine, override=True)
    report = threading.excepthook

    def end(arguments: threading.ExceptHookArgs) -> None:
        report(arguments)
        os._exit(1)

    threading.excepthook = end


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m cdmpp.data.measure.board", description=__doc__)
    parser.add_argument("--tracker", required=True, metavar="HOST:PORT")
    parser.add_argument("--key", required=True, help="kind of board")
    parser.add_argument("--host", default="0.0.0.0", help="address to listen on")
    parser.add_argument("--port", type=int, default=9090, help="first port to try")
    options = parser.parse_args()
    # On SIGTERM the server's process must end too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    try:
        serve(options.tracker, options.key, options.host, options.port)
    except CdmppError as error:
        parser.error(f"{error.message}; {error.hint}")


if __name__ == "__main__":
    main()
