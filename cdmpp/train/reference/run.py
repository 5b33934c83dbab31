"""One training run of the original, from configuration to folder (``cdmpp train`` with ``[reference]``)."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save

from cdmpp.data.table import MeasurementTable
from cdmpp.errors import DataError
from cdmpp.model.artifact.folder import ERROR_TABLE, FORMAT_VERSION, MANIFEST, library_versions, write_folder
from cdmpp.model.nn.batch import Inputs
from cdmpp.model.nn.network import parameter_count
from cdmpp.train.baselines import fit_baselines
from cdmpp.train.config import TrainConfig
from cdmpp.train.dataset import make_dataset
from cdmpp.train.draw import training_rows
from cdmpp.train.finish import tabulate
from cdmpp.train.loop import Progress
from cdmpp.train.reference.inputs import per_store_features
from cdmpp.train.reference.train import ReferenceModel

TENSORS = "reference.safetensors"


def scheduled_features(table: MeasurementTable) -> list[Any]:
    """PerStoreFeature of a table's programs.

    Raises
    ------
    DataError
        Some records are operators, which have no schedule.
    """
    if table.programs:
        raise DataError(
            "the reference reads scheduled programs; the records hold operators",
            hint="train it on records of TVM programs, as data/cdmpp-measured",
        )
    return per_store_features(table.tvm.texts)


def train_reference(
    config: TrainConfig, table: MeasurementTable, *, out: Path, progress: Progress | None = None
) -> dict[str, Any]:
    """Train the original, evaluate it and the baselines on the test part, write its folder.

    The folder records the run and cannot be loaded for predictions: its manifest has ``"kind": "reference"``.

    Returns
    -------
    dict
        As :func:`cdmpp.train.run.train_model`, without a calibration: it has no intervals.

    Raises
    ------
    DataError
        The table holds operators, or nothing to train on.
    """
    features = scheduled_features(table)
    dataset = make_dataset(table, config.data, schedule=config.network.schedule, every_part=True)
    index = training_rows(dataset, config)[0]
    model = ReferenceModel(dataset, config, features, table.tvm.first_key).fit(index, progress)
    inputs = Inputs(dataset.store, dataset.device_matrix)
    baselines = fit_baselines(dataset, inputs, config, index, config.finish.baselines)
    held = [i for i, d in enumerate(dataset.devices) if d.name in config.data.holdout_devices]
    unseen = np.isin(dataset.rows.device, held)
    test = dataset.rows.take(np.flatnonzero((dataset.rows.part == 2) & ~unseen))
    metrics = tabulate(dataset, test, model.predict_log(test), baselines)
    metrics["untrained_leaf_counts"] = model.untrained(test)
    if held:
        rows = dataset.rows.take(np.flatnonzero(unseen))
        metrics["held_out_devices"] = tabulate(dataset, rows, model.predict_log(rows), baselines)
    summary = model.summary | {"parameters": parameter_count(model.network)}
    tensors = save({k: v.contiguous() for k, v in model.network.state_dict().items()}, {"format": "cdmpp"})
    errors = (json.dumps(metrics, indent=1) + "\n").encode()
    digest = hashlib.sha256(tensors).hexdigest()
    manifest = {
        "format_version": FORMAT_VERSION,
        "kind": "reference",
        "model_id": f"{config.name}-{digest[:12]}",
        "config": config.model_dump(mode="json"),
        "data": {"fingerprint": dataset.fingerprint, "sources": dict(table.source.counts())},
        "train": summary,
        "metrics": {"overall": metrics["overall"], "by_source": metrics["by_source"]},
        "libraries": library_versions(),
        "sha256": {TENSORS: digest, ERROR_TABLE: hashlib.sha256(errors).hexdigest()},
    }
    text = json.dumps(manifest, indent=1, sort_keys=True) + "\n"
    write_folder(out, {TENSORS: tensors, ERROR_TABLE: errors, MANIFEST: text.encode()})
    return {"model_id": manifest["model_id"], "out": str(out), "train": summary, "calibration": {}, "metrics": metrics}
