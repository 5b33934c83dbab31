"""Devices seen before: by name for each model, and by the figures that were sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cdmpp.artifact.model import Artifact
from cdmpp.devices import DeviceSpec, from_mapping
from cdmpp_server.predict.cache import ByteLru
from cdmpp_server.predict.programs import words

#: What a specification and its place in the cache take, roughly.
_DEVICE_BYTES = 4000


@dataclass(frozen=True, eq=False)
class KnownDevice:
    """A specification, and what tells it from others: digest and name."""

    spec: DeviceSpec
    identity: tuple[str, str]


class Devices:
    """Turns a device as sent into its specification, once. Safe between threads."""

    def __init__(self, max_bytes: int = 2**23) -> None:
        self._kept: ByteLru[KnownDevice] = ByteLru(max_bytes)

    def known(self, sent: Any, artifact: Artifact) -> KnownDevice | None:
        """A device that was sent in these words before."""
        return self._kept.get(_key(sent, artifact))

    def find(self, sent: str | dict[str, Any], artifact: Artifact) -> KnownDevice:
        """The device of this name or with these figures.

        Raises
        ------
        UnknownDeviceError, InvalidDeviceError
            These are not remembered.
        """
        found = self.known(sent, artifact)
        if found is None:
            # By name and never load_device: a client's text is not a path on this machine.
            spec = artifact.device(sent) if isinstance(sent, str) else from_mapping(sent)
            found = KnownDevice(spec, (spec.digest(), spec.name))
            self._kept.put(_key(sent, artifact), found, _DEVICE_BYTES)
        return found


def _key(sent: Any, artifact: Artifact) -> Any:
    # What a name means is the model's matter, what figures mean is not.
    return (artifact.model_id, sent) if isinstance(sent, str) else words(sent)
