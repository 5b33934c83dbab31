"""Scheduled programs measured on CPUs: unseen tasks, networks and configurations, beside baselines.

``python -m benchmarks.schedules [--config configs/cpu.toml] [--data data/cdmpp-measured]``: per split, trains
the configuration, fits XGBoost on our features and on TVM's PerStoreFeature (as sums over the stores of a
program, and "packed" as TVM's own cost model does it), each with both labels, log(latency / reference) and
log(latency), and trains the original's network on the same rows. Of the variants of a baseline the one with the lowest
error on the validation part is shown. The test part is read once. ``--splits`` takes task, network, device and cpu;
device holds out each configuration in turn, cpu each CPU with all its configurations: all programs were seen on the
others, nothing on this one. Configurations of one CPU are near twins, which the result file names. These splits are
also evaluated after 40 measurements of the held-out configuration. PerStoreFeature needs TVM; its features are kept in
the user's cache. Networks that are held out are those of ``splits.parquet`` beside the records, or ``--test-networks
a,b``. ``--sealed LABEL`` evaluates the sealed networks, once per label; the result file records date and model. The
figures go into ``benchmarks/results/schedules.json``, split by split. :mod:`benchmarks.schedules.gpu` is ``gpu``,
:mod:`benchmarks.schedules.study` is ``study``, :mod:`benchmarks.schedules.search` is ``search``,
:mod:`benchmarks.schedules.new_device` is ``device``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.schedules import gpu, new_device, search, study
from benchmarks.schedules.document import add, check_unread, header, line, read, sealed_read
from benchmarks.schedules.methods import MEASURED, Contest, Predict, after_measurements, cost_ratio, figures, mean_of
from benchmarks.schedules.parts import Array, Scheduled
from cdmpp.errors import CdmppError
from cdmpp.model.nn.network import LatencyNetwork, parameter_count
from cdmpp.train.config import TrainConfig, load_config
from cdmpp.train.dataset import MeasuredRows
from cdmpp.train.evaluation.metrics import MIN_PROGRAMS
from cdmpp.train.reference.network import per_store_features, store_positions

OUT = Path("benchmarks/results/schedules.json")
SPLITS = ("task", "network", "device", "cpu")
ORIGINAL = "original's network"


class SplitStudy:
    """Evaluates splits one by one and adds each to the result file."""

    def __init__(self, data: Scheduled, config: TrainConfig, options: argparse.Namespace) -> None:
        self.data, self.config, self.options = data, config, options
        self.features: list[Array] = per_store_features(data.table.tvm.texts)
        self.preset = load_config(options.preset)
        self.lines: list[str] = []

    def methods(self, contest: Contest, network: LatencyNetwork) -> dict[str, Predict]:
        """Every method, fitted."""
        label, trees = contest.best(contest.trees("summed", None))
        store, per_store = contest.best(contest.per_store(self.features))
        ours = contest.predicts([network])
        result = {"cdmpp": ours, "cdmpp and XGBoost, mean": mean_of(ours, trees)}
        result |= {f"XGBoost, our features ({label})": trees, f"XGBoost, PerStoreFeature ({store})": per_store}
        original = {} if self.options.original == "without" else self.original(contest)
        return result | original | {"roofline": contest.roofline}

    def original(self, contest: Contest) -> dict[str, Predict]:
        """The original's network, fitted; its training goes into the result file."""
        model = contest.original(self.preset, self.features, store_positions(self.data.table.tvm.texts))
        error = figures(contest.dataset, contest.validation, model.predict_log(contest.validation))["mape"]
        summary = model.summary | {"parameters": parameter_count(model.network), "validation_mape": error}
        add(self.options.out, "original_training", contest.split.key, summary)
        return {ORIGINAL: model.predict_log}

    def evaluate(self, name: str) -> None:
        """Train on a split and evaluate its test part."""
        split = self.data.split(name, self.config)
        contest = Contest(self.data, split, self.config)
        if self.options.original == "only":
            self._report(contest, self.original(contest))
            return
        network = contest.network(Path(self.options.runs) / f"{self.config.name}-{name.replace(':', '-')}")
        if name == "sealed":  # recorded before the rows are read
            reading = sealed_read(network, self.data.sealed, contest.dataset.fingerprint)
            add(self.options.out, "sealed_reads", self.options.sealed, reading)
        methods = self.methods(contest, network)
        key, about = split.key, {"held_out_networks": list(self.data.test_networks)}
        rows = self._report(contest, methods)
        sample = rows.take(np.arange(min(len(rows), 2048)))
        costs = {m: cost_ratio(methods["cdmpp"], p, sample) for m, p in methods.items() if m.startswith("cdmpp ")}
        add(self.options.out, "inference_cost", key, costs, **about)
        if split.held_devices:
            add(self.options.out, "near_twins", key, list(split.twins), **about)
            others = {m: p for m, p in methods.items() if m != "cdmpp"}
            folder = Path(self.options.runs) / f"{self.config.name}-{name.replace(':', '-')}-model"
            adapted = after_measurements(self.data, contest, network, others, folder)
            add(self.options.out, "adapted", key, {"measurements": MEASURED, "configurations": adapted}, **about)
            for configuration, of_methods in adapted.items():
                after = f"{configuration}, {MEASURED} measured"
                self.lines += [line(after, method, entry["after"]) for method, entry in of_methods.items()]

    def _report(self, contest: Contest, methods: dict[str, Predict]) -> MeasuredRows:
        """Add figures of the test rows to the table and to the result file, where ``--original only`` keeps others."""
        key, (test,) = contest.split.key, contest.split.tests.values()
        rows = contest.dataset.rows.take(test)
        result = {method: figures(contest.dataset, rows, predict(rows)) for method, predict in methods.items()}
        kept = read(self.options.out).get("splits", {}).get(key, {}) if self.options.original == "only" else {}
        add(self.options.out, "splits", key, kept | result, held_out_networks=list(self.data.test_networks))
        self.lines += [line(key, method, of_method) for method, of_method in result.items()]
        return rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", default="configs/cpu.toml")
    parser.add_argument("--preset", default="configs/reference.toml", help="of the original's network")
    parser.add_argument("--data", help="dataset folder or records, in place of the configuration's")
    parser.add_argument("--splits", default="task,network", help="of task, network, device and cpu")
    parser.add_argument("--configurations", default="", help="a,b: of device and cpu, only these")
    parser.add_argument("--test-networks", default="", help="a,b; by default those of splits.parquet")
    parser.add_argument(
        "--original",
        choices=("with", "without", "only"),
        default="with",
        help="whether the original's network is trained; only: other results of a split stay",
    )
    parser.add_argument(
        "--sealed", metavar="LABEL", help="evaluate the sealed networks instead of --splits, once per label"
    )
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
    wanted = options.splits.split(",")
    if unknown := sorted(set(wanted) - set(SPLITS)):
        raise SystemExit(f"--splits: {', '.join(unknown)} is not one of {', '.join(SPLITS)}")
    try:
        if options.sealed:
            check_unread(options.out, options.sealed)
        held = tuple(filter(None, options.test_networks.split(",")))
        data = Scheduled.load(config, keep_sealed=bool(options.sealed), networks=held)
        study = SplitStudy(data, config, options)
        for name in ["sealed"] if options.sealed else _chosen(data, wanted, options.configurations):
            study.evaluate(name)
    except CdmppError as error:
        raise SystemExit(f"{error}\nhint: {error.hint}") from None
    held_out = ", ".join(data.test_networks) or "none"
    print(f"\nHeld-out networks: {held_out}. Ranked: tasks of {MIN_PROGRAMS} or more.\n")
    print(header())
    print("\n".join(study.lines))


def _chosen(data: Scheduled, wanted: list[str], configurations: str) -> list[str]:
    """Names of the splits to evaluate."""
    names: list[Any] = ["task"] if "task" in wanted else []
    names += ["network"] if "network" in wanted and data.test_networks else []
    only = set(filter(None, configurations.split(",")))
    for name in data.configurations():
        kind, _, of = name.partition(":")
        if kind in wanted and (not only or of in only):
            names.append(name)
    return names


if __name__ == "__main__":
    commands = {"device": new_device.main, "gpu": gpu.main, "study": study.main, "search": search.main}
    commands[sys.argv.pop(1)]() if commands.keys() & {*sys.argv[1:2]} else main()
