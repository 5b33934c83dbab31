"""Who may ask, and how much: keys of which only hashes are kept, and rates.

Both are off until they are set. A key is 32 random bytes, which nobody can try out, so its plain SHA-256 is
enough; a password chosen by a person would need a slow hash.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import math
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated

from pydantic import BeforeValidator, Field

from cdmpp_server.problems import ProblemError


def _named(value: object) -> object:
    """A list of hashes is named by their beginnings."""
    if isinstance(value, list | tuple) and all(isinstance(hash, str) for hash in value):
        return {hash[:8]: hash for hash in value}
    return value


#: Name of a key (for logs) to the SHA-256 of the key; a list of hashes in settings is named by them.
KeyHashes = Annotated[
    dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")], Annotated[str, Field(pattern="^[0-9a-f]{64}$")]],
    BeforeValidator(_named),
]
_PREFIX = "cdmpp_"
# Longer ones are no key of ours, and hashing them would be work for nothing.
_MAX_KEY = 200


def new_key() -> tuple[str, str]:
    """A new key, and the hash to put into the settings."""
    key = _PREFIX + secrets.token_urlsafe(32)
    return key, hash_key(key)


def hash_key(key: str) -> str:
    """What is kept of a key."""
    return hashlib.sha256(key.encode()).hexdigest()


class Keys:
    """Keys that are accepted.

    Parameters
    ----------
    users, administrators : mapping of str to str
        Name to hash. An administrator's key is a user's key as well. Without users' keys everybody may ask.
    """

    def __init__(self, users: Mapping[str, str], administrators: Mapping[str, str]) -> None:
        self._known = [(name, hash, False) for name, hash in users.items()]
        self._known += [(name, hash, True) for name, hash in administrators.items()]
        self.required = bool(users)

    def __bool__(self) -> bool:
        return bool(self._known)

    def find(self, authorization: str | None) -> tuple[str | None, bool]:
        """Name of the sender's key and whether it is an administrator's; (None, False) without a known one.

        Every hash is compared, each in constant time: how long it takes says nothing about any of them.
        """
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not 0 < len(key) <= _MAX_KEY:
            return None, False
        sent = hashlib.sha256(key.strip().encode("utf-8", "surrogatepass")).hexdigest()
        found: tuple[str | None, bool] = (None, False)
        for name, hash, administrator in self._known:
            if hmac.compare_digest(sent, hash):
                found = (name, administrator or found[1])
        return found


def unauthorized() -> ProblemError:
    """What a request without a key that is known is told."""
    return ProblemError(
        "unauthorized",
        "this needs a key",
        "send Authorization: Bearer KEY",
        headers={"www-authenticate": 'Bearer realm="cdmpp"'},
    )


def forbidden() -> ProblemError:
    """What a user's key is told where an administrator's is needed."""
    return ProblemError(
        "forbidden", "this needs an administrator's key", "send a key whose hash is in admin_key_hashes"
    )


@dataclass
class _Bucket:
    requests: float
    items: float
    at: float


class Rates:
    """Token buckets for requests and items, one pair for each sender.

    Parameters
    ----------
    requests_per_s, items_per_s : float, optional
        Rates; None: no limit. One second's worth may come at once (at least one request).
    most : int
        Senders that are remembered; the one that asked least recently is forgotten first.
    clock : callable
        Seconds, monotonic.

    Notes
    -----
    How many items a request has is known when it was read, so they are charged afterwards: a sender may run
    into debt with one request and then waits until it is paid off.
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

        Raises
        ------
        ProblemError
            429: too many, with the seconds to wait.
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
                "too many requests or items from this sender",
                f"come back in {max(wait_s, 0.01):.2f} s",
                headers={"retry-after": str(math.ceil(wait_s))},
            )
        bucket.requests -= 1

    def charge(self, sender: str, items: int) -> None:
        """Charge the items of an answered request."""
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


def _refilled(level: float, rate: float, passed_s: float, most: float) -> float:
    return most if rate == math.inf else min(most, level + passed_s * rate)


def sender_of(key: str | None, address: str | None) -> str:
    """Whose rate a request counts for: its key's or its address's (IPv6: the network's, a host has many)."""
    return f"key {key}" if key is not None else _network(address)


@lru_cache(maxsize=4096)
def _network(address: str | None) -> str:
    try:
        parsed = ipaddress.ip_address(address or "")
    except ValueError:
        return "unknown"
    if parsed.version == 6:
        return str(ipaddress.ip_network((parsed, 64), strict=False))
    return str(parsed)
