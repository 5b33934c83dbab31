"""Methods that predict scheduled programs, fitted on one split: our network, XGBoost, the original, the roofline.

:func:`after_measurements` has their error on a configuration without training rows, after some of its programs were
measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks.report.markdown import percent
from benchmarks.schedules.parts import Array, Scheduled, ScheduleSplit
from cdmpp.model.adapter import centre_and_spread
from cdmpp.model.artifact.load import load_artifact
from cdmpp.model.artifact.trained import save_artifact
from cdmpp.model.inference.pipeline import InferencePipeline
from cdmpp.model.nn.batch import NetworkInputs, predict_rows
from cdmpp.model.nn.network import LatencyNetwork, parameter_count
from cdmpp.programs.frontends.per_store import WIDTH
from cdmpp.train.adaptation.adapt import MeasuredQueries, adapt, answers_after, fit_process
from cdmpp.train.adaptation.records import device_records, survey
from cdmpp.train.baselines import TreeBaseline, roofline_log
from cdmpp.train.config import TrainConfig
from cdmpp.train.dataset import Dataset, MeasuredRows
from cdmpp.train.evaluation.cache import FeatureCache
from cdmpp.train.evaluation.metrics import measure, rank
from cdmpp.train.finish import calibrate, fit_domain
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


def summed(features: Sequence[Array]) -> Array:
    """Per program the sum over its stores (of magnitudes, then log2 again), and how many they are."""
    out = np.empty((len(features), WIDTH + 1), dtype=np.float32)
    for i, rows in enumerate(features):
        plain = np.exp2(rows.astype(np.float64)) - 1
        out[i, :WIDTH] = np.log2(1 + np.maximum(plain.sum(axis=0), 0))
        out[i, WIDTH] = len(rows)
    return out


class PackedSum:
    """Trees over single stores whose outputs are summed over the stores of a program.

    What TVM's XGBModel does ("pack-sum"), with a squared error on the label at hand. Rows of one program may
    be predicted on several devices: columns of the query are repeated for each of its stores.

    ``features``, (stores, 164): by program. ``options``: of xgboost.train.
    """

    def __init__(self, features: Sequence[Array], options: dict[str, Any], trees: int) -> None:
        self.features, self.options, self.trees = features, options, trees
        self.model: Any = None

    def _rows(self, program: Array, query: Array) -> tuple[Array, Array]:
        counts = np.array([len(self.features[key]) for key in program])
        owner = np.repeat(np.arange(len(program)), counts)
        stores = np.concatenate([self.features[key] for key in program])
        return np.concatenate([stores, query[owner]], axis=1), owner

    def fit(self, program: Array, query: Array, target: Array) -> PackedSum:
        """Fit on rows (program key, columns of the query) and their label."""
        import xgboost

        table, owner = self._rows(program, query)
        share = 1.0 / np.bincount(owner)

        def gradient(predicted: Array, _: Any) -> tuple[Array, Array]:
            error = np.bincount(owner, weights=predicted) - target
            # The step of every store moves the sum: curvature is shared among them.
            return error[owner], (1.0 / share)[owner]

        # Every store starts with its share of the mean label.
        self.base = float(target.mean())
        margin = (share * self.base)[owner]
        data = xgboost.DMatrix(table, base_margin=margin)
        self.model = xgboost.train(self.options, data, num_boost_round=self.trees, obj=gradient)
        return self

    def predict(self, program: Array, query: Array) -> Array:
        """Label of rows."""
        import xgboost

        table, owner = self._rows(program, query)
        margin = (self.base / np.bincount(owner))[owner]
        per_store = self.model.predict(xgboost.DMatrix(table, base_margin=margin), output_margin=True)
        return np.asarray(np.bincount(owner, weights=per_store))


MEASURED, SEEDS = 40, (0, 1, 2)


def after_measurements(
    data: Scheduled, contest: Contest, network: LatencyNetwork, baselines: Mapping[str, Predict], folder: Path
) -> dict[str, dict[str, Any]]:
    """Figures of each method on each held-out configuration before and after :data:`MEASURED` measurements.

    ``cdmpp adapt`` chooses the programs by KMeans and adapts the network, which was trained on the split of ``contest``
    that holds configurations out; ``folder`` is the model folder to write. A Gaussian process with the same inputs is
    fitted to the residuals of each of ``baselines`` (log latency of rows, by name of the method) on the same measured
    programs. Figures are of the other programs, means over :data:`SEEDS`: configuration -> method -> ``before``,
    ``after``.
    """
    dataset, held = contest.dataset, contest.split.held_devices
    save_artifact(
        folder,
        network,
        fit_domain(dataset, contest.train, contest.config.seed),
        name=contest.config.name,
        devices=["" if d.name in held else d.name for d in dataset.devices],
        calibration=calibrate(network, contest.inputs, dataset, contest.config),
        device_specs=dataset.devices,
        details={"config": contest.config.model_dump(mode="json")},
    )
    artifact = load_artifact(folder)
    pipeline, cache = InferencePipeline(artifact), FeatureCache(schedule=artifact.reads_schedules)
    test = next(iter(contest.split.tests.values()))
    result: dict[str, dict[str, Any]] = {}
    for name in held:
        code = next(i for i, d in enumerate(dataset.devices) if d.name == name)
        index = test[dataset.rows.device[test] == code]
        records = device_records(data.table.select(index), dataset.devices[code], artifact)
        known = survey(pipeline, records, cache)
        position = records.origin[known.rows]
        per_seed: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {}
        for seed in SEEDS:
            made = adapt(artifact, records, k=MEASURED, seed=seed, cache=cache, known=known)
            chosen = np.isin(position, made.report["selected"])
            rest = dataset.rows.take(index[position[~chosen]])
            measured = dataset.rows.take(index[position[chosen]])
            near, far = known.query[chosen], known.query[~chosen]
            pairs = {"cdmpp": (known.point[far], answers_after(made.artifact, known)[0][far])}
            for method, predict in baselines.items():
                queries = known.levels[near], known.features.take(near)
                fitted = fit_process(MeasuredQueries(measured.log_latency, predict(measured), *queries))
                mean, variance = fitted.process.mean_and_variance(known.features.take(far))
                before, levels = predict(rest), known.levels[far]
                after = centre_and_spread(fitted.process, before, levels, mean, variance, fitted.weight)[0]
                pairs[method] = (before, after)
            for method, (before, after) in pairs.items():
                entry = tuple(figures(dataset, rest, log) for log in (before, after))
                per_seed.setdefault(method, []).append(entry)  # type: ignore[arg-type]
        result[name] = {
            method: {key: _mean([pair[i] for pair in entries]) for i, key in enumerate(("before", "after"))}
            for method, entries in per_seed.items()
        }
    return result


def _mean(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean of each figure over seeds; None where a seed has none."""
    keys = [key for key in entries[0] if key != "devices"]
    values = {key: [entry[key] for entry in entries] for key in keys}
    means = {key: None if None in column else float(np.mean(column)) for key, column in values.items()}
    # Counts are the same for every seed.
    return means | {key: entries[0][key] for key in ("n", "ranked_groups")}
