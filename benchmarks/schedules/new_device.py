"""A model on devices that it was not trained on (``python -m benchmarks.schedules device --device NAME --model DIR``).

The records of each device are predicted from its data sheet, then after some of its programs were measured and used as
by ``cdmpp adapt``. Defaults and schedules of MetaSchedule's space are measured; figures are of the others: of programs
that training had on other devices, of new programs, of irregular schedules (``cdmpp collect --irregular``), and of all.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report.results import STUDIES, Results, rounded, write_result
from benchmarks.report.schedules import new_device as report
from benchmarks.schedules.study import by_choice, mean_figures
from cdmpp.data.load import load_table
from cdmpp.data.split_file import without_sealed
from cdmpp.errors import CdmppError
from cdmpp.predict.predictor import LatencyPredictor
from cdmpp.train.config import DataConfig
from cdmpp.train.dataset import make_dataset
from cdmpp.train.evaluation.parts import row_parts, trained_on

DRAWS = {"kmeans": 10, "variance": 5, "random": 10, "tvm": 10}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table and write the result file."""
    study = STUDIES["schedules_device"]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.schedules device", description=__doc__)
    parser.add_argument("--records", default="data/cdmpp-measured", help="dataset folder or records")
    parser.add_argument("--device", required=True, help="start of the devices' names")
    parser.add_argument("--model", type=Path, required=True, help="a model that was not trained on them")
    parser.add_argument("--out", type=Path, default=study.path)
    options = parser.parse_args(arguments)
    try:
        predictor = LatencyPredictor.load(options.model)
        table = without_sealed(load_table(options.records), [options.records])
        names = sorted({n for n in table.device.array().tolist() if n.startswith(options.device)})
        part = predictor.artifact.part(scheduled=True)
        if not names or set(names) & set(part.devices):
            raise SystemExit(
                f"--device {options.device}: no device of the records, or {options.model} was trained on it"
            )
        trained = table.program_key[trained_on(predictor.artifact, table, row_parts(predictor.artifact, table))]
        devices: dict[str, dict[str, dict[str, Any]]] = {}
        for name in names:
            of_device = table.select(np.flatnonzero(table.device.is_(name)))
            dataset = make_dataset(of_device, DataConfig(records=(options.records,)), schedule=True, every_part=True)
            program = dataset.rows.program
            irregular = np.isin(program, of_device.program_key[of_device.provenance["origin"].array() == "irregular"])
            known = np.isin(program, trained) & ~irregular
            groups = {
                "all but irregular": ~irregular,
                "programs of training": known,
                "new programs": ~irregular & ~known,
                "irregular": irregular,
                "all": np.ones(len(program), dtype=bool),
            }
            by_group = by_choice(dataset, part, dataset.rows, groups, DRAWS)
            devices[name] = {group: {} for group in groups}
            for (group, choice), runs in by_group.items():
                devices[name][group][choice] = mean_figures(runs)
    except CdmppError as error:
        raise SystemExit(f"{error}\nhint: {error.hint}") from None
    result = rounded({"command": study.command, "model": predictor.model_id, "devices": devices})
    write_result(options.out, result)
    print(report(Results({"schedules_device": result})))
