"""A loaded model: weights, training devices, domain, calibration, and an adapter if it has one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cdmpp.devices.loading import from_mapping
from cdmpp.devices.registry import lookup_board
from cdmpp.devices.spec import DeviceSpec
from cdmpp.model.adapter import Adapter
from cdmpp.model.boosters import Boosters
from cdmpp.model.collectives.model import CollectiveModel
from cdmpp.model.domain.score import Domain
from cdmpp.model.nn.config import NetworkConfig
from cdmpp.model.nn.weights import Weights

if TYPE_CHECKING:
    from cdmpp.model.nn.network import LatencyNetwork


@dataclass(frozen=True)
class Artifact:
    """A loaded model."""

    weights: Weights  # arrays of the network; :mod:`cdmpp.model.inference.engine` computes with them
    # Names of the training devices; device i has embedding i + 1. "" where a device was held out.
    # :attr:`trained_devices` gives their specifications.
    devices: tuple[str, ...]
    domain: Domain  # programs and contexts of the training set, for the domain score
    calibration: dict[str, float]  # factor on the width of an interval, by domain label
    manifest: dict[str, Any]  # content of ``manifest.json``
    adapter: Adapter | None = None  # correction fitted to measurements of one device
    folder: Path | None = None  # folder of the model; for an adapted model, folder of its base
    # the model of collectives in the folder; it is no part of the model's identity
    collectives: CollectiveModel | None = None
    # trained model in the folder that predicts the programs of backend ``tvm`` in place of this one
    scheduled: Artifact | None = None
    boosters: Boosters | None = None  # trees that correct the network for queries of the training rows' contexts

    @property
    def _parts(self) -> tuple[Artifact, ...]:
        return (self,) if self.scheduled is None else (self, self.scheduled)

    @property
    def leaf_width(self) -> int:
        """Columns of a leaf that the networks read."""
        return max(part.config.stored_width for part in self._parts)

    @property
    def reads_schedules(self) -> bool:
        """Whether a network reads the schedule's columns of programs given as TIR."""
        return any(part.config.schedule for part in self._parts)

    def part(self, *, scheduled: bool) -> Artifact:
        """The network that predicts programs of backend ``tvm``, or all others, with the adapter if it corrects it."""
        whole = self.scheduled if scheduled and self.scheduled is not None else self
        corrects = self.adapter is not None and self.adapter.scheduled == (whole is not self)
        return replace(whole, adapter=self.adapter if corrects else None)

    @cached_property
    def contexts(self) -> frozenset[str]:
        """Contexts of the training set, of all parts."""
        return frozenset().union(*(part.domain.contexts for part in self._parts))

    @cached_property
    def device_names(self) -> tuple[str, ...]:
        """Names of the training devices, of all parts, without those held out."""
        return tuple(dict.fromkeys(name for part in self._parts for name in part.devices if name))

    @property
    def config(self) -> NetworkConfig:
        """Sizes and options of the network."""
        return self.weights.config

    @property
    def network(self) -> LatencyNetwork:
        """The network in torch, in evaluation mode, for training and inspection. Predictions do not need it."""
        return self.weights.network

    @cached_property
    def device_specs(self) -> dict[str, DeviceSpec]:
        """Specifications of devices that the device table lacks; the records or the adapter supplied them."""
        specs = {name: from_mapping(spec) for name, spec in self.manifest.get("device_specs", {}).items()}
        if self.scheduled is not None:
            specs = self.scheduled.device_specs | specs
        if self.adapter is not None:
            specs.setdefault(self.adapter.device.name, self.adapter.device)
        corrected = self.manifest.get("collectives")
        if corrected is not None:
            device = from_mapping(corrected["device"])
            specs.setdefault(device.name, device)
        return specs

    def device(self, name: str) -> DeviceSpec:
        """Specification of a known device or a training device by its name; a short name is its commonest board."""
        return lookup_board(name, self.device_specs)

    @cached_property
    def trained_devices(self) -> list[tuple[int, DeviceSpec]]:
        """Training devices that were not held out: index in the network's embedding, and specification."""
        specs = self.device_specs
        return [(i + 1, specs.get(name) or self.device(name)) for i, name in enumerate(self.devices) if name]

    @property
    def model_id(self) -> str:
        """Name and short hash of the model's content."""
        return str(self.manifest["model_id"])
