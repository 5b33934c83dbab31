"""Our network beside the original on one split, data and budget of time, one after the other.

``python -m benchmarks.reference_preset [--seconds 30] [--threads 1] [--split task|network] [--terms none]``
trains the preset of ``configs/reference.toml`` for that long, one network of ``configs/cpu.toml`` for as long
and for a tenth of it, and reports samples a second and the errors on the test part, XGBoost and the mean per
operator on the same rows beside them. ``--terms`` adds the original with its domain terms: the tasks of
``--target-networks`` are then unlabelled for all methods, and only their test rows are counted.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.report.markdown import percent
from cdmpp.data.folder import SPLITS, records_file
from cdmpp.data.networks import without_sizes
from cdmpp.data.split_file import read_splits
from cdmpp.model.nn.batch import Inputs, predict_rows
from cdmpp.model.nn.network import parameter_count
from cdmpp.train.baselines import fit_baselines
from cdmpp.train.config import DomainConfig, TrainConfig, load_config
from cdmpp.train.dataset import Dataset, MeasuredRows, make_dataset
from cdmpp.train.draw import training_rows
from cdmpp.train.evaluation.metrics import measure
from cdmpp.train.evaluation.ranking import rank
from cdmpp.train.loop import train
from cdmpp.train.reference.run import scheduled_features
from cdmpp.train.reference.train import ReferenceModel
from cdmpp.train.run import load_training_table

Array = np.ndarray[Any, np.dtype[Any]]


def changed(config: TrainConfig, **optimiser: Any) -> TrainConfig:
    """A configuration with other settings of the optimiser."""
    return config.model_copy(update={"optimiser": config.optimiser.model_copy(update=optimiser)})


class Race:
    """All methods on the rows of one split."""

    def __init__(self, ours: TrainConfig, preset: TrainConfig, target: tuple[str, ...]) -> None:
        table = load_training_table(ours, None, ())
        self.ours, self.preset, self.target = ours, preset, target
        self.features, self.first_key = scheduled_features(table), table.tvm.first_key
        self.dataset: Dataset = make_dataset(table, ours.data, schedule=ours.network.schedule)
        self.inputs = Inputs(self.dataset.store, self.dataset.device_matrix)
        rows = self.dataset.rows
        test = rows.part == 2
        if target:
            names = frozenset(map(without_sizes, target))
            test &= np.array([not names.isdisjoint(n) for n in self.dataset.networks])[rows.program]
        self.test: MeasuredRows = rows.take(np.flatnonzero(test))

    def figures(self, predicted_log: Array) -> dict[str, Any]:
        """Errors and order on the test rows."""
        predicted, measured = np.exp(predicted_log), np.exp(self.test.log_latency)
        found = measure(predicted, measured)
        found |= rank(predicted, measured, self.dataset.group(self.test), self.test.program)
        kept = ("n", "mape", "median_ape", "within_20", "task_kendall_tau", "top1_score")
        return {key: found[key] for key in kept}

    def _without_labels(self, config: TrainConfig, term: str) -> TrainConfig:
        """The target's labels stay out of every method; the term is ``none`` for all but the original."""
        if not self.target:
            return config
        weight = 1.0 if term != "none" else 0.0
        domain = DomainConfig(
            loss=term if term != "none" else "cmd", weight=weight, rows=2048, target_networks=self.target
        )
        return config.model_copy(update={"domain": domain})

    def original(self, seconds: float, term: str, preset: TrainConfig | None = None) -> dict[str, Any]:
        """The preset, or a variant of it, for so long."""
        config = self._without_labels(changed(preset or self.preset, seconds=seconds, steps=10**9), term)
        model = ReferenceModel(self.dataset, config, self.features, self.first_key)
        model.fit(training_rows(self.dataset, config)[0])
        return {
            **model.summary,
            "parameters": parameter_count(model.network),
            "test": self.figures(model.predict_log(self.test)),
            "untrained_leaf_counts": model.untrained(self.test),
        }

    def network(self, seconds: float) -> dict[str, Any]:
        """Our network for so long."""
        config = self._without_labels(changed(self.ours, seconds=seconds, steps=10**9), "none")
        with tempfile.TemporaryDirectory() as folder:
            network, summary = train(self.dataset, config, Path(folder))
        samples = summary["steps"] * config.optimiser.batch_rows
        return {
            **summary,
            "parameters": parameter_count(network),
            "samples": samples,
            "samples_per_s": round(samples / summary["train_seconds"], 1),
            "test": self.figures(predict_rows(network, self.inputs, self.test)[0]),
        }

    def others(self) -> dict[str, Any]:
        """Baselines, without a limit of time."""
        config = self._without_labels(self.ours, "none")
        index = training_rows(self.dataset, config)[0]
        fitted = fit_baselines(self.dataset, self.inputs, config, index, ("roofline", "mean", "xgboost"))
        return {name: {"test": self.figures(b.predict_log(self.test))} for name, b in fitted.items()}


def line(name: str, found: dict[str, Any]) -> str:
    """One row of the table."""
    test = found["test"]
    tau = "-" if test["task_kendall_tau"] is None else f"{test['task_kendall_tau']:.3f}"
    speed = [str(found.get(key, "-")) for key in ("train_seconds", "samples", "samples_per_s")]
    return f"| {name} | " + " | ".join((*speed, percent(test["mape"]), percent(test["median_ape"]), tau)) + " |"


def main() -> None:
    """Print the table and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0, help="training time of each method")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--config", default="configs/cpu.toml")
    parser.add_argument("--preset", default="configs/reference.toml")
    parser.add_argument("--data", help="dataset folder or records, in place of the configuration's")
    parser.add_argument("--split", choices=("task", "network"), default="task")
    parser.add_argument("--terms", default="none", help="of the original: none, cmd, mmd")
    parser.add_argument("--target-networks", default="", help="a,b: unlabelled, for the terms")
    parser.add_argument("--out", default="benchmarks/results/reference.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    terms = options.terms.split(",")
    target = tuple(filter(None, options.target_networks.split(",")))
    if set(terms) - {"none", "cmd", "mmd"} or (terms != ["none"]) != bool(target):
        raise SystemExit("--terms must be none, cmd or mmd; cmd and mmd need --target-networks")
    ours, preset = load_config(options.config).of_one_network(), load_config(options.preset)
    if options.data:
        ours = ours.model_copy(update={"data": ours.data.model_copy(update={"records": (options.data,)})})
    if options.split == "network":
        held = read_splits(records_file(ours.data.records[0]).with_name(SPLITS)).about["test_networks"]
        data = ours.data.model_copy(update={"split": "network", "test_networks": tuple(held)})
        ours = ours.model_copy(update={"data": data})
    ours = changed(ours, threads=options.threads)
    preset = changed(preset.model_copy(update={"data": ours.data}), threads=options.threads)
    race = Race(ours, preset, target)
    methods: dict[str, Callable[[], dict[str, Any]]] = {
        f"original, {term}" if term != "none" else "original": (
            lambda term=term: race.original(options.seconds, term)  # type: ignore[misc]
        )
        for term in terms
    }
    # The published cycle is far longer than the budget; a cycle of the budget is what tuning would find.
    fitted = preset.reference.model_copy(update={"cycle_steps": None})  # type: ignore[union-attr]
    methods["original, cycle of the budget"] = lambda: race.original(
        options.seconds, "none", preset.model_copy(update={"reference": fitted})
    )
    methods["ours"] = lambda: race.network(options.seconds)
    methods["ours, a tenth of the time"] = lambda: race.network(options.seconds / 10)
    results: dict[str, dict[str, Any]] = {}
    for name, method in methods.items():
        results[name] = method()
        print(line(name, results[name]), flush=True)
    results |= race.others()
    rates = [results[name]["samples_per_s"] for name in ("ours", next(iter(methods)))]
    report = {
        "command": f"python -m benchmarks.reference_preset --seconds {options.seconds:g} "
        f"--threads {options.threads} --split {options.split} --terms {options.terms}"
        + (f" --target-networks {options.target_networks}" if target else ""),
        "split": options.split,
        "test_rows": len(race.test),
        "load_1min": round(os.getloadavg()[0], 1),
        "samples_per_s_ratio": round(rates[0] / rates[1], 1),
        "methods": results,
    }
    out = Path(options.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    times = rates[0] / rates[1]
    print(f"\n{len(race.test):,} test rows, split by {options.split}; {times:.0f} times the samples\n")
    print("| method | seconds | samples | a second | MAPE | median | tau in task |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    print("\n".join(line(name, figures) for name, figures in results.items()))


if __name__ == "__main__":
    main()
