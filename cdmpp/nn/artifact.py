"""A trained model as a folder: ``model.safetensors`` and ``manifest.json``. No pickle.

The folder is written aside and renamed, so it is whole or not there. Loading checks the format, the
feature schema and the checksum before a tensor is used.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import load, save

from cdmpp.data.device_specs import resolve
from cdmpp.devices.loading import from_mapping
from cdmpp.devices.spec import DeviceSpec
from cdmpp.devices.table import table
from cdmpp.errors import ArtifactError, CdmppError
from cdmpp.features.schedule import SCHEDULE_HASH
from cdmpp.features.schema import SCHEMA_HASH
from cdmpp.nn.config import NetworkConfig
from cdmpp.nn.domain import Domain
from cdmpp.nn.inputs import QUESTION_COLUMNS, SUMMARY_COLUMNS
from cdmpp.nn.levels import LEVELS
from cdmpp.nn.weights import Weights

if TYPE_CHECKING:
    from cdmpp.nn.adapter import Adapter
    from cdmpp.nn.network import LatencyNetwork

FORMAT_VERSION = 1
TENSORS, MANIFEST = "model.safetensors", "manifest.json"
INPUT_HASH = hashlib.sha256(
    # "2": sustained rates and a floor by clock in the reference and the ratios.
    ",".join(("2", *SUMMARY_COLUMNS, *QUESTION_COLUMNS, *map(str, LEVELS))).encode()
).hexdigest()[:16]


@dataclass(frozen=True)
class Artifact:
    """A loaded model.

    Attributes
    ----------
    weights : Weights
        The network's; what predicts (``weights.engine()``) is made from them.
    devices : tuple of str
        Names of the training devices; device i has embedding i + 1. "" where a device was held out.
        :attr:`trained_devices` are their specifications.
    domain : Domain
        What was trained on, for the domain score.
    calibration : dict
        Factor on the width of an interval per domain label.
    manifest : dict
        Everything else that ``manifest.json`` says.
    adapter : Adapter, optional
        What measurements of one device change (:mod:`cdmpp.nn.adapter`).
    folder : Path, optional
        Where the model lies; of an adapted model, where its base lies.
    """

    weights: Weights
    devices: tuple[str, ...]
    domain: Domain
    calibration: dict[str, float]
    manifest: dict[str, Any]
    adapter: Adapter | None = None
    folder: Path | None = None

    @property
    def config(self) -> NetworkConfig:
        """Sizes of the network."""
        return self.weights.config

    @property
    def network(self) -> LatencyNetwork:
        """The network in torch, in evaluation mode: for training, tuning, and a look at its layers.

        Raises
        ------
        MissingDependencyError
            torch is not installed; predictions need none.
        """
        return self.weights.network

    @cached_property
    def device_specs(self) -> dict[str, DeviceSpec]:
        """Specifications of devices that no table knows: they came with the records or the adapter."""
        specs = {name: from_mapping(spec) for name, spec in self.manifest.get("device_specs", {}).items()}
        if self.adapter is not None:
            specs.setdefault(self.adapter.device.name, self.adapter.device)
        return specs

    def device(self, name: str) -> DeviceSpec:
        """A device by name: a known one, or one of the training devices.

        Raises
        ------
        UnknownDeviceError
            It is neither.
        """
        return resolve(name, self.device_specs)

    @cached_property
    def trained_devices(self) -> list[tuple[int, DeviceSpec]]:
        """Training devices that were not held out, with their index in the network's embedding."""
        specs = self.device_specs
        return [(i + 1, specs.get(name) or self.device(name)) for i, name in enumerate(self.devices) if name]

    @property
    def model_id(self) -> str:
        """Name and short hash of the model's content."""
        return str(self.manifest["model_id"])


def default_model() -> Path:
    """The model that ships with the package: in the wheel, or beside it in a checkout."""
    package = Path(__file__).parents[1]
    packed = package / "_models" / "base"
    return packed if packed.is_dir() else package.parent / "models" / "base"


def library_versions() -> dict[str, str]:
    """Versions that a model was made with."""
    found = {"python": platform.python_version()}
    for name in ("cdmpp", "torch", "numpy", "apache-tvm"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def save_artifact(
    folder: Path,
    network: LatencyNetwork,
    domain: Domain,
    *,
    name: str,
    devices: list[str],
    calibration: dict[str, float],
    details: dict[str, Any],
    extra: Mapping[str, bytes] | None = None,
    device_specs: Iterable[DeviceSpec] = (),
) -> dict[str, Any]:
    """Write a model folder, replacing an older one; returns the manifest.

    ``device_specs``: specifications of the devices; those that no table knows, and those with ceilings,
    are stored with the model.
    ``details`` (configuration, data fingerprint, metrics, ...) go into the manifest as they are. ``extra``
    are further files by name: they lie beside the model, with their checksums in the manifest.
    """
    extra = dict(extra or {})
    for file in extra:
        if file in (TENSORS, MANIFEST, "", ".", "..") or Path(file).name != file:
            raise ValueError(f"{file!r} is no name for a further file of a model folder")
    state = {k: v.detach().cpu().numpy() for k, v in network.state_dict().items()}
    tensors = {f"network.{k}": np.ascontiguousarray(v) for k, v in state.items()}
    tensors |= {f"domain.{k}": np.ascontiguousarray(v) for k, v in domain.tensors().items()}
    payload = save(tensors, {"format": "cdmpp"})
    digest = hashlib.sha256(payload).hexdigest()
    manifest = {
        "format_version": FORMAT_VERSION,
        "model_id": f"{name}-{digest[:12]}",
        "name": name,
        "feature_schema": SCHEMA_HASH,
        "input_schema": INPUT_HASH,
        **({"schedule_schema": SCHEDULE_HASH} if network.config.schedule else {}),
        "label": "log(latency_s / (flops / peak + bytes / bandwidth + protocol floor))",
        "network": network.config.model_dump(),
        "devices": devices,
        "device_specs": {
            spec.name: spec.model_dump(mode="json", exclude_none=True)
            for spec in device_specs
            if spec.name in devices and (spec.name not in table() or spec.sustained is not None)
        },
        "domain": domain.manifest(),
        "calibration": calibration,
        "libraries": library_versions(),
        "sha256": {TENSORS: digest, **{k: hashlib.sha256(v).hexdigest() for k, v in extra.items()}},
        **details,
    }
    text = json.dumps(manifest, indent=1, sort_keys=True) + "\n"
    write_folder(Path(folder), {TENSORS: payload, **extra, MANIFEST: text.encode()})
    return manifest


def write_folder(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write a model folder aside and rename it, replacing an older one.

    Raises
    ------
    ArtifactError
        It cannot be written.
    """
    aside = folder.with_name(folder.name + ".writing")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        for file, content in files.items():
            (aside / file).write_bytes(content)
        if folder.exists():
            old = folder.with_name(folder.name + ".old")
            shutil.rmtree(old, ignore_errors=True)
            os.replace(folder, old)
            os.replace(aside, folder)
            shutil.rmtree(old)
        else:
            os.replace(aside, folder)
    except OSError as error:
        raise ArtifactError(
            f"cannot write {folder}: {error.strerror or error}", hint="check the folder and its disk"
        ) from None


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def load_artifact(folder: str | os.PathLike[str]) -> Artifact:
    """Load a model folder: a trained model, or an adapted one on top of its base.

    Raises
    ------
    ArtifactError
        Missing or damaged files, another format or feature schema, a base that is not there.
    """
    from cdmpp.nn.adapter_files import load_adapted

    path = Path(folder)
    manifest = read_manifest(path)
    if manifest.get("kind") == "adapter":
        return load_adapted(path, manifest)
    if manifest.get("kind") == "reference":
        raise ArtifactError(
            f"{path} records a run of the original, a baseline", hint="train a model: configs/base.toml"
        )
    return _load_trained(path, manifest)


def read_manifest(path: Path) -> dict[str, Any]:
    """A model folder's manifest, checked for its format.

    Raises
    ------
    ArtifactError
        It is missing, no JSON, or of another format.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except OSError as error:
        raise no_model_folder(path, error) from None
    except ValueError as error:
        raise ArtifactError(f"{path / MANIFEST} is not JSON: {error}", hint="restore or retrain the model") from None
    if not isinstance(manifest, dict) or manifest.get("format_version") != FORMAT_VERSION:
        raise ArtifactError(
            f"{path} has another format than {FORMAT_VERSION}", hint="use the cdmpp version that made it, or retrain"
        )
    return manifest


def no_model_folder(path: Path, error: OSError) -> ArtifactError:
    """A file of the folder cannot be read."""
    return ArtifactError(
        f"{path} is not a model folder: {error.strerror} ({Path(error.filename or '').name})",
        hint=f"a model folder holds {TENSORS} and {MANIFEST}; train one with: cdmpp train --out DIR",
    )


def _load_trained(path: Path, manifest: dict[str, Any]) -> Artifact:
    try:
        payload = (path / TENSORS).read_bytes()
    except OSError as error:
        raise no_model_folder(path, error) from None
    for key, mine in (
        ("feature_schema", SCHEMA_HASH),
        ("input_schema", INPUT_HASH),
        ("schedule_schema", SCHEDULE_HASH),
    ):
        if key == "schedule_schema" and key not in manifest:
            continue  # the network does not read these columns
        if manifest.get(key) != mine:
            raise ArtifactError(
                f"{path} was trained on {key} {manifest.get(key)}, this version computes {mine}",
                hint="use the cdmpp version that made it, or retrain",
            )
    try:
        digests = manifest["sha256"]
        # The tensors have to be there; further files are reports, which a copy may leave out.
        further = [(file, _content(path / Path(file).name)) for file in digests if file != TENSORS]
        for file, found in ((TENSORS, payload), *further):
            if found is not None and hashlib.sha256(found).hexdigest() != digests[file]:
                raise ArtifactError(f"{path / file} does not match its checksum", hint="copy the model folder again")
        tensors = load(payload)
        weights = Weights(
            NetworkConfig(**manifest["network"]),
            len(manifest["devices"]),
            {k[8:]: v for k, v in tensors.items() if k.startswith("network.")},
        )
        domain = Domain.load({k[7:]: v for k, v in tensors.items() if k.startswith("domain.")}, manifest["domain"])
    except ArtifactError:
        raise
    except Exception as error:
        # Whatever a damaged or foreign file breaks (keys, shapes, header), it is the artifact's fault.
        raise ArtifactError(f"{path} is damaged: {error}", hint="copy the model folder again, or retrain") from None
    artifact = Artifact(weights, tuple(manifest["devices"]), domain, manifest["calibration"], manifest, folder=path)
    try:
        artifact.trained_devices  # noqa: B018 - looked up now, so that a model of unknown devices fails here
    except CdmppError as error:
        raise ArtifactError(f"{path}: {error}", hint="use the cdmpp version that made it, or retrain") from None
    return artifact
