"""Files of a model folder: names, manifest, and writing that leaves a whole folder or none."""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from cdmpp.errors import ArtifactError

FORMAT_VERSION = 1
TENSORS, MANIFEST = "model.safetensors", "manifest.json"
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

    Raises
    ------
    ArtifactError
        The folder cannot be written, or a file has its name.
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


def cannot_write(folder: Path, error: OSError) -> ArtifactError:
    """The error for a folder that cannot be written."""
    return ArtifactError(f"cannot write {folder}: {error.strerror or error}", hint="check the folder and its disk")


def read_manifest(path: Path) -> dict[str, Any]:
    """Manifest of a model folder, its format version checked.

    Raises
    ------
    ArtifactError
        The manifest is missing, is not JSON, or has another format version.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except OSError as error:
        raise no_model_folder(path, error) from None
    except (ValueError, RecursionError) as error:
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
