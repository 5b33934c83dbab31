"""A loaded model: weights, training devices, domain, calibration, and an adapter if it has one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cdmpp.adapter.adapter import Adapter
from cdmpp.collectives.model import CollectiveModel
from cdmpp.data.device_specs import resolve
from cdmpp.devices.loading import from_mapping
from cdmpp.devices.registry import commonest
from cdmpp.devices.spec import DeviceSpec
from cdmpp.domain.score import Domain
from cdmpp.errors import UnknownDeviceError
from cdmpp.nn.config import NetworkConfig
from cdmpp.nn.weights import Weights

if TYPE_CHECKING:
    from cdmpp.nn.network import LatencyNetwork


@dataclass(frozen=True)
class Artifact:
    """A loaded model.

    Attributes
    ----------
    weights : Weights
        Arrays of the network; :mod:`cdmpp.inference.engine` computes with them.
    devices : tuple of str
        Names of the training devices; device i has embedding i + 1. "" where a device was held out.
        :attr:`trained_devices` gives their specifications.
    domain : Domain
        Programs and contexts of the training set, for the domain score.
    calibration : dict
        Factor on the width of an interval, by domain label.
    manifest : dict
        Content of ``manifest.json``.
    adapter : Adapter, optional
        Correction fitted to measurements of one device.
    folder : Path, optional
        Folder of the model; for an adapted model, folder of its base.
    collectives : CollectiveModel, optional
        The model of collectives in the folder. It is no part of the model's identity.
    """

    weights: Weights
    devices: tuple[str, ...]
    domain: Domain
    calibration: dict[str, float]
    manifest: dict[str, Any]
    adapter: Adapter | None = None
    folder: Path | None = None
    collectives: CollectiveModel | None = None

    @property
    def config(self) -> NetworkConfig:
        """Sizes and options of the network."""
        return self.weights.config

    @property
    def network(self) -> LatencyNetwork:
        """The network in torch, in evaluation mode, for training, tuning and inspection.

        Raises
        ------
        MissingDependencyError
            torch is not installed. Predictions do not need it.
        """
        return self.weights.network

    @cached_property
    def device_specs(self) -> dict[str, DeviceSpec]:
        """Specifications of devices that the device table lacks; the records or the adapter supplied them."""
        specs = {name: from_mapping(spec) for name, spec in self.manifest.get("device_specs", {}).items()}
        if self.adapter is not None:
            specs.setdefault(self.adapter.device.name, self.adapter.device)
        corrected = self.manifest.get("collectives")
        if corrected is not None:
            device = from_mapping(corrected["device"])
            specs.setdefault(device.name, device)
        return specs

    def device(self, name: str) -> DeviceSpec:
        """Specification of a known device or a training device by its name; a short name is its commonest board.

        Raises
        ------
        UnknownDeviceError
            No known device and no training device has this name.
        """
        try:
            return resolve(name, self.device_specs)
        except UnknownDeviceError:
            board = commonest(name)
            if board is None:
                raise
            return board

    @cached_property
    def trained_devices(self) -> list[tuple[int, DeviceSpec]]:
        """Training devices that were not held out: index in the network's embedding, and specification."""
        specs = self.device_specs
        return [(i + 1, specs.get(name) or self.device(name)) for i, name in enumerate(self.devices) if name]

    @property
    def model_id(self) -> str:
        """Name and short hash of the model's content."""
        return str(self.manifest["model_id"])
