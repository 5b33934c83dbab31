"""Methods that predict scheduled programs, fitted on one split: our network, XGBoost, the original, the roofline."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks.report.markdown import percent
from benchmarks.schedules.parts import Array, Scheduled, ScheduleSplit
from benchmarks.schedules.per_store import PackedSum, summed
from cdmpp.model.nn.batch import NetworkInputs, predict_rows
from cdmpp.model.nn.network import LatencyNetwork, parameter_count
from cdmpp.train.baselines import TreeBaseline, roofline_log
from cdmpp.train.config import TrainConfig
from cdmpp.train.dataset import Dataset, MeasuredRows
from cdmpp.train.evaluation.metrics import measure, rank
from cdmpp.train.fit import train, training_rows
from cdmpp.train.reference.train import ReferenceModel

Predict = Callable[[MeasuredRows], Array]
Label = Literal["ratio", "latency"]
LABELS: tuple[Label, ...] = ("ratio", "latency")


class Contest:
    """All methods on one split.

    ``config``: of the network and of XGBoost; the split replaces its parts and its held-out devices.
    """

    def __init__(self, data: Scheduled, split: ScheduleSplit, config: TrainConfig) -> None:
        held = config.data.model_copy(update={"holdout_devices": split.held_devices})
        self.config = config.model_copy(update={"data": held})
        self.split, self.dataset = split, data.with_part(split.part)
        self.inputs = NetworkInputs(self.dataset.store, self.dataset.device_matrix)
        self.train = training_rows(self.dataset, self.config)[0]
        rows = self.dataset.rows
        unseen = np.isin(rows.device, [i for i, d in enumerate(self.dataset.devices) if d.name in split.held_devices])
        self.validation = rows.take(np.flatnonzero((rows.part == 1) & ~unseen))
        #: A configuration that is held out is unknown to the network.
        self.known = not split.held_devices

    def network(self, run: Path, seed: int = 0) -> LatencyNetwork:
        """Our network, trained in a run folder or read from it."""
        config = self.config.model_copy(update={"seed": self.config.seed + seed})
        network, summary = train(self.dataset, config, run)
        rows, minutes = summary["train_rows"], summary["train_seconds"] / 60
        print(f"{rows:,} training rows, {parameter_count(network):,} parameters, {minutes:.1f} minutes", flush=True)
        return network

    def predicts(self, networks: Sequence[LatencyNetwork]) -> Predict:
        """Mean of the networks' log latencies."""
        return lambda rows: np.mean([predict_rows(n, self.inputs, rows, known=self.known)[0] for n in networks], axis=0)

    def best(self, variants: dict[str, Callable[[], Predict]]) -> tuple[str, Predict]:
        """The variant with the lowest error on the validation part."""
        if len(variants) == 1:
            ((only, make),) = variants.items()
            return only, make()
        fitted = {name: make() for name, make in variants.items()}
        errors = {
            name: figures(self.dataset, self.validation, p(self.validation))["mape"] for name, p in fitted.items()
        }
        print("validation: " + ", ".join(f"{name} {percent(error)}" for name, error in errors.items()), flush=True)
        name = min(errors, key=errors.__getitem__)
        return name, fitted[name]

    def trees(self, name: str, programs: Array | None) -> dict[str, Callable[[], Predict]]:
        """XGBoost on one row per program, with both labels."""

        def make(label: Label) -> Predict:
            model = TreeBaseline(self.dataset, self.inputs, self.config, programs=programs, label=label)
            return model.fit(self.train).predict_log

        return {f"{name}, {label}": lambda label=label: make(label) for label in LABELS}

    def per_store(self, features: list[Array]) -> dict[str, Callable[[], Predict]]:
        """XGBoost on PerStoreFeature: one row per program, or one per store ("packed"), with both labels."""
        return self.trees("summed", summed(features)) | self._packed(features)

    def _packed(self, features: list[Array]) -> dict[str, Callable[[], Predict]]:
        options = {
            "max_depth": 9,
            "eta": 0.1,
            "subsample": 0.8,
            "colsample_bytree": 0.6,
            "tree_method": "hist",
            "nthread": self.config.optimiser.threads or 2,
            "seed": self.config.seed,
        }
        rows = self.dataset.rows.take(self.train)

        def make(label: Label) -> Predict:
            def base(rows: MeasuredRows) -> Array:
                return self.inputs.reference(rows) if label == "ratio" else np.zeros(len(rows))

            model = PackedSum(features, options, self.config.finish.xgboost_trees)
            model.fit(rows.program, self._device(rows), rows.log_latency - base(rows))
            return lambda queries: model.predict(queries.program, self._device(queries)) + base(queries)

        return {f"packed, {label}": lambda label=label: make(label) for label in LABELS}

    def _device(self, rows: MeasuredRows) -> Array:
        with np.errstate(divide="ignore"):
            columns = np.log2(self.dataset.device_matrix[rows.device])
        if self.known:
            columns = np.concatenate([columns, rows.device[:, None]], axis=1)
        return np.nan_to_num(columns, nan=-1.0, posinf=-1.0, neginf=-1.0).astype(np.float32)

    def original(self, preset: TrainConfig, features: list[Array], positions: list[Array]) -> ReferenceModel:
        """The original's network, trained by its own configuration on the same rows."""
        optimiser = replace(preset.optimiser, threads=self.config.optimiser.threads)
        config = preset.model_copy(update={"data": self.config.data, "optimiser": optimiser})
        return ReferenceModel(self.dataset, config, features, positions).fit(self.train)

    def roofline(self, rows: MeasuredRows) -> Array:
        """log of max(arithmetic at peak, traffic at bandwidth) + launch floor."""
        return roofline_log(self.dataset, rows)


def mean_of(first: Predict, second: Predict) -> Predict:
    """Mean of two methods' log latencies."""
    return lambda rows: (first(rows) + second(rows)) / 2


def figures(dataset: Dataset, rows: MeasuredRows, predicted_log: Array) -> dict[str, Any]:
    """Errors over all rows and per device, and order within tasks."""
    predicted, latency = np.exp(predicted_log), np.exp(rows.log_latency)
    result = measure(predicted, latency) | rank(predicted, latency, dataset.group(rows), rows.program)
    devices = {}
    for code in np.unique(rows.device).tolist():
        here = rows.device == code
        devices[dataset.devices[code].name] = {
            "n": int(here.sum()),
            "mape": float(np.abs(predicted[here] / latency[here] - 1).mean()),
        }
    return result | {"devices": devices}


def cost_ratio(first: Predict, second: Predict, rows: MeasuredRows, rounds: int = 5) -> float:
    """CPU time of the second method over the first, both in turns in one process: the median of the rounds."""
    ratios = []
    for _ in range(rounds):
        seconds = []
        for predict in (first, second):
            started = time.process_time()
            predict(rows)
            seconds.append(time.process_time() - started)
        ratios.append(seconds[1] / max(seconds[0], 1e-9))
    return float(np.median(ratios))
