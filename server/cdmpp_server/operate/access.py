"""Who may use the service: API keys, stored as hashes, rate limits, and the names under which the service answers.

A key is 32 random bytes and cannot be guessed, so a plain SHA-256 is enough. A password chosen by a person
would need a slow hash.

A web page can let its own name point to the address of a service on the reader's machine or network, and would then be
allowed to read and write it. The service therefore accepts only its own names. Addresses are safe: a page cannot
rebind an address.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import math
import secrets
import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache

from starlette.types import Scope

from cdmpp_server.problems import ProblemError

_PREFIX = "cdmpp_"
# Longer texts are not valid keys and are not hashed.
_MAX_KEY = 200
#: Sender of the current request (:func:`sender_of`), between whom the queue is shared.
current_sender: ContextVar[str] = ContextVar("current_sender", default="")


def new_key() -> tuple[str, str]:
    """Create a key; return it and its hash for the settings."""
    key = _PREFIX + secrets.token_urlsafe(32)
    return key, hash_key(key)


def hash_key(key: str) -> str:
    """Return the hash of a key, as stored in the settings."""
    return hashlib.sha256(key.encode()).hexdigest()


class Keys:
    """The accepted keys.

    ``users``, ``administrators``: mapping of name to hash. An administrator's key is also accepted as a user's key.
    Without users' keys, requests need no key.
    """

    def __init__(self, users: Mapping[str, str], administrators: Mapping[str, str]) -> None:
        self._known = [(name, hash, False) for name, hash in users.items()]
        self._known += [(name, hash, True) for name, hash in administrators.items()]
        self.required = bool(users)

    def __bool__(self) -> bool:
        return bool(self._known)

    def find(self, authorization: str | None) -> tuple[str | None, bool]:
        """Return the name of the sender's key and whether it is an administrator's; (None, False) if unknown.

        All hashes are compared in constant time, so that the duration reveals nothing about them.
        """
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not 0 < len(key) <= _MAX_KEY:
            return None, False
        sent = hashlib.sha256(key.strip().encode("utf-8", "surrogatepass")).hexdigest()
        match: tuple[str | None, bool] = (None, False)
        for name, hash, administrator in self._known:
            if hmac.compare_digest(sent, hash):
                match = (name, administrator or match[1])
        return match


def unauthorized() -> ProblemError:
    """Problem of a request without a known key (401)."""
    return ProblemError(
        "unauthorized",
        "this endpoint needs a key",
        "send Authorization: Bearer KEY",
        headers={"www-authenticate": 'Bearer realm="cdmpp"'},
    )


def forbidden() -> ProblemError:
    """Problem of a user's key at an administrator's endpoint (403)."""
    return ProblemError(
        "forbidden", "this endpoint needs an administrator's key", "send a key whose hash is in admin_key_hashes"
    )


@dataclass
class _Bucket:
    requests: float
    items: float
    at: float


class Rates:
    """Token buckets for requests and items, one pair per sender.

    The number of items is known only after the request was read. It is charged then, before the work. One request may
    make the balance negative; further requests are then refused until it is positive again.

    ``requests_per_s``, ``items_per_s``: rates; None: no limit. A burst may use the rate of one second (at least one
    request). ``most``: maximum number of senders in memory; the least recently active one is removed first.
    """

    def __init__(
        self,
        requests_per_s: float | None,
        items_per_s: float | None,
        most: int = 10_000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._request_rate = requests_per_s if requests_per_s is not None else math.inf
        self._item_rate = items_per_s if items_per_s is not None else math.inf
        self._most, self._clock = most, clock
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()

    def __bool__(self) -> bool:
        return min(self._request_rate, self._item_rate) < math.inf

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, sender: str) -> None:
        """Charge one request.

        Raises ProblemError: 429 with the seconds to wait, if a rate is exceeded.
        """
        bucket = self._bucket(sender)
        wait_s = 0.0
        if bucket.requests < 1:
            wait_s = (1 - bucket.requests) / self._request_rate
        if bucket.items <= 0 and self._item_rate < math.inf:
            wait_s = max(wait_s, (1 - bucket.items) / self._item_rate)
        if wait_s > 0:
            raise ProblemError(
                "rate_limited",
                "this sender exceeds its rate of requests or items",
                f"retry in {max(wait_s, 0.01):.2f} s",
                headers={"retry-after": str(math.ceil(wait_s))},
            )
        bucket.requests -= 1

    def charge(self, sender: str, items: int) -> None:
        """Charge the items of a request."""
        if items and self._item_rate < math.inf:
            self._bucket(sender).items -= items

    def _bucket(self, sender: str) -> _Bucket:
        now = self._clock()
        bucket = self._buckets.get(sender)
        if bucket is None:
            bucket = _Bucket(max(1.0, self._request_rate), self._item_rate, now)
            self._buckets[sender] = bucket
            if len(self._buckets) > self._most:
                self._buckets.popitem(last=False)
        else:
            self._buckets.move_to_end(sender)
            passed_s, bucket.at = now - bucket.at, now
            bucket.requests = _refilled(bucket.requests, self._request_rate, passed_s, max(1.0, self._request_rate))
            bucket.items = _refilled(bucket.items, self._item_rate, passed_s, self._item_rate)
        return bucket


def _refilled(level: float, rate: float, passed_s: float, capacity: float) -> float:
    return capacity if rate == math.inf else min(capacity, level + passed_s * rate)


def sender_of(key: str | None, address: str | None) -> str:
    """Return the sender that a request is charged to: its key, its IPv4 address or its IPv6 /64 network."""
    return f"key {key}" if key is not None else _network(address)


def sender_id() -> str:
    """Return the sender of the current request as 32 hexadecimal digits, for the database and for file names."""
    return hashlib.sha256(current_sender.get().encode()).hexdigest()[:32]


@lru_cache(maxsize=4096)
def _network(address: str | None) -> str:
    try:
        parsed = ipaddress.ip_address(address or "")
    except ValueError:
        return "unknown"
    if parsed.version == 6:
        return str(ipaddress.ip_network((parsed, 64), strict=False))
    return str(parsed)


_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
_EVERYWHERE = ("", "0.0.0.0", "::")


class Hosts:
    """The accepted names.

    ``allowed``: names without port; ``*.example.com`` is every name below, ``*`` every name. Default: the names of the
    loopback address, and ``bound``; if that is every address, all addresses and the name of this machine. ``bound``:
    the address on which the service listens.
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

        Raises ProblemError: 421 if it is none of the accepted names, is repeated, or is absent.
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
