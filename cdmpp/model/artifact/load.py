"""Loading a model folder: a trained model, or an adapted model with its base."""

from __future__ import annotations

import os
from pathlib import Path

from cdmpp.errors import ArtifactError, MissingDependencyError
from cdmpp.model.artifact.adapted import load_adapted
from cdmpp.model.artifact.collectives import KIND, load_corrected
from cdmpp.model.artifact.folder import read_manifest
from cdmpp.model.artifact.manifest import check_seal
from cdmpp.model.artifact.model import Artifact
from cdmpp.model.artifact.trained import load_trained


def load_artifact(folder: str | os.PathLike[str]) -> Artifact:
    """Load a model folder: a trained model, or an adapted model with its base.

    Raises
    ------
    ArtifactError
        A file is missing or damaged, the format or a feature schema differs, the network has an option that
        this version does not have, or the base of an adapted model is missing.
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
