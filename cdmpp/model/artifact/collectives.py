"""A model whose collectives are corrected by measurements of one device, as a folder with only ``manifest.json``.

The manifest holds the measurements; the correction is computed again when it is loaded. The network of the base model
is not changed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from cdmpp.devices.loading import from_mapping
from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import ArtifactError
from cdmpp.model.artifact.adapted import base_identity, check_target, load_base
from cdmpp.model.artifact.folder import FORMAT_VERSION, MANIFEST, default_model, library_versions, write_folder
from cdmpp.model.artifact.manifest import check_identity, sealed
from cdmpp.model.artifact.model import Artifact
from cdmpp.model.collectives.context import STORED_FIELDS, Context
from cdmpp.model.collectives.correction import Correction
from cdmpp.model.collectives.model import CollectiveModel
from cdmpp.model.collectives.store import read_model

#: ``kind`` in the manifest of such a folder.
KIND = "collectives"


def collectives_of(artifact: Artifact) -> CollectiveModel | None:
    """The model of collectives of a model folder; the one that ships with the package where the folder has none."""
    return artifact.collectives or read_model(default_model())


def corrected(
    base: Artifact,
    device: DeviceSpec,
    contexts: Sequence[Context],
    bytes_: Sequence[float],
    seconds: Sequence[float],
    weight: float,
    report: dict[str, Any],
) -> Artifact:
    """A base model with its collectives corrected, in memory.

    Parameters
    ----------
    contexts, bytes_, seconds : k measurements
    weight : float
        Share of the correction that is applied.

    Raises
    ------
    ArtifactError
        There is no model of collectives.
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

    Raises
    ------
    ArtifactError
        The base has no folder; the folder cannot be written, or holds something else.
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

    Raises
    ------
    ArtifactError
        The base is missing or another one; the manifest is damaged.
    """
    content = manifest[KIND]
    width = STORED_FIELDS
    contexts = [Context(*row[:width]) for row in content["rows"]]
    bytes_, seconds = ([float(row[width + i]) for row in content["rows"]] for i in (0, 1))
    device = from_mapping(content["device"])
    made = corrected(
        load_base(path, manifest), device, contexts, bytes_, seconds, float(content["weight"]), manifest["report"]
    )
    check_identity(path, manifest, made.model_id)
    return made
