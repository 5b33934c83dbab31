"""Names under which the service answers.

A web page can let its own name point to the address of a service on the reader's machine or network, and would then be
allowed to read and write it. The service therefore accepts only its own names. Addresses are safe: a page cannot
rebind an address.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence

from starlette.types import Scope

from cdmpp_server.problems import ProblemError

_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
_EVERYWHERE = ("", "0.0.0.0", "::")


class Hosts:
    """The accepted names.

    Parameters
    ----------
    allowed : sequence of str, optional
        Names without port; ``*.example.com`` is every name below, ``*`` every name. Default: the names of the
        loopback address, and ``bound``; if that is every address, all addresses and the name of this machine.
    bound : str
        The address on which the service listens.
    """

    def __init__(self, allowed: Sequence[str] | None, bound: str) -> None:
        names = [_bracketed(name.lower()) for name in allowed or (*_LOOPBACK, bound)]
        self._addresses = allowed is None and bound in _EVERYWHERE
        if self._addresses:
            names.append(socket.gethostname().lower())
        self._names = frozenset(name for name in names if name)
        self._below = tuple(name[1:] for name in self._names if name.startswith("*."))
        self._every = "*" in self._names

    def check(self, scope: Scope) -> None:
        """Check the Host header of a request.

        Raises
        ------
        ProblemError
            421: it is none of the accepted names, is repeated, or is absent.
        """
        if self._every:
            return
        sent = [value for name, value in scope["headers"] if name == b"host"]
        host = sent[0].decode("latin-1").lower() if len(sent) == 1 else ""
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() and not host.endswith("]") else host
        if name in self._names or name.endswith(self._below) or (self._addresses and _is_address(name)):
            return
        raise ProblemError(
            "unknown_host",
            f"this service does not answer under the name {host[:200]!r}",
            "use its own name or address; the setting allowed_hosts (CDMPP_ALLOWED_HOSTS) lists its names",
        )


def _bracketed(name: str) -> str:
    return f"[{name}]" if ":" in name and not name.startswith("[") else name


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name[1:-1] if name.startswith("[") and name.endswith("]") else name)
    except ValueError:
        return False
    return True
