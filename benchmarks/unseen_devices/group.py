"""Measurements of one group of held-out devices."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.intervals import NOMINAL, auc, coverage_curve
from benchmarks.report.results import rounded
from benchmarks.unseen_devices.study import ENOUGH, ROWS_PER_TABLE, Array, Study, figures, sample
from cdmpp.model.artifact.model import Artifact
from cdmpp.model.inference.pipeline import InferencePipeline
from cdmpp.model.nn.batch import NetworkInputs
from cdmpp.train.adaptation.adapt import adapt, answers_after
from cdmpp.train.adaptation.records import DeviceRecords, Survey, survey
from cdmpp.train.baselines import fit_baselines
from cdmpp.train.config import TrainConfig
from cdmpp.train.dataset import Dataset
from cdmpp.train.evaluation.cache import FeatureCache
from cdmpp.train.evaluation.query_batches import query_parts
from cdmpp.train.fit import training_rows

#: Relative error beyond which a prediction is off, for the domain score.
OFF = 0.3
#: Maximum number of validation rows of known devices.
KNOWN_ROWS = 10_000
#: Numbers of measurements to adapt to, and seeds of their choice; MANY only on the sources of the headline.
FEW, MANY, SEEDS = (10, 40), (100,), (0, 1, 2)
#: Samplers are compared once per group and source of the headline, on the first device with that source.
DEFAULT, OTHERS = "kmeans", ("random", "variance")
COMPARED = ("neusight", "aiconfigurator_gemm")


@dataclass(frozen=True)
class DeviceTable:
    """Rows of one device and source, with the network's predictions."""

    device: str
    source: str
    records: DeviceRecords
    #: Predictions of the records by the network.
    known: Survey
    #: Rows of the study, in the survey's order; ``log_measured`` and ``family`` are in the same order.
    rows: Array
    log_measured: Array
    family: Array
    #: Entry of the results file.
    entry: dict[str, Any]

    def predictions(self) -> tuple[Array, Array, Array]:
        """Predicted point, quantiles and interval factor of each row."""
        known = self.known
        return known.point[known.query], known.levels[known.query], known.factor[known.query]


class HeldOutGroup:
    """Evaluates one group's network on the rows of its devices.

    ``config``: training configuration that holds the group's devices out. ``dataset``: dataset of the training run.
    ``artifact``: the network.
    """

    def __init__(self, study: Study, config: TrainConfig, dataset: Dataset, artifact: Artifact) -> None:
        self.study, self.config, self.dataset, self.artifact = study, config, dataset, artifact
        self.held_out = config.data.holdout_devices
        self.cache = FeatureCache(schedule=artifact.reads_schedules)
        self._pipeline = InferencePipeline(artifact)

    def measure(self) -> Iterator[dict[str, Any]]:
        """Yield the group's entry of the results file after each part that is added to it."""
        started = time.monotonic()
        train = self.artifact.manifest["train"]
        tables: list[DeviceTable] = []
        entry: dict[str, Any] = {
            "model_id": self.artifact.model_id,
            "held_out": list(self.held_out),
            "train": {key: train[key] for key in ("steps", "train_rows", "train_seconds")},
            "tables": [],
        }
        for batch in self._tables():
            tables.append(batch)
            entry["tables"].append(batch.entry)
            batch.entry["ceilings"], batch.entry["sustained"] = self._with_ceilings(batch)
            self._adapt(batch, DEFAULT, FEW)
            yield entry
        entry["known"], entry["domain"] = self._domain(tables)
        yield entry
        compared = [batch for source in COMPARED for batch in [t for t in tables if t.source == source][:1]]
        for batch, sampler in itertools.product(compared, OTHERS):
            self._adapt(batch, sampler, FEW)
            yield entry
        for batch in tables:
            if batch.source in COMPARED:
                self._adapt(batch, DEFAULT, MANY)
                yield entry
        self._baselines(tables)
        entry["seconds"] = round(time.monotonic() - started)
        yield entry

    def _tables(self) -> Iterator[DeviceTable]:
        """The group's tables with predictions made without measurements of the device."""
        for device in self.held_out:
            for source in self.dataset.sources:
                available = self.study.rows_of(device, source)
                if len(available) < ENOUGH:
                    continue
                rows = sample(available, ROWS_PER_TABLE, [self.config.seed, 21])
                records = self.study.records(rows, self.study.device(device).nominal(), self.artifact)
                known = survey(self._pipeline, records, self.cache)
                # Surveyed rows come in another order, by program.
                chosen = rows[records.origin[known.rows]]
                logs, family = self.dataset.rows.log_latency[chosen], self.study.family[chosen]
                entry: dict[str, Any] = {
                    "device": device,
                    "source": source,
                    "available": len(available),
                    "rows": len(chosen),
                }
                batch = DeviceTable(device, source, records, known, chosen, logs, family, entry)
                point, levels, factor = batch.predictions()
                curve = coverage_curve(logs, point, levels, factor)
                entry |= {
                    "specification": figures(logs, point, family, levels, factor),
                    "coverage_curve": {"nominal": list(NOMINAL), "empirical": curve},
                    "ceilings": None,
                    "sustained": None,
                    "baselines": {},
                    "adapted": [],
                }
                self._print(batch, "specification", entry["specification"])
                yield batch

    def _with_ceilings(self, batch: DeviceTable) -> tuple[dict[str, Any] | None, dict[str, float] | None]:
        """Errors with measured peak rates in place of the data sheet, and these rates; None without training rows."""
        spec = self.study.device(batch.device)
        if spec.sustained is None:
            return None, None
        rows = np.sort(batch.rows)
        records = self.study.records(rows, spec, self.artifact)
        known = survey(self._pipeline, records, self.cache)
        chosen = rows[records.origin[known.rows]]
        logs, family = self.dataset.rows.log_latency[chosen], self.study.family[chosen]
        with_rates = DeviceTable(batch.device, batch.source, records, known, chosen, logs, family, {})
        point, levels, factor = with_rates.predictions()
        results = figures(with_rates.log_measured, point, with_rates.family, levels, factor)
        self._print(batch, "ceilings", results)
        return results, spec.sustained.figures()

    def _adapt(self, batch: DeviceTable, sampler: str, counts: Sequence[int]) -> None:
        """Adapt to measurements; add the errors before and after on the rows that were not chosen."""
        known, records = batch.known, batch.records
        for seed, k in itertools.product(SEEDS, counts):
            made = adapt(self.artifact, records, k=k, sampler=sampler, seed=seed, cache=self.cache, known=known)
            adapter = made.artifact.adapter
            assert adapter is not None
            rest = ~np.isin(records.origin[known.rows], made.report["selected"])
            query, logs, family = known.query[rest], batch.log_measured[rest], batch.family[rest]
            before = [column[query] for column in (known.point, known.levels, known.factor)]
            after = [column[query] for column in answers_after(made.artifact, known)]
            adaptation = {
                "k": k,
                "sampler": sampler,
                "seed": seed,
                "before": figures(logs, before[0], family, *before[1:]),
                "after": figures(logs, after[0], family, *after[1:]),
                "weight": adapter.weight,
                "width": round(adapter.width, 4),
            }
            batch.entry["adapted"].append(adaptation)
            self._print(batch, f"{sampler} k = {k} seed {seed}", adaptation["after"])

    def _baselines(self, tables: list[DeviceTable]) -> None:
        """Fit the baselines on the network's training rows and evaluate them on the tables."""
        inputs = NetworkInputs(self.dataset.store, self.dataset.device_matrix)
        index = training_rows(self.dataset, self.config)[0]
        fitted = fit_baselines(self.dataset, inputs, self.config, index, self.config.finish.baselines)
        for batch in tables:
            rows = self.dataset.rows.take(batch.rows)
            for name, baseline in fitted.items():
                errors = figures(batch.log_measured, baseline.predict_log(rows), batch.family)
                batch.entry["baselines"][name] = errors
                self._print(batch, name, errors)

    def _domain(self, tables: list[DeviceTable]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Error on validation rows of known devices, and the domain score's AUC for predictions that are off."""
        rows, names = self.dataset.rows, [d.name for d in self.dataset.devices]
        held = [names.index(name) for name in self.held_out]
        index = np.flatnonzero((rows.part == 1) & ~np.isin(rows.device, held))
        index = sample(index, KNOWN_ROWS, [self.config.seed, 22])
        index = index[np.argsort(rows.program[index], kind="stable")]
        columns = []
        for part in query_parts(self.study.table, index, self.cache, half_type=self._pipeline.half_type):
            output = self._pipeline.forward(part.batch)
            same = (c[part.position] for c in (output.point, output.levels, output.factor, output.score))
            columns.append((index[part.index], *same))
        chosen, point, levels, factor, score = (np.concatenate(c) for c in zip(*columns, strict=True))
        logs = rows.log_latency[chosen]
        known = figures(logs, point, self.study.family[chosen], levels, factor)["overall"]
        unseen = np.concatenate([batch.known.score[batch.known.query] for batch in tables])
        off = np.concatenate([_off(batch.predictions()[0], batch.log_measured) for batch in tables])
        off_known = _off(point, logs)
        return known, rounded(
            {
                "off": OFF,
                "auc_held_out": auc(unseen, off),
                "auc_pooled": auc(np.concatenate([unseen, score]), np.concatenate([off, off_known])),
                "n_held_out": len(unseen),
                "n_known": len(score),
                "off_held_out": float(off.mean()),
                "off_known": float(off_known.mean()),
            }
        )

    def _print(self, batch: DeviceTable, what: str, results: dict[str, Any]) -> None:
        """Print a line of progress."""
        error, macro = 100 * results["overall"]["mape"], 100 * results["macro"]
        print(f"{batch.device} {batch.source}, {what}: {error:.1f} % (macro {macro:.1f} %)", flush=True)


def _off(point: Array, log_measured: Array) -> Array:
    return np.asarray(np.abs(np.expm1(point - log_measured)) > OFF)
