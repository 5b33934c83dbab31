"""A model folder that contains a second trained model, for programs of backend ``tvm``.

>>> python -m cdmpp.model.artifact.scheduled TRAINED --into models/base                       # doctest: +SKIP
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cdmpp.errors import ArtifactError, CdmppError
from cdmpp.model.artifact.folder import (
    ERROR_TABLE,
    SCHEDULED,
    TrainedManifest,
    check_fields,
    check_seal,
    read_manifest,
    replace_files,
)
from cdmpp.model.artifact.load import load_artifact
from cdmpp.utils.files import read_json


def attach_scheduled(folder: Path, trained: Path) -> str:
    """Copy a trained model that reads the schedule's columns into the folder of another; returns its new identity.

    That folder then predicts programs of backend ``tvm`` with it. The folder is written aside and renamed. The model of
    a former call is replaced. The folder's error table gets the entries of the model's sources and of TIR; ``overall``
    stays that of the folder's own test rows. Raises ArtifactError where one of the folders is no trained model, or
    cannot be written.
    """
    inner = load_artifact(trained)
    if inner.adapter is not None or inner.scheduled is not None or not inner.config.schedule:
        raise ArtifactError(
            f"{trained} is no model for scheduled programs",
            hint="train one with: cdmpp train --config configs/scheduled.toml",
        )
    outer = read_manifest(folder)
    check_seal(folder, outer)
    check_fields(folder, outer, TrainedManifest)
    errors = joined_errors(_errors(folder), _errors(trained))
    files: dict[str, bytes | Path] = {SCHEDULED: trained}
    if errors:
        files[ERROR_TABLE] = (json.dumps(errors, indent=1) + "\n").encode()
    return str(replace_files(folder, outer | {"scheduled": inner.model_id}, files)["model_id"])


def joined_errors(whole: Mapping[str, Any], scheduled: Mapping[str, Any]) -> dict[str, Any]:
    """An error table in which another one has replaced the entries of its sources and operators."""
    if not whole or not scheduled:
        return dict(whole)
    sources = set(scheduled["by_source"])
    result = {**whole, "by_source": {**whole["by_source"], **scheduled["by_source"]}}
    for key in ("tables", "groups"):
        result[key] = [entry for entry in whole[key] if entry["source"] not in sources] + scheduled[key]
    operators = {entry["operator"] for entry in scheduled["types"]}
    result["types"] = [entry for entry in whole["types"] if entry["operator"] not in operators] + scheduled["types"]
    kept = [source not in sources for source in whole["sample"]["source"]]
    result["sample"] = {
        column: [*itertools.compress(values, kept), *scheduled["sample"][column]]
        for column, values in whole["sample"].items()
    }
    return result


def _errors(folder: Path) -> dict[str, Any]:
    """Error table of a model folder; empty where it has none."""
    file = folder / ERROR_TABLE
    return read_json(file, "train the model again", error=ArtifactError) if file.is_file() else {}


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m cdmpp.model.artifact.scheduled", description=__doc__)
    parser.add_argument("trained", type=Path, help="folder of the model for scheduled programs")
    parser.add_argument("--into", type=Path, required=True, help="model folder that gains it")
    options = parser.parse_args(arguments)
    try:
        print(attach_scheduled(options.into.resolve(), options.trained))
    except CdmppError as error:
        raise SystemExit(f"error: {error}\nhint: {error.hint}") from None


if __name__ == "__main__":
    main()
