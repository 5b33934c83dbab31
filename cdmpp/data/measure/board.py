"""``python -m cdmpp.data.measure.board``: TVM's RPC server, restarted after a crash; and a client of TVM's RPC tracker.

After a program has crashed in a session, TVM 0.27's ``tvm.exec.rpc_server`` keeps running but serves no more
sessions. This server ends and restarts instead, so that a crash costs one program and not the board. The client asks
the tracker for the number of boards and does not need TVM.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import signal
import socket
import struct
import sys
import threading
import time
from dataclasses import dataclass

from cdmpp.errors import CdmppError, MeasurementError

_CONNECT_S = 5.0
_MAGIC = 0x2F271  # RPC_TRACKER_MAGIC
_SUMMARY = 6  # TrackerCode.SUMMARY
_BACK = "start it ({command}), then repeat the same command to resume"
logger = logging.getLogger("cdmpp.board")
_PAUSE_S = 0.2
#: Function of the server that returns its processor, as `platform.machine`.
MACHINE = "cdmpp.data.measure.board.machine"


@dataclass(frozen=True)
class Tracker:
    """Address of an RPC tracker, and the boards to request."""

    host: str
    port: int
    key: str  # kind of board
    wait_s: float = 120.0  # longest wait for a free board; boards may be in use or restarting
    patience_s: float = 10.0  # longest wait for the tracker

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    def servers(self) -> int:
        """Return the number of servers with the key, busy or not."""
        # Not TVM's client, which retries for a minute; TVM is imported in workers only.
        try:
            with socket.create_connection((self.host, self.port), _CONNECT_S) as link, link.makefile("rb") as stream:
                link.sendall(struct.pack("<i", _MAGIC))
                if stream.read(4) != struct.pack("<i", _MAGIC):
                    raise OSError("another service uses this port")
                request = json.dumps([_SUMMARY]).encode()
                link.sendall(struct.pack("<i", len(request)) + request)
                _, content = json.loads(stream.read(*struct.unpack("<i", stream.read(4))))
                return sum(entry["key"] == f"server:{self.key}" for entry in content["server_info"])
        except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
            raise MeasurementError(
                f"no RPC tracker at {self}: {getattr(error, 'strerror', None) or error}",
                hint=_BACK.format(command="python -m tvm.exec.rpc_tracker"),
                transient=True,
            ) from None


def no_server(tracker: Tracker) -> MeasurementError:
    """Error for a key without servers."""
    return MeasurementError(
        f"the tracker at {tracker} has no server with the key {tracker.key!r}",
        hint=_BACK.format(command="python -m cdmpp.data.measure.board"),
        transient=True,
    )


def parse_tracker(text: str, key: str) -> Tracker:
    """Parse the address ``HOST:PORT`` of a tracker."""
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise MeasurementError(
            f"{text!r} is not the address of a tracker", hint="use HOST:PORT, as in --tracker 127.0.0.1:9190"
        )
    return Tracker(host.strip("[]"), int(port), key)


def serve(tracker: str, key: str, host: str = "0.0.0.0", port: int = 9090) -> None:
    """Serve until the process ends.

    ``tracker`` is ``HOST:PORT``, ``key`` the kind of board as ``cdmpp collect --key`` names it, ``host`` the address to
    listen on, ``port`` the first port to try; the next ninety-nine are tried too.
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
