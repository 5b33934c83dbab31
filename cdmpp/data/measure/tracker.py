"""Client of TVM's RPC tracker: address and number of boards. It does not need TVM."""

from __future__ import annotations

import json
import socket
import struct
from dataclasses import dataclass

from cdmpp.errors import MeasurementError

_CONNECT_S = 5.0
_MAGIC = 0x2F271  # RPC_TRACKER_MAGIC
_SUMMARY = 6  # TrackerCode.SUMMARY
_BACK = "start it ({command}), then repeat the same command to resume"


@dataclass(frozen=True)
class Tracker:
    """Address of an RPC tracker, and the boards to request.

    Attributes
    ----------
    host : str
    port : int
    key : str
        Kind of board.
    priority : int
        Priority of the requests; the tracker serves higher ones first.
    wait_s : float
        Longest wait for a free board, in seconds; boards may be in use or restarting.
    patience_s : float
        Longest wait for the tracker, in seconds.
    """

    host: str
    port: int
    key: str
    priority: int = 1
    wait_s: float = 120.0
    patience_s: float = 10.0

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    def servers(self) -> int:
        """Return the number of servers with the key, busy or not.

        Raises
        ------
        MeasurementError
            The tracker does not respond.
        """
        # Not TVM's client, which retries for a minute; TVM is imported in workers only.
        try:
            with socket.create_connection((self.host, self.port), _CONNECT_S) as link:
                link.sendall(struct.pack("<i", _MAGIC))
                if struct.unpack("<i", _receive(link, 4))[0] != _MAGIC:
                    raise OSError("another service uses this port")
                request = json.dumps([_SUMMARY]).encode()
                link.sendall(struct.pack("<i", len(request)) + request)
                _, content = json.loads(_receive(link, struct.unpack("<i", _receive(link, 4))[0]))
                return sum(entry["key"] == f"server:{self.key}" for entry in content["server_info"])
        except (OSError, ValueError, KeyError, TypeError) as error:
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


def parse_tracker(text: str, key: str, priority: int = 1) -> Tracker:
    """Parse the address ``HOST:PORT`` of a tracker.

    Raises
    ------
    MeasurementError
        The text is not an address.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise MeasurementError(
            f"{text!r} is not the address of a tracker", hint="use HOST:PORT, as in --tracker 127.0.0.1:9190"
        )
    return Tracker(host.strip("[]"), int(port), key, priority)


def _receive(link: socket.socket, size: int) -> bytes:
    parts = b""
    while len(parts) < size:
        part = link.recv(size - len(parts))
        if not part:
            raise OSError("the connection was closed")
        parts += part
    return parts
