"""A model folder that contains a second trained model, for programs of backend ``tvm``.

>>> python -m cdmpp.model.artifact.scheduled TRAINED --into models/base                       # doctest: +SKIP
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cdmpp.errors import ArtifactError, CdmppError
from cdmpp.model.artifact.folder import (
    ERROR_TABLE,
    MANIFEST,
    SCHEDULED,
    TrainedManifest,
    cannot_write,
    check_fields,
    check_seal,
    read_manifest,
    sealed,
    swap_folder,
    trained_identity,
)
from cdmpp.model.artifact.load import load_artifact
from cdmpp.utils.files import read_json


def attach_scheduled(folder: Path, trained: Path) -> str:
    """Copy a trained model into a model folder, which then predicts programs of backend ``tvm`` with it.

    The folder is written aside and renamed. The model of a former call is replaced. The folder's error table gets the
    entries of the model's sources and of TIR; ``overall`` stays that of the folder's own test rows.

    Parameters
    ----------
    folder : Path
        Folder of a trained model.
    trained : Path
        Folder of a model that reads the schedule's columns.

    Returns
    -------
    str
        Identity of the changed model.

    Raises
    ------
    ArtifactError
        One of the folders is no trained model, or cannot be written.
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
    text = (json.dumps(errors, indent=1) + "\n").encode()
    sums = outer["sha256"] | ({ERROR_TABLE: hashlib.sha256(text).hexdigest()} if errors else {})
    manifest = outer | {"scheduled": inner.model_id, "sha256": sums}
    manifest = sealed({**manifest, "model_id": trained_identity(manifest)})
    aside = folder.with_name(folder.name + ".writing")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        shutil.copytree(folder, aside, ignore=shutil.ignore_patterns(SCHEDULED))
        shutil.copytree(trained, aside / SCHEDULED)
        if errors:
            (aside / ERROR_TABLE).write_bytes(text)
        (aside / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        swap_folder(folder, aside)
    except OSError as error:
        raise cannot_write(folder, error) from None
    return str(manifest["model_id"])


def joined_errors(whole: Mapping[str, Any], scheduled: Mapping[str, Any]) -> dict[str, Any]:
    """An error table in which a model of scheduled programs has replaced the entries of its sources and of TIR."""
    if not whole or not scheduled:
        return dict(whole)
    sources = set(scheduled["by_source"])
    result = {**whole, "by_source": {**whole["by_source"], **scheduled["by_source"]}}
    for key in ("tables", "groups"):
        result[key] = [entry for entry in whole[key] if entry["source"] not in sources] + scheduled[key]
    result["types"] = [entry for entry in whole["types"] if entry["operator"] != "tir"] + scheduled["types"]
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
