"""Loading a model folder: a trained model, or an adapted model with its base.

An adapted model is a folder with ``adapter.safetensors`` and ``manifest.json``, on top of its base. The manifest names
the base by identity and checksum. The base is searched at its path relative to the adapter, at its absolute path when
the adapter was written, and as the model that ships with the package. It is not copied.

A model whose collectives are corrected by measurements of one device is a folder with only ``manifest.json``. The
manifest holds the measurements; the correction is computed again when it is loaded. The network of the base model is
not changed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from safetensors.numpy import load, save

from cdmpp.devices.loading import from_mapping
from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import ArtifactError, MissingDependencyError
from cdmpp.model.adapter import NUMERIC, Adapter, Names, ResidualProcess
from cdmpp.model.artifact.folder import (
    FORMAT_VERSION,
    MANIFEST,
    SEAL,
    TENSORS,
    AdapterManifest,
    TrainedManifest,
    check_fields,
    check_identity,
    check_seal,
    default_model,
    library_versions,
    no_model_folder,
    read_manifest,
    sealed,
    trained_identity,
    write_folder,
)
from cdmpp.model.artifact.model import Artifact
from cdmpp.model.artifact.trained import load_trained
from cdmpp.model.collectives.context import STORED_FIELDS, CollectiveContext
from cdmpp.model.collectives.model import CollectiveModel
from cdmpp.model.collectives.residual import Correction
from cdmpp.model.collectives.store import read_model
from cdmpp.utils.files import MAX_MODEL_BYTES, read_bytes

ADAPTER = "adapter.safetensors"


def adapted(base: Artifact, adapter: Adapter) -> Artifact:
    """A base model with an adapter, in memory."""
    payload = _payload(adapter)
    return _on_top(base, adapter, _identity(base, adapter, payload))


def save_adapted(folder: str | os.PathLike[str], artifact: Artifact) -> dict[str, Any]:
    """Write an adapted model's folder, replacing an older one; returns its manifest.

    Raises ArtifactError where the model has no adapter, its base no folder, or the folder cannot be written.
    """
    path, adapter = Path(folder), artifact.adapter
    if adapter is None:
        raise ArtifactError("the model is not adapted: nothing to save", hint="adapt it first")
    where = check_target(path, artifact)
    payload = _payload(adapter)
    manifest = {
        "format_version": FORMAT_VERSION,
        "kind": "adapter",
        "model_id": artifact.model_id,
        "base": {
            "model_id": artifact.manifest["base"]["model_id"],
            "sha256": artifact.manifest["base"]["sha256"],
            "path": os.path.relpath(where, path.resolve()),
            "was": str(where),
        },
        "device": adapter.device.model_dump(mode="json", exclude_none=True),
        "process": adapter.process.manifest(),
        "numeric": list(NUMERIC),
        "names": asdict(adapter.names),
        "weight": adapter.weight,
        "width": adapter.width,
        "scheduled": adapter.scheduled,
        "report": adapter.report,
        "libraries": library_versions(),
        "sha256": {ADAPTER: hashlib.sha256(payload).hexdigest()},
    }
    manifest = sealed(manifest)
    text = json.dumps(manifest, indent=1, sort_keys=True, allow_nan=False) + "\n"
    write_folder(path, {ADAPTER: payload, MANIFEST: text.encode()})
    return manifest


def load_adapted(path: Path, manifest: dict[str, Any]) -> Artifact:
    """Load an adapted model, whose manifest was read, with its base.

    Raises ArtifactError where the base is missing or has another checksum, or a file is missing or damaged.
    """
    try:
        payload = read_bytes(path / ADAPTER, MAX_MODEL_BYTES)
    except OSError as error:
        raise no_model_folder(path, error) from None
    check_fields(path, manifest, AdapterManifest)
    if hashlib.sha256(payload).hexdigest() != manifest["sha256"][ADAPTER]:
        raise ArtifactError(f"{path / ADAPTER} does not match its checksum", hint="copy the model folder again")
    return on_base(load_base(path, manifest), payload, manifest, path)


def load_base(path: Path, manifest: dict[str, Any]) -> Artifact:
    """The base model that the manifest of an adapted model names; ArtifactError where it is missing or another one."""
    folder, base_manifest = _base(path, manifest)
    return load_trained(folder, base_manifest)


def on_base(base: Artifact, payload: bytes, manifest: dict[str, Any], path: Path) -> Artifact:
    """An adapted model from the content of its two files (``path`` in messages), on a base that is loaded already.

    Raises ArtifactError for an adapter of another base, or one that another version wrote.
    """
    if manifest["numeric"] != list(NUMERIC):
        raise ArtifactError(f"{path} was adapted with other features", hint="adapt again with this version of cdmpp")
    if manifest.get("tuned"):
        raise ArtifactError(f"{path} has tuned weights, which this version does not read", hint="adapt again")
    tensors = load(payload)
    process = {k[8:]: v for k, v in tensors.items() if k.startswith("process.")}
    adapter = Adapter(
        device=from_mapping(manifest["device"]),
        process=ResidualProcess.load(process, manifest["process"]),
        names=Names(**{k: tuple(v) for k, v in manifest["names"].items()}),
        weight=float(manifest["weight"]),
        width=float(manifest["width"]),
        report=manifest["report"],
        scheduled=bool(manifest.get("scheduled", False)),
    )
    identity = _identity(base, adapter, payload)
    check_identity(path, manifest, identity)
    return _on_top(base, adapter, identity)


def without_adapter(artifact: Artifact) -> Artifact:
    """The base model of an adapted model; a base model itself."""
    if artifact.adapter is None:
        return artifact
    added = ("base", "adapted_device", "adapter")
    manifest = {name: value for name, value in artifact.manifest.items() if name not in added}
    return replace(artifact, manifest=manifest | {"model_id": artifact.manifest["base"]["model_id"]}, adapter=None)


def check_target(path: Path, artifact: Artifact) -> Path:
    """Folder of the base, if an adapted model may be written to ``path``.

    Raises ArtifactError where ``path`` holds something other than an adapted model, the base has no folder, or they are
    equal.
    """
    if artifact.folder is None:
        raise ArtifactError(
            "the base model was not loaded from a folder, so the adapter cannot refer to it",
            hint="save the base, load it, and adapt that",
        )
    where = artifact.folder.resolve()
    if path.resolve() == where:
        raise ArtifactError(f"{path} is the base model itself", hint="choose another folder")
    if path.exists() and not _replaceable(path):
        raise ArtifactError(
            f"{path} exists and is not an adapted model; it would be overwritten", hint="choose another folder"
        )
    return where


def _replaceable(path: Path) -> bool:
    """An adapted model, or an empty folder."""
    if (path / MANIFEST).is_file():
        return read_manifest(path).get("kind") in ("adapter", "collectives")
    return path.is_dir() and not any(path.iterdir())


def base_identity(base: Artifact) -> dict[str, str]:
    """Fields that identify a base model."""
    return {"model_id": base.model_id, "sha256": base.manifest["sha256"][TENSORS]}


def _base(path: Path, manifest: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
    """Return the first folder that contains the base model, and its manifest."""
    named = manifest["base"]
    places = [path / named["path"], Path(named["was"]), default_model()]
    other_folder, fault = "", cast(ArtifactError | None, None)
    for place in places:
        if not (place / MANIFEST).is_file():
            continue
        try:
            base = read_manifest(place)
            check_seal(place, base)
            check_fields(place, base, TrainedManifest)
        except ArtifactError as error:
            fault = fault or error
            continue
        # Manifests without a checksum name their base by an identity that covered its tensors only.
        same = trained_identity(base) == named["model_id"]
        if same or (SEAL not in manifest and base["sha256"][TENSORS] == named["sha256"]):
            return place, base
        other_folder = other_folder or str(place)
    if fault is not None:
        raise fault
    other = f"; {other_folder} is another model" if other_folder else ""
    raise ArtifactError(
        f"{path} is an adapter of {named['model_id']}, which is not at {named['path']}{other}",
        hint="put the base model back there, or adapt the model that you have",
    )


def _payload(adapter: Adapter) -> bytes:
    tensors = {f"process.{name}": value for name, value in adapter.process.tensors().items()}
    payload: bytes = save({name: np.ascontiguousarray(value) for name, value in tensors.items()})
    return payload


def _identity(base: Artifact, adapter: Adapter, payload: bytes) -> str:
    digest = hashlib.sha256(payload)
    figures = [adapter.process.manifest(), float(adapter.weight), float(adapter.width), asdict(adapter.names)]
    figures += ["scheduled"] if adapter.scheduled else []
    digest.update(json.dumps(figures).encode())
    digest.update((base.model_id + adapter.device.digest()).encode())
    return f"{base.model_id}+{adapter.device.name}-k{len(adapter.process)}-{digest.hexdigest()[:8]}"


def _on_top(base: Artifact, adapter: Adapter, model_id: str) -> Artifact:
    further = {"base": base_identity(base), "adapted_device": adapter.device.name, "adapter": adapter.report}
    return replace(base, manifest={**base.manifest, "model_id": model_id, **further}, adapter=adapter)


#: ``kind`` in the manifest of such a folder.
KIND = "collectives"


def collectives_of(artifact: Artifact) -> CollectiveModel | None:
    """The model of collectives of a model folder; the one that ships with the package where the folder has none."""
    return artifact.collectives or read_model(default_model())


def corrected(
    base: Artifact,
    device: DeviceSpec,
    contexts: Sequence[CollectiveContext],
    bytes_: Sequence[float],
    seconds: Sequence[float],
    weight: float,
    report: dict[str, Any],
) -> Artifact:
    """A base model with its collectives corrected by k measurements, in memory.

    ``weight``: share of the correction that is applied. Raises ArtifactError where the base has no model of
    collectives.
    """
    model = collectives_of(base)
    if model is None:
        raise ArtifactError(
            f"{base.model_id} has no model of collectives", hint="fit one: python -m cdmpp.train.collectives"
        )
    correction = Correction.fit(model, contexts, np.array(bytes_), np.array(seconds), weight)
    rows = [[*context.stored, size, time] for context, size, time in zip(contexts, bytes_, seconds, strict=True)]
    content = {"device": device.model_dump(mode="json", exclude_none=True), "rows": rows, "weight": weight}
    digest = hashlib.sha256(json.dumps([base.model_id, content], sort_keys=True).encode()).hexdigest()
    model_id = f"{base.model_id}+{device.name}-collectives-k{len(rows)}-{digest[:8]}"
    further = {"model_id": model_id, "base": base_identity(base), "adapted_device": device.name, "adapter": report}
    manifest = {**base.manifest, **further, KIND: content}
    return replace(base, manifest=manifest, collectives=model.corrected(correction, device))


def save_corrected(folder: Path, artifact: Artifact) -> dict[str, Any]:
    """Write the folder of a model with corrected collectives; returns its manifest.

    Raises ArtifactError where the base has no folder, or the folder cannot be written or holds something else.
    """
    where = check_target(folder, artifact)
    manifest = sealed(
        {
            "format_version": FORMAT_VERSION,
            "kind": KIND,
            "model_id": artifact.model_id,
            "base": {**artifact.manifest["base"], "path": os.path.relpath(where, folder.resolve()), "was": str(where)},
            KIND: artifact.manifest[KIND],
            "report": artifact.manifest["adapter"],
            "libraries": library_versions(),
        }
    )
    text = json.dumps(manifest, indent=1, sort_keys=True, allow_nan=False) + "\n"
    write_folder(folder, {MANIFEST: text.encode()})
    return manifest


def load_corrected(path: Path, manifest: dict[str, Any]) -> Artifact:
    """Load a model with corrected collectives, whose manifest was read, with its base.

    Raises ArtifactError where the base is missing or another one, or the manifest is damaged.
    """
    content = manifest[KIND]
    width = STORED_FIELDS
    contexts = [CollectiveContext(*row[:width]) for row in content["rows"]]
    bytes_, seconds = ([float(row[width + i]) for row in content["rows"]] for i in (0, 1))
    device = from_mapping(content["device"])
    made = corrected(
        load_base(path, manifest), device, contexts, bytes_, seconds, float(content["weight"]), manifest["report"]
    )
    check_identity(path, manifest, made.model_id)
    return made


def load_artifact(folder: str | os.PathLike[str]) -> Artifact:
    """Load a model folder: a trained model, or an adapted model with its base.

    Raises ArtifactError where a file is missing or damaged, the format or a feature schema differs, the network has an
    option that this version does not have, or the base of an adapted model is missing.
    """
    path = Path(folder)
    try:
        manifest = read_manifest(path)
        check_seal(path, manifest)
        if manifest.get("kind") == "adapter":
            return load_adapted(path, manifest)
        if manifest.get("kind") == KIND:
            return load_corrected(path, manifest)
        if manifest.get("kind") == "reference":
            raise ArtifactError(
                f"{path} records a training run of the original network, which is a baseline and makes no predictions",
                hint="train a model with: cdmpp train --config configs/base.toml",
            )
        return load_trained(path, manifest)
    except (ArtifactError, MissingDependencyError):
        raise
    except Exception as error:
        # A damaged or foreign file can fail in many ways (keys, shapes, header); all are faults of the folder.
        reason = str(error) or type(error).__name__
        raise ArtifactError(
            f"{path} is damaged: {reason[:500]}", hint="copy the model folder again, retrain or adapt again"
        ) from None
