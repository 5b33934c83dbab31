"""The regression gate: errors on a small fixed split of the project's own measurements may not rise.

``python -m benchmarks.gate`` measures and compares, ``--write`` puts the figures into
``tests/regression_gate.json``, ``--worse`` also if they are worse. Two results are compared:

* ``model``: the shipped model on test tasks of its own split, all their schedules;
* ``training``: a small network trained for :data:`STEPS` steps on a few training tasks, on the same rows.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from benchmarks.report.results import rounded, write_result
from cdmpp.data.folder import records_file
from cdmpp.data.load import load_table
from cdmpp.data.split_file import without_sealed
from cdmpp.data.table import MeasurementTable
from cdmpp.model.artifact.load import load_artifact
from cdmpp.model.artifact.model import Artifact
from cdmpp.model.nn.batch import NetworkInputs, predict_rows
from cdmpp.model.nn.config import NetworkConfig
from cdmpp.train.config import DataConfig, TrainConfig
from cdmpp.train.dataset import choose_parts, make_dataset
from cdmpp.train.evaluation.metrics import MIN_PROGRAMS, measure, rank
from cdmpp.train.evaluation.tables import evaluate
from cdmpp.train.fit import train
from cdmpp.train.options import OptimiserConfig

GATE = Path("tests/regression_gate.json")
DATA, MODEL = Path("data/cdmpp-measured"), Path("models/base")
#: Rows that the gate looks at, at least, and rows of training tasks for the small network.
TEST_ROWS, TRAIN_ROWS = 300, 900
STEPS = 100
#: By how much a figure may be worse: the error relative to itself, the order in tau.
MARGINS = {"mape": 0.05, "task_kendall_tau": 0.02}
#: The small network's figures differ more between processors: its steps amplify the last digit.
TRAINING_MARGINS = {"mape": 0.15, "task_kendall_tau": 0.1}

Figures = Mapping[str, float]


def part_of_tasks(table: MeasurementTable, data: DataConfig) -> dict[str, int]:
    """Part (0 training, 2 test) of every task that is large enough to be ranked, in order of its name."""
    parts = choose_parts(table, data)[table.tvm.first_key :]
    names = np.array(table.tvm.tasks, dtype=object)
    large = [task for task in sorted(set(names)) if task and (names == task).sum() >= MIN_PROGRAMS]
    return {task: int(parts[names == task][0]) for task in large}


def choose_tasks(table: MeasurementTable, data: DataConfig) -> dict[str, list[str]]:
    """A fixed choice of ``test`` and ``train`` tasks; the table has no sealed programs."""
    parts = part_of_tasks(table, data)
    names = np.array(table.tvm.tasks, dtype=object)
    task_of_row = names[table.program_key - table.tvm.first_key]
    chosen: dict[str, list[str]] = {}
    for part, code, rows in (("test", 2, TEST_ROWS), ("train", 0, TRAIN_ROWS)):
        candidates = [task for task, of_task in parts.items() if of_task == code]
        # Names of tasks start with their network: a seeded order mixes them.
        order = np.random.default_rng(0).permutation(len(candidates))
        chosen[part], have = [], 0
        for i in order:
            if have < rows:
                chosen[part].append(candidates[i])
                have += int((task_of_row == candidates[i]).sum())
    return chosen


def read_tasks(tasks: Sequence[str]) -> MeasurementTable:
    """The rows of some tasks alone: the whole data set takes seconds to read."""
    rows = pq.read_table(records_file(DATA), filters=[("task", "in", list(tasks))])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "records.parquet"
        pq.write_table(rows, path)
        return load_table(path)


def model_figures(artifact: Artifact, table: MeasurementTable) -> dict[str, Any]:
    """``n``, ``mape`` and ``task_kendall_tau`` of a model on all rows of a table."""
    return _kept(evaluate(artifact, [table])["overall"])


def training_config() -> TrainConfig:
    """A network that trains in seconds."""
    return TrainConfig(
        name="gate",
        data=DataConfig(public=False),
        network=NetworkConfig(
            width=32, layers=1, heads=2, feed_forward=64, head_width=64, head_layers=2, schedule=True
        ),
        optimiser=OptimiserConfig(
            steps=STEPS,
            batch_rows=128,
            learning_rate=3e-3,
            warmup_steps=10,
            average_decay=0.95,
            threads=1,
            hide_device=0.1,
            hide_framework=0.0,
            ranking_weight=0.05,
            group_tasks=8,
        ),
    )


def training_figures(table: MeasurementTable, config: TrainConfig) -> dict[str, Any]:
    """The same figures, on the test tasks of a table, of a network trained on its training tasks."""
    dataset = make_dataset(table, config.data, schedule=config.network.schedule)
    test = dataset.rows.take(np.flatnonzero(dataset.rows.part == 2))
    with tempfile.TemporaryDirectory() as run:
        network, _ = train(dataset, config, Path(run))
    point = predict_rows(network, NetworkInputs(dataset.store, dataset.device_matrix), test)[0]
    predicted, measured = np.exp(point), np.exp(test.log_latency)
    figures = measure(predicted, measured) | rank(predicted, measured, dataset.group(test), test.program)
    return _kept(figures)


def _kept(figures: Mapping[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = rounded({key: figures[key] for key in ("n", "mape", "task_kendall_tau")})
    return kept


def complaints(now: Figures, gate: Figures, margins: Figures) -> list[str]:
    """Figures worse than the gate by more than the margin; a different row count is a problem, too."""
    if now["n"] != gate["n"]:
        return [f"{now['n']} rows, the gate has {gate['n']}: python -m benchmarks.gate --write"]
    worst_error = gate["mape"] * (1 + margins["mape"])
    least_tau = gate["task_kendall_tau"] - margins["task_kendall_tau"]
    problems = []
    if not now["mape"] <= worst_error:
        problems.append(f"MAPE {now['mape']:.4f}, at most {worst_error:.4f} is allowed")
    if not now["task_kendall_tau"] >= least_tau:
        problems.append(f"Kendall tau {now['task_kendall_tau']:.4f}, at least {least_tau:.4f} is required")
    return problems


def main() -> None:
    """Measure, compare, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--worse", action="store_true", help="write figures that are worse, too")
    options = parser.parse_args()
    old = json.loads(GATE.read_text(encoding="utf-8")) if GATE.is_file() else None
    manifest = json.loads((MODEL / "manifest.json").read_text(encoding="utf-8"))
    data = TrainConfig.of_manifest(manifest["config"]).data
    tasks = choose_tasks(without_sealed(load_table(DATA), [DATA]), data)
    now = {
        "model": model_figures(load_artifact(MODEL), read_tasks(tasks["test"])),
        "training": training_figures(read_tasks([*tasks["test"], *tasks["train"]]), training_config()),
    }
    allowed = {"model": MARGINS, "training": TRAINING_MARGINS}
    problems = []
    for name, margins in allowed.items():
        print(f"{name}: {now[name]}, gate {old[name] if old else None}")
        # Another choice of rows cannot be compared.
        if old and old["tasks"] == tasks:
            problems += [f"{name}: {line}" for line in complaints(now[name], old[name], margins)]
    if problems and not options.worse:
        raise SystemExit("\n".join(problems))
    if options.write:
        about = {"command": "python -m benchmarks.gate --write", "model_id": manifest["model_id"]}
        write_result(GATE, {**about, **now, "margins": allowed, "tasks": tasks})
        print(f"written to {GATE}")


if __name__ == "__main__":
    main()
