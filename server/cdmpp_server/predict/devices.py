"""Cache of devices: by name for each model, and by the figures of an inline specification."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cdmpp.devices import DeviceSpec
from cdmpp.devices.loading import resolve_device
from cdmpp.model.artifact.model import Artifact
from cdmpp.utils.lru import Lru
from cdmpp_server.predict.programs import exact_key

#: Memory of a specification and its cache entry, approximately.
_DEVICE_BYTES = 4000


@dataclass(frozen=True, eq=False)
class KnownDevice:
    """A specification with its digest and its part of a cache key, which are computed once."""

    spec: DeviceSpec
    digest: str
    cache_key: str


class Devices:
    """Looks up devices of requests. Safe to share between threads.

    Parameters
    ----------
    max_bytes : int
    """

    def __init__(self, max_bytes: int = 2**23) -> None:
        self._cache: Lru[KnownDevice] = Lru(max_bytes)

    def known(self, sent: Any, artifact: Artifact) -> KnownDevice | None:
        """A device that an earlier request sent in the same form."""
        return self._cache.get(_key(sent, artifact))

    def find(self, sent: str | dict[str, Any], artifact: Artifact) -> KnownDevice:
        """The device of this name or with these figures.

        Raises
        ------
        UnknownDeviceError, InvalidDeviceError
            Errors are not cached.
        """
        known = self.known(sent, artifact)
        if known is None:
            # By name and never load_device: a client's text must not be used as a path on this machine.
            spec = resolve_device(sent, artifact.device)
            known = KnownDevice(spec, spec.digest(), spec.cache_key())
            self._cache.put(_key(sent, artifact), known, _DEVICE_BYTES)
        return known


def _key(sent: Any, artifact: Artifact) -> Any:
    # The meaning of a name depends on the model, that of figures does not.
    return (artifact.model_id, sent) if isinstance(sent, str) else exact_key(sent)
