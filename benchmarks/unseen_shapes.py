"""Error on shapes that training never saw (the held-out tenth), beside XGBoost and the roofline.

``python -m benchmarks.unseen_shapes --public-data DIR [--model models/base]``: reads the test part once,
fits the tree baseline on the model's own training rows and prints one table.
"""

from __future__ import annotations

import argparse

import numpy as np

from benchmarks.tables import error_rows
from cdmpp.nn.artifact import load_artifact
from cdmpp.training.baselines import fit_baselines
from cdmpp.training.config import TrainConfig
from cdmpp.training.dataset import make_dataset
from cdmpp.training.finish import error_table
from cdmpp.training.loop import Inputs, training_rows
from cdmpp.training.run import load_training_table


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--public-data")
    parser.add_argument("--model", default="models/base")
    options = parser.parse_args()
    artifact = load_artifact(options.model)
    config = TrainConfig.model_validate(artifact.manifest["config"])
    table = load_training_table(config, options.public_data, ())
    dataset = make_dataset(table, config.data, schedule=config.network.schedule)
    if tuple(d.name for d in dataset.devices) != artifact.devices:
        raise SystemExit("the tables hold other devices than the model was trained on")
    inputs = Inputs(dataset.store, dataset.device_matrix)
    index = training_rows(dataset, config)[0]
    baselines = fit_baselines(dataset, inputs, config, index, config.finish.baselines)
    rows = dataset.rows.take(np.flatnonzero(dataset.rows.part == 2))
    errors = error_table(artifact.network, inputs, dataset, rows, artifact.calibration, baselines)
    print(f"{artifact.model_id}: {len(rows):,} test rows\n")
    print(error_rows({**errors["by_source"], "all rows": errors["overall"]}))


if __name__ == "__main__":
    main()
