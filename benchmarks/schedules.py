"""Scheduled programs measured on CPUs: unseen tasks, networks and configurations, beside tree baselines.

``python -m benchmarks.schedules [--config configs/cpu.toml] [--data data/cdmpp-measured]``: per split, trains
the configuration and fits XGBoost on our features and on TVM's PerStoreFeature (as sums over the stores of a
program, and "packed" as TVM's own cost model does it), each with both labels, log(latency / reference) and
log(latency); of the variants of a baseline the one with the lowest error on the validation part is shown.
The test part is read once. ``--splits`` takes task, network and device; device holds out each configuration
in turn: all programs were seen on the others, nothing on this one. PerStoreFeature needs TVM; its features
are kept in the user's cache. Networks that are held out are those of ``splits.parquet`` beside the records,
or ``--test-networks a,b``. The figures go into ``benchmarks/results/schedules.json``, split by split.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks.per_store import PackedSum, per_store_features, summed
from benchmarks.report.markdown import percent
from benchmarks.report.results import rounded, write_result
from cdmpp.data.folder import SPLITS, records_file
from cdmpp.data.split_file import read_splits
from cdmpp.data.table import MeasurementTable
from cdmpp.evaluation.metrics import measure
from cdmpp.evaluation.ranking import MIN_PROGRAMS, rank
from cdmpp.nn.network import parameter_count
from cdmpp.training.baselines import TreeBaseline, roofline_log
from cdmpp.training.config import TrainConfig, load_config
from cdmpp.training.dataset import Dataset, MeasuredRows, make_dataset
from cdmpp.training.loop import Inputs, predict_rows, train, training_rows
from cdmpp.training.run import load_training_table

OUT = Path("benchmarks/results/schedules.json")

Array = np.ndarray[Any, np.dtype[Any]]
Predict = Callable[[MeasuredRows], Array]
Label = Literal["ratio", "latency"]
LABELS: tuple[Label, ...] = ("ratio", "latency")


class Contest:
    """All methods on one split of one table."""

    def __init__(self, table: MeasurementTable, config: TrainConfig, features: list[Array]) -> None:
        self.config, self.features = config, features
        self.dataset: Dataset = make_dataset(table, config.data, schedule=config.network.schedule)
        self.inputs = Inputs(self.dataset.store, self.dataset.device_matrix)
        self.train = training_rows(self.dataset, config)[0]
        rows = self.dataset.rows
        held = [i for i, d in enumerate(self.dataset.devices) if d.name in config.data.holdout_devices]
        unseen = np.isin(rows.device, held)
        self.validation = rows.take(np.flatnonzero((rows.part == 1) & ~unseen))
        self.test = rows.take(np.flatnonzero(unseen if held else rows.part == 2))
        #: A configuration that is held out is one that the network does not know.
        self.known = not held

    def figures(self, rows: MeasuredRows, predict: Predict) -> dict[str, Any]:
        """Errors over all rows, and order within tasks."""
        predicted, measured = np.exp(predict(rows)), np.exp(rows.log_latency)
        found = measure(predicted, measured)
        return found | rank(predicted, measured, self.dataset.group(rows), rows.program)

    def ours(self, run: Path) -> Predict:
        """The network."""
        network, summary = train(self.dataset, self.config, run)
        rows, minutes = summary["train_rows"], summary["train_seconds"] / 60
        print(f"{rows:,} training rows, {parameter_count(network):,} parameters, {minutes:.1f} minutes")
        return lambda rows: predict_rows(network, self.inputs, rows, known=self.known)[0]

    def best(self, variants: dict[str, Callable[[], Predict]]) -> tuple[str, Predict]:
        """The variant with the lowest error on the validation part."""
        fitted = {name: make() for name, make in variants.items()}
        errors = {name: self.figures(self.validation, p)["mape"] for name, p in fitted.items()}
        print("validation: " + ", ".join(f"{name} {percent(error)}" for name, error in errors.items()))
        name = min(errors, key=errors.__getitem__)
        return name, fitted[name]

    def trees(self, name: str, programs: Array | None) -> dict[str, Callable[[], Predict]]:
        """XGBoost on one row per program, with both labels."""

        def make(label: Label) -> Predict:
            model = TreeBaseline(self.dataset, self.inputs, self.config, programs=programs, label=label)
            return model.fit(self.train).predict_log

        return {f"{name}, {label}": lambda label=label: make(label) for label in LABELS}

    def packed(self) -> dict[str, Callable[[], Predict]]:
        """XGBoost on one row per store, summed over a program's stores, with both labels."""
        options = {
            "max_depth": 9,
            "eta": 0.1,
            "subsample": 0.8,
            "colsample_bytree": 0.6,
            "tree_method": "hist",
            "nthread": 2,
            "seed": self.config.seed,
        }
        rows = self.dataset.rows.take(self.train)

        def make(label: Label) -> Predict:
            def base(rows: MeasuredRows) -> Array:
                return self.inputs.reference(rows) if label == "ratio" else np.zeros(len(rows))

            model = PackedSum(self.features, options, self.config.finish.xgboost_trees)
            model.fit(rows.program, self._device(rows), rows.log_latency - base(rows))
            return lambda asked: model.predict(asked.program, self._device(asked)) + base(asked)

        return {f"packed, {label}": lambda label=label: make(label) for label in LABELS}

    def _device(self, rows: MeasuredRows) -> Array:
        with np.errstate(divide="ignore"):
            columns = np.log2(self.dataset.device_matrix[rows.device])
        if self.known:
            columns = np.concatenate([columns, rows.device[:, None]], axis=1)
        return np.nan_to_num(columns, nan=-1.0, posinf=-1.0, neginf=-1.0).astype(np.float32)

    def results(self, run: Path) -> dict[str, dict[str, Any]]:
        """Figures of every method on the test part."""
        own = self.best(self.trees("summed", None))
        baseline = self.best(self.trees("summed", summed(self.features)) | self.packed())
        methods = {
            "cdmpp": self.ours(run),
            f"XGBoost, our features ({own[0]})": own[1],
            f"XGBoost, PerStoreFeature ({baseline[0]})": baseline[1],
            "roofline": lambda rows: roofline_log(self.dataset, rows),
        }
        return {name: self.figures(self.test, predict) for name, predict in methods.items()}


def line(split: str, name: str, m: dict[str, Any]) -> str:
    """One row of the table."""
    order = ["-" if m[key] is None else f"{m[key]:.3f}" for key in ("task_kendall_tau", "top1_score", "top5_score")]
    cells = (f"{m['n']:,}", percent(m["mape"]), percent(m["median_ape"]), percent(m["within_20"]), *order)
    return f"| {split} | {name} | " + " | ".join((*cells, str(m["ranked_groups"]))) + " |"


def add_split(out: Path, split: str, found: dict[str, Any], held: tuple[str, ...]) -> None:
    """Put one split's figures into the result file."""
    old = json.loads(out.read_text(encoding="utf-8")) if out.is_file() else {}
    splits = old.get("splits", {}) | {split: found}
    about = {"command": "python -m benchmarks.schedules", "held_out_networks": list(held)}
    write_result(out, {**about, "splits": rounded(splits)})


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", default="configs/cpu.toml")
    parser.add_argument("--data", help="dataset folder or records, in place of the configuration's")
    parser.add_argument("--splits", default="task,network", help="of task, network and device")
    parser.add_argument("--test-networks", help="a,b; by default those of splits.parquet")
    parser.add_argument(
        "--runs",
        default="runs",
        help="for checkpoints; finished runs are not repeated, runs on other data found there refused",
    )
    parser.add_argument("--out", type=Path, default=OUT, help="result file; other splits in it stay")
    options = parser.parse_args()
    config = load_config(options.config)
    if options.data:
        config = config.model_copy(update={"data": config.data.model_copy(update={"records": (options.data,)})})
    table = load_training_table(config, None, ())
    if table.programs:
        raise SystemExit("the records hold operators; this benchmark is about scheduled programs")
    held: tuple[str, ...] = tuple(filter(None, (options.test_networks or "").split(",")))
    splits = records_file(config.data.records[0]).with_name(SPLITS)
    if not held and splits.is_file():
        held = tuple(read_splits(splits).about.get("test_networks", ()))
    wanted = options.splits.split(",")
    if unknown := sorted(set(wanted) - {"task", "network", "device"}):
        raise SystemExit(f"--splits: {', '.join(unknown)} is not one of task, network, device")
    chosen: dict[str, dict[str, Any]] = {}
    if "task" in wanted:
        chosen["task"] = {"split": "shape", "test_networks": ()}
    if "network" in wanted and held:
        chosen["network"] = {"split": "network", "test_networks": held}
    if "device" in wanted:
        for name in sorted(set(table.device.used())):
            chosen[name] = {"split": "shape", "test_networks": (), "holdout_devices": (name,)}
    features = per_store_features(table.tvm.texts)
    lines = []
    for split, changes in chosen.items():
        data = config.data.model_copy(update=changes)
        contest = Contest(table, config.model_copy(update={"data": data}), features)
        found = contest.results(Path(options.runs) / f"{config.name}-{split}")
        add_split(options.out, split, found, held)
        lines += [line(split, name, figures) for name, figures in found.items()]
    print(f"\nHeld-out networks: {', '.join(held) or 'none'}. Ranked: tasks of {MIN_PROGRAMS} or more.\n")
    print("| split | method | n | MAPE | median | within 20 % | tau in task | top-1 | top-5 | groups |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
