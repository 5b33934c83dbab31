"""Boosters for a model that is trained already; its network stays as it is.

>>> python -m cdmpp.train.boost models/base --public-data DIR                                  # doctest: +SKIP
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from cdmpp.data.splits import TEST
from cdmpp.errors import ArtifactError, CdmppError
from cdmpp.model.artifact.folder import BOOSTERS, ERROR_TABLE, replace_files
from cdmpp.model.artifact.load import load_artifact
from cdmpp.model.artifact.scheduled import joined_errors
from cdmpp.model.nn.batch import NetworkInputs
from cdmpp.model.nn.figures import stack_devices
from cdmpp.programs.query_options import BACKENDS
from cdmpp.train.boosters import RowPredictor, fit_boosters
from cdmpp.train.config import TrainConfig
from cdmpp.train.dataset import make_dataset
from cdmpp.train.finish import calibrate, error_table, with_training_rows
from cdmpp.train.fit import training_rows
from cdmpp.train.run import load_training_table
from cdmpp.utils.files import read_json

#: Fields that name an entry of an error table.
KEYS = ("source", "device", "op")


def boost_model(folder: Path, public_data: str | Path | None = None) -> str:
    """Fit the boosters of a trained model, calibrate it, evaluate it on the test part, and replace its folder; returns
    the identity of the changed model.

    The error table keeps the baselines, and the entries of TVM programs, which have no boosters.
    """
    artifact = load_artifact(folder)
    if artifact.adapter is not None or artifact.folder is None:
        raise ArtifactError(f"{folder} is an adapted model", hint="name the folder of its base")
    config = TrainConfig.of_manifest(artifact.manifest["config"])
    table = load_training_table(config, public_data, ())
    dataset = make_dataset(table, config.data, schedule=config.network.schedule, every_part=True)
    trained = {spec.name: (index, spec) for index, spec in artifact.trained_devices}
    known = [trained.get(device.name, (0, device)) for device in dataset.devices]
    embedding = np.array([index for index, _ in known])
    library = dataset.rows.backend == BACKENDS.index("library")
    kept = np.flatnonzero((library | (artifact.scheduled is None)) & (embedding[dataset.rows.device] > 0))
    dataset = replace(dataset, rows=dataset.rows.take(kept))
    inputs = NetworkInputs(dataset.store, stack_devices([spec for _, spec in known]))
    predict = RowPredictor(artifact.network, inputs, dataset, embedding, artifact.domain.contexts)
    index = training_rows(dataset, config)[0]
    boosters = fit_boosters(predict, index, config.seed)
    predict = replace(predict, boosters=boosters)
    network = artifact.network
    calibration = calibrate(network, inputs, dataset, config, predict)
    test = dataset.rows.take(np.flatnonzero(dataset.rows.part == TEST))
    errors = error_table(network, inputs, dataset, test, calibration, {}, predict=predict)
    errors["types"] = with_training_rows(errors["types"], dataset, dataset.rows.take(index))
    former = read_json(folder / ERROR_TABLE, "train the model again", error=ArtifactError)
    errors = joined_errors(former, with_baselines(errors, former)) | {"overall": errors["overall"]}
    manifest = artifact.manifest | {
        "calibration": calibration,
        "config": config.model_copy(update={"finish": config.finish.model_copy(update={"boosters": True})}).model_dump(
            mode="json"
        ),
        "metrics": {name: errors[name] for name in ("overall", "by_source")},
    }
    files = {BOOSTERS: boosters.save(), ERROR_TABLE: (json.dumps(errors, indent=1) + "\n").encode()}
    return str(replace_files(folder, manifest, files)["model_id"])


def with_baselines(errors: dict[str, Any], former: Mapping[str, Any]) -> dict[str, Any]:
    """An error table with the baselines of a former one on the same rows; of all rows the mean errors alone."""
    for key in ("tables", "groups"):
        known = {tuple(map(entry.get, KEYS)): entry["baselines"] for entry in former[key]}
        for entry in errors[key]:
            entry["baselines"] = known.get(tuple(map(entry.get, KEYS)), {})
    for name, entry in errors["by_source"].items():
        entry["baselines"] = former["by_source"].get(name, {}).get("baselines", {})
    tables = [entry for entry in errors["tables"] if entry["baselines"]]
    count = sum(entry["n"] for entry in tables)
    for name in former["overall"]["baselines"] if count else ():
        total = sum(entry["n"] * entry["baselines"][name]["mape"] for entry in tables)
        errors["overall"]["baselines"][name] = {"mape": total / count}
    return errors


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m cdmpp.train.boost", description=__doc__)
    parser.add_argument("model", type=Path, help="folder of a trained model")
    parser.add_argument("--public-data", help="folder of the public tables; else CDMPP_PUBLIC_DATA")
    options = parser.parse_args(arguments)
    try:
        print(boost_model(options.model.resolve(), options.public_data))
    except CdmppError as error:
        raise SystemExit(f"error: {error}\nhint: {error.hint}") from None


if __name__ == "__main__":
    main()
