"""Files of a model folder: names, manifest, identity, and writing that leaves a whole folder or none."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cdmpp.errors import ArtifactError
from cdmpp.utils.files import MAX_REQUEST_BYTES, parse_json, read_bytes

FORMAT_VERSION = 1
TENSORS, MANIFEST = "model.safetensors", "manifest.json"
#: File of :class:`cdmpp.model.boosters.Boosters`, where a model has some.
BOOSTERS = "boosters.safetensors"
#: File of the full error table; the manifest has a summary.
ERROR_TABLE = "errors.json"
#: Folder in a model folder: a trained model that predicts the programs of backend ``tvm``.
SCHEDULED = "scheduled"


def default_model() -> Path:
    """Folder of the model that ships with the package: in the wheel, or beside the package in a checkout."""
    package = Path(__file__).parents[2]
    packed = package / "_models" / "base"
    return packed if packed.is_dir() else package.parent / "models" / "base"


def library_versions() -> dict[str, str]:
    """Versions of Python and of the libraries that determine a model, for its manifest."""
    versions = {"python": platform.python_version()}
    for name in ("cdmpp", "torch", "numpy", "apache-tvm"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def write_folder(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write a model folder beside its target, then rename it over an older one. A symbolic link is followed.

    Raises ArtifactError where the folder cannot be written, or a file has its name.
    """
    folder = Path(os.path.realpath(folder))
    if folder.exists() and not folder.is_dir():
        raise ArtifactError(f"cannot write {folder}: it is not a folder", hint="name a new or an existing folder")
    aside = folder.with_name(folder.name + ".writing")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        for file, content in files.items():
            (aside / file).write_bytes(content)
        swap_folder(folder, aside)
    except OSError as error:
        raise cannot_write(folder, error) from None


def swap_folder(folder: Path, aside: Path) -> None:
    """Put a complete folder in the place of another one, which may not exist yet."""
    if folder.exists():
        old = folder.with_name(folder.name + ".old")
        shutil.rmtree(old, ignore_errors=True)
        os.replace(folder, old)
        os.replace(aside, folder)
        shutil.rmtree(old)
    else:
        os.replace(aside, folder)


def replace_files(folder: Path, manifest: Mapping[str, Any], files: Mapping[str, bytes | Path]) -> dict[str, Any]:
    """Change the manifest and some files of a trained model's folder, which is written aside and renamed.

    ``manifest``: the new one; the checksums of the files and the model's identity are computed here. ``files``: content
    by name; a path is the folder to copy. Returns the manifest as written.
    """
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in files.items() if isinstance(content, bytes)}
    manifest = {**manifest, "sha256": manifest["sha256"] | sums}
    manifest = sealed({**manifest, "model_id": trained_identity(manifest)})
    aside = folder.with_name(folder.name + ".writing")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        shutil.copytree(folder, aside, ignore=shutil.ignore_patterns(*files))
        for name, content in files.items():
            if isinstance(content, bytes):
                (aside / name).write_bytes(content)
            else:
                shutil.copytree(content, aside / name)
        (aside / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        swap_folder(folder, aside)
    except OSError as error:
        raise cannot_write(folder, error) from None
    return manifest


def cannot_write(folder: Path, error: OSError) -> ArtifactError:
    """The error for a folder that cannot be written."""
    return ArtifactError(f"cannot write {folder}: {error.strerror or error}", hint="check the folder and its disk")


def read_manifest(path: Path) -> dict[str, Any]:
    """Manifest of a model folder; ArtifactError where it is missing, is not JSON, or has another format version."""
    try:
        manifest = parse_json(read_bytes(path / MANIFEST, MAX_REQUEST_BYTES))
    except OSError as error:
        raise no_model_folder(path, error) from None
    except ValueError as error:
        raise ArtifactError(f"{path / MANIFEST} is not JSON: {error}", hint="restore or retrain the model") from None
    if not isinstance(manifest, dict) or manifest.get("format_version") != FORMAT_VERSION:
        raise ArtifactError(
            f"{path} has another format than {FORMAT_VERSION}",
            hint="use the cdmpp version that made it, or retrain the model",
        )
    return manifest


def no_model_folder(path: Path, error: OSError) -> ArtifactError:
    """Error for a folder of which a file cannot be read."""
    return ArtifactError(
        f"{path} is not a model folder: {error.strerror} ({Path(error.filename or '').name})",
        hint=f"a model folder holds {TENSORS} and {MANIFEST}; train one with: cdmpp train --out DIR",
    )


#: Field with the SHA-256 of all other fields. Folders of versions up to 0.1.0 lack it.
SEAL = "manifest_sha256"
#: Fields of a trained model's manifest on which its predictions depend.
_PREDICTING = (
    "feature_schema",
    "input_schema",
    "schedule_schema",
    "network",
    "devices",
    "device_specs",
    "domain",
    "calibration",
    "scheduled",
)

_Factor = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]
_Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class _Fields(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)


class _Domain(_Fields):
    reach: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    contexts: list[str]
    slow_kernels: dict[str, _Factor] = {}
    fast_kernels: dict[str, Annotated[float, Field(gt=0, le=1)]] = {}
    host_bound: list[str] = []


class _Calibration(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    inside: Annotated[_Factor, Field(alias="in")]
    near: _Factor
    out: _Factor
    open: Annotated[float, Field(ge=1, le=1e6, allow_inf_nan=False)] = 1.0


class TrainedManifest(_Fields):
    """Fields that a trained model's manifest must have; reports may follow."""

    name: str
    label: str
    feature_schema: str
    libraries: dict[str, Any]
    network: dict[str, Any]
    devices: list[str]
    device_specs: dict[str, dict[str, Any]] = {}
    domain: _Domain
    calibration: _Calibration
    sha256: dict[str, _Digest]
    metrics: dict[str, Any] = {}
    #: Identity of the model for programs of backend ``tvm`` in the folder
    #: :data:`cdmpp.model.artifact.folder.SCHEDULED`.
    scheduled: str = ""


class _Base(_Fields):
    model_id: str
    sha256: _Digest
    path: str
    was: str


class _Names(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    operators: list[str]
    settings: list[str]


class AdapterManifest(_Fields):
    """Fields that an adapted model's manifest must have."""

    base: _Base
    device: dict[str, Any]
    process: dict[str, Any]
    numeric: list[str]
    names: _Names
    weight: Annotated[float, Field(ge=0, le=1)]
    width: _Factor
    scheduled: bool = False
    report: dict[str, Any]
    sha256: dict[str, _Digest]


def check_fields(path: Path, manifest: Mapping[str, Any], kind: type[BaseModel]) -> None:
    """Check the types of the fields; the ArtifactError names each missing or invalid field."""
    try:
        kind.model_validate(manifest)
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors(include_url=False)[:5])
        raise ArtifactError(
            f"{path / MANIFEST} is damaged: {faults[:500]}", hint="copy the model folder again, or retrain"
        ) from None


def sealed(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest with its checksum, as it will be read from JSON."""
    content: dict[str, Any] = json.loads(json.dumps({k: v for k, v in manifest.items() if k != SEAL}))
    return {**content, SEAL: digest(content)}


def check_seal(path: Path, manifest: Mapping[str, Any]) -> None:
    """Raise ArtifactError if the manifest has a checksum and was changed after it was written."""
    if SEAL in manifest and sealed(manifest)[SEAL] != manifest[SEAL]:
        raise ArtifactError(
            f"{path / MANIFEST} does not match its checksum: it was changed after it was written",
            hint="copy the model folder again, or retrain",
        )


def check_identity(path: Path, manifest: Mapping[str, Any], identity: str) -> None:
    """Raise ArtifactError if a manifest with a checksum names another model than the identity of its content."""
    if SEAL in manifest and manifest.get("model_id") != identity:
        raise ArtifactError(
            f"{path} names itself {str(manifest.get('model_id'))[:200]!r}, its content is {identity!r}",
            hint="copy the model folder again, or retrain",
        )


def trained_identity(manifest: Mapping[str, Any]) -> str:
    """Name of a trained model and hash of its tensors and of every other field that predictions depend on."""
    content = {name: manifest[name] for name in _PREDICTING if name in manifest}
    content |= {file: manifest["sha256"][file] for file in (TENSORS, BOOSTERS) if file in manifest["sha256"]}
    return f"{manifest['name']}-{digest(content)[:12]}"


def digest(content: Any) -> str:
    """SHA-256 of a JSON value, whatever its layout in a file."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
