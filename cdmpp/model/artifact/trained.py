"""A trained model as a folder: ``model.safetensors`` and ``manifest.json``. No pickle.

Loading checks the format, the feature schema and the checksums before it uses a tensor. A model's identity is a hash
of its tensors and of every field of the manifest that predictions depend on.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import load, save

from cdmpp.devices.registry import table
from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import ArtifactError, CdmppError
from cdmpp.features.schedule import SCHEDULE_HASH
from cdmpp.features.schema import SCHEMA_HASH
from cdmpp.model.artifact.folder import (
    BOOSTERS,
    FORMAT_VERSION,
    MANIFEST,
    SCHEDULED,
    TENSORS,
    TrainedManifest,
    check_fields,
    check_identity,
    check_seal,
    library_versions,
    no_model_folder,
    read_manifest,
    sealed,
    trained_identity,
    write_folder,
)
from cdmpp.model.artifact.model import Artifact
from cdmpp.model.boosters import Boosters
from cdmpp.model.collectives.store import read_model
from cdmpp.model.domain.score import Domain
from cdmpp.model.nn.config import LEVELS, NetworkConfig, UnsupportedOptionError
from cdmpp.model.nn.inputs import QUERY_COLUMNS, SUMMARY_COLUMNS
from cdmpp.model.nn.weights import Weights, network_columns
from cdmpp.utils.files import MAX_MODEL_BYTES, read_bytes

if TYPE_CHECKING:
    from cdmpp.model.nn.network import LatencyNetwork

INPUT_HASH = hashlib.sha256(
    # "2": the reference and the ratios use sustained rates and a floor that depends on the clock.
    ",".join(("2", *SUMMARY_COLUMNS, *QUERY_COLUMNS, *map(str, LEVELS))).encode()
).hexdigest()[:16]


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

    ``device_specs``: specifications of the devices; those outside the device table and those with ceilings are stored
    with the model. ``details``: further fields of the manifest (configuration, data fingerprint, metrics, ...).
    ``extra``: further files of the folder by name; the manifest has their checksums.
    """
    extra = dict(extra or {})
    for file in extra:
        if file in (TENSORS, MANIFEST, "", ".", "..") or Path(file).name != file:
            raise ValueError(f"{file!r} cannot be the name of a further file of a model folder")
    state = {k: v.detach().cpu().numpy() for k, v in network.state_dict().items()}
    tensors = {f"network.{k}": np.ascontiguousarray(v) for k, v in state.items()}
    tensors |= {f"domain.{k}": np.ascontiguousarray(v) for k, v in domain.tensors().items()}
    payload = save(tensors, {"format": "cdmpp"})
    digest = hashlib.sha256(payload).hexdigest()
    manifest = {
        "format_version": FORMAT_VERSION,
        "name": name,
        "feature_schema": SCHEMA_HASH,
        "input_schema": INPUT_HASH,
        **({"schedule_schema": SCHEDULE_HASH} if network.config.schedule else {}),
        "label": "log(latency_s / (flops / peak + bytes / bandwidth + protocol floor))",
        "network": asdict(network.config),
        "columns": network_columns(network.config),
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
    manifest = sealed({**manifest, "model_id": trained_identity(sealed(manifest))})
    text = json.dumps(manifest, indent=1, sort_keys=True) + "\n"
    write_folder(Path(folder), {TENSORS: payload, **extra, MANIFEST: text.encode()})
    return manifest


def _content(path: Path) -> bytes | None:
    try:
        return read_bytes(path, MAX_MODEL_BYTES)
    except FileNotFoundError:
        return None


def _network_config(path: Path, manifest: dict[str, Any]) -> NetworkConfig:
    try:
        return NetworkConfig.of_manifest(manifest["network"])
    except UnsupportedOptionError as error:
        raise ArtifactError(
            f"{path}: {error}",
            hint="load it with the cdmpp version that made it, or retrain the model without that option",
        ) from None


def load_trained(path: Path, manifest: dict[str, Any]) -> Artifact:
    """Load a trained model whose manifest was read; errors as of :func:`cdmpp.model.artifact.load.load_artifact`."""
    try:
        payload = read_bytes(path / TENSORS, MAX_MODEL_BYTES)
    except OSError as error:
        raise no_model_folder(path, error) from None
    for key, expected in (
        ("feature_schema", (SCHEMA_HASH,)),
        ("input_schema", (INPUT_HASH,)),
        ("schedule_schema", (SCHEDULE_HASH,)),
    ):
        if key == "schedule_schema" and key not in manifest:
            continue  # the network does not read schedule columns
        if manifest.get(key) not in expected:
            raise ArtifactError(
                f"{path} was trained on {key} {manifest.get(key)}, this version computes {' and '.join(expected)}",
                hint="use the cdmpp version that made it, or retrain",
            )
    check_fields(path, manifest, TrainedManifest)
    digests = manifest["sha256"]
    # The tensors and the boosters are required; further files are reports, which a copy may lack.
    contents = {file: _content(path / Path(file).name) for file in digests} | {TENSORS: payload}
    for file, content in contents.items():
        if content is None and file == BOOSTERS:
            raise no_model_folder(path, FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path / file)))
        if content is not None and hashlib.sha256(content).hexdigest() != digests[file]:
            raise ArtifactError(f"{path / file} does not match its checksum", hint="copy the model folder again")
    tensors = load(payload)
    weights = Weights(
        _network_config(path, manifest),
        len(manifest["devices"]),
        {k[8:]: v for k, v in tensors.items() if k.startswith("network.")},
    )
    domain = Domain.load({k[7:]: v for k, v in tensors.items() if k.startswith("domain.")}, manifest["domain"])
    identity = trained_identity(manifest)
    known = {**manifest, "model_id": identity}
    names, factors = tuple(manifest["devices"]), manifest["calibration"]
    artifact = Artifact(
        weights,
        names,
        domain,
        factors,
        known,
        folder=path,
        collectives=read_model(path),
        scheduled=_scheduled(path, manifest),
        boosters=Boosters.load(boosters) if (boosters := contents.get(BOOSTERS)) else None,
    )
    try:
        artifact.trained_devices  # noqa: B018 - looked up now, so that a model with unknown devices fails here
    except CdmppError as error:
        raise ArtifactError(f"{path}: {error}", hint="use the cdmpp version that made it, or retrain") from None
    check_identity(path, manifest, identity)
    return artifact


def _scheduled(path: Path, manifest: dict[str, Any]) -> Artifact | None:
    """The model for programs of backend ``tvm`` that the manifest names, if it names one."""
    named = manifest.get("scheduled")
    if not named:
        return None
    part = path / SCHEDULED
    inner = read_manifest(part)
    check_seal(part, inner)
    artifact = load_trained(part, inner)
    if artifact.model_id != named:
        raise ArtifactError(
            f"{part} is {artifact.model_id}, but {path} names {named}", hint="copy the model folder again"
        )
    return artifact
