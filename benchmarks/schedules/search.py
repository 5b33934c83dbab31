"""Offline search among measured schedules (``python -m benchmarks.schedules search --public-data DIR``).

A pool holds the measured schedules of one task on one device; the model was not trained on the task. A method takes
them one after the other, in rounds of :data:`ROUND`, and reads the latencies of those that it took: in random order; by
TVM's XGBModel, which learns from the trials of the pool after a random first round; by the model's predictions; by
these with the correction of :class:`cdmpp.integrations.metaschedule.CdmppCostModel`, fitted after each round. No
schedule is mutated and nothing is run. Methods that learn need pools of more than one round.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report.results import STUDIES, Results, rounded, write_result
from benchmarks.report.schedules import search as report
from cdmpp.data.importers import TuningLogImporter
from cdmpp.data.load import find_public_tables, load_table
from cdmpp.data.raw import RawTable, read_raw
from cdmpp.data.split_file import without_sealed
from cdmpp.data.splits import PART_NAMES
from cdmpp.data.table import MeasurementTable
from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import CdmppError
from cdmpp.features.encode import TIR, EncodedPrograms, encode_many
from cdmpp.integrations.online import OnlineResiduals, summary
from cdmpp.model.artifact.model import Artifact
from cdmpp.predict.bulk import FeaturePart, FeatureQueries
from cdmpp.predict.predictor import LatencyPredictor, default_model
from cdmpp.train.evaluation.parts import row_parts
from cdmpp.train.reference.network import per_store_features

Array = np.ndarray[Any, np.dtype[Any]]
#: Trials of a round, and numbers of trials whose best latency is reported.
ROUND, TRIALS = 16, (4, 16, 32, 64)
#: Share of the pool's best speed at which a search is over.
SHARE = 0.95
SOURCES = ("ansor", "metaschedule")
#: Fewest schedules of a pool: of the logs, and of records, which have few of each task.
LEAST, LEAST_OF_RECORDS = 24, 8


@dataclass(frozen=True)
class SchedulePool:
    """Distinct programs of one task on one device."""

    source: str
    task: str
    device: DeviceSpec
    #: Programs as TVM JSON.
    texts: list[str]
    encoded: list[EncodedPrograms]
    latency_s: Array  #: (n,)

    def __len__(self) -> int:
        return len(self.texts)


def of_part(path: Path, importer: TuningLogImporter, artifact: Artifact, part: str, per_task: int) -> MeasurementTable:
    """Rows of a log whose task is in a part of the model's split; of other tasks one program is built, to know that."""
    raw = read_raw(path, importer.columns())
    first, number = importer.table(raw, 1), importer.read_tasks(raw, "")[0].codes
    chosen = first.source_row[first.predictable & (part_names(artifact, first) == part)]
    return importer.table(RawTable(raw.table.filter(np.isin(number, number[chosen])), raw.path), per_task)


def part_names(artifact: Artifact, table: MeasurementTable) -> Array:
    """Part of each row by name, (rows,); "" where it has none."""
    return np.array([PART_NAMES.get(code, "") for code in row_parts(artifact, table).tolist()], dtype=object)


def pools(artifact: Artifact, table: MeasurementTable, part: str, least: int) -> Iterator[SchedulePool]:
    """Pools of ``least`` programs or more, of the tasks in a part of the model's split."""
    table = table.select(np.flatnonzero(table.trainable & (table.latency_s > 0)))
    table = table.select(np.flatnonzero(part_names(artifact, table) == part))
    first, device = table.tvm.first_key, table.device.array()
    source, task = table.source.array(), np.array(table.tvm.tasks, dtype=object)[table.program_key - first]
    for name in sorted({*zip(source.tolist(), device.tolist(), task.tolist(), strict=True)}):
        rows = np.flatnonzero((source == name[0]) & (device == name[1]) & (task == name[2]))
        keys, index = np.unique(table.program_key[rows], return_index=True)
        if len(keys) < least or not name[2]:
            continue
        texts = [table.tvm.texts[key - first] for key in keys.tolist()]
        encoded = dict(enumerate(encode_many(texts, schedule=True)))
        good = {i: e for i, e in encoded.items() if isinstance(e, EncodedPrograms)}
        latency_s = table.latency_s[rows[index]][[*good]]
        if len(good) >= least:
            spec = table.device_spec(name[1])
            yield SchedulePool(name[0], name[2], spec, [texts[i] for i in good], [*good.values()], latency_s)


class OfflineSearch:
    """Methods on one pool: each gives the order of its trials by a seed, (trials,) int."""

    def __init__(self, pool: SchedulePool, predictor: LatencyPredictor) -> None:
        self.pool = pool
        parts = [FeaturePart(encoded, TIR, pool.device, "tvm") for encoded in pool.encoded]
        self.log_s = np.log(predictor.predict_features(FeatureQueries.of(parts)).latency_s)
        self.methods: dict[str, Callable[[int], Array]] = {"random order": self.random, "cdmpp, frozen": self.frozen}
        if len(pool) > ROUND:
            self.methods |= {"cdmpp, fine-tuned": self.tuned, "TVM's XGBModel": self.xgb}

    def random(self, seed: int) -> Array:
        """In random order."""
        return np.random.default_rng(seed).permutation(len(self.pool))

    def frozen(self, seed: int) -> Array:
        """By the predictions."""
        return np.argsort(self.log_s, kind="stable")

    def tuned(self, seed: int) -> Array:
        """By the predictions, corrected after each round."""
        online, rows = OnlineResiduals(), summary(self.pool.encoded)

        def values(taken: Array) -> Array:
            new = taken[len(online) :]
            if len(new):
                online.learn(rows[new], self.log_s[new], self.pool.latency_s[new].tolist())
            return self.log_s + online.correction(rows, self.log_s)

        return self.rounds(values)

    def xgb(self, seed: int) -> Array:
        """By TVM's own cost model, on features that are extracted once."""
        from tvm.s_tir.meta_schedule.cost_model.xgb_model import XGBConfig, XGBModel

        features = per_store_features(self.pool.texts, gpu=self.pool.device.kind == "gpu")
        model, first = XGBModel(config=XGBConfig(seed=seed, nthread=1)), self.random(seed).astype(float)

        def values(taken: Array) -> Array:
            if not len(taken):
                return first
            latency_s = self.pool.latency_s[taken]
            model._train([features[i] for i in taken], (latency_s.min() / latency_s).astype(np.float32))
            return -np.asarray(model._predict(features))

        return self.rounds(values)

    def rounds(self, values: Callable[[Array], Array]) -> Array:
        """Take the programs with the lowest values given the trials so far, round by round, until the search ends."""
        taken, latency_s = np.zeros(0, dtype=np.int64), self.pool.latency_s
        while len(taken) < len(self.pool):
            if len(taken) >= TRIALS[-1] and latency_s[taken].min() * SHARE <= latency_s.min():
                break
            rest = np.setdiff1d(np.arange(len(self.pool)), taken)
            taken = np.concatenate([taken, rest[np.argsort(values(taken)[rest], kind="stable")[:ROUND]]])
        return taken

    def figures(self, method: str, seed: int) -> dict[str, float]:
        """``trials`` of a search, and speed relative to the pool's best program after some trials."""
        best = self.pool.latency_s.min()
        speed = best / np.minimum.accumulate(self.pool.latency_s[self.methods[method](seed)])
        after = {f"speed_{n}": float(speed[n - 1]) for n in TRIALS if n < len(self.pool)}
        return {"trials": 1 + int(np.argmax(speed >= SHARE)), **after}


def group(searches: Sequence[OfflineSearch], seeds: int) -> dict[str, Any]:
    """Figures of pools: mean and median number of trials, geometric mean of the speeds."""
    sizes = [len(search.pool) for search in searches]
    result: dict[str, Any] = {"pools": len(sizes), "programs": sum(sizes), "methods": {}}
    for method in {name: None for search in searches for name in search.methods}:
        runs = [s.figures(method, seed) for s in searches if method in s.methods for seed in range(seeds)]
        trials = [run["trials"] for run in runs]
        result["methods"][method] = {"trials": float(np.mean(trials)), "median_trials": float(np.median(trials))}
        for key in [f"speed_{n}" for n in TRIALS]:
            speeds = [run[key] for run in runs if key in run]
            result["methods"][method][key] = float(np.exp(np.mean(np.log(speeds)))) if speeds else None
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table and write the result file."""
    study = STUDIES["schedules_search"]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.schedules search", description=__doc__)
    parser.add_argument("--public-data", type=Path, help="folder of the public tables; default $CDMPP_PUBLIC_DATA")
    parser.add_argument("--records", default="data/cdmpp-measured", help="records with further pools")
    parser.add_argument("--model", type=Path, help="model folder; default: the shipped model")
    parser.add_argument("--part", choices=tuple(PART_NAMES.values()), default="test", help="of the model's split")
    parser.add_argument("--per-task", type=int, default=300, help="schedules of a task and device, at most")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=study.path)
    options = parser.parse_args(arguments)
    try:
        predictor = LatencyPredictor.load(options.model or default_model())
        artifact, part = predictor.artifact, options.part
        results = list(
            pools(artifact, without_sealed(load_table(options.records), [options.records]), part, LEAST_OF_RECORDS)
        )
        for table in find_public_tables(options.public_data, SOURCES):
            assert isinstance(table.importer, TuningLogImporter)
            rows = of_part(table.path, table.importer, artifact, part, options.per_task)
            results += pools(artifact, rows, part, LEAST)
    except CdmppError as error:
        raise SystemExit(f"{error}\nhint: {error.hint}") from None
    by_group: dict[str, list[OfflineSearch]] = {}
    for pool in results:
        source = pool.source if pool.source in SOURCES else "records"
        by_group.setdefault(f"{source}, {pool.device.name}", []).append(OfflineSearch(pool, predictor))
    logs = [s for searches in by_group.values() for s in searches if s.pool.source in SOURCES]
    groups = {"all logs": logs, **by_group}
    result = {
        "command": study.command,
        "model": predictor.model_id,
        "part": part,
        "per_task": options.per_task,
        "seeds": options.seeds,
        "groups": {name: group(searches, options.seeds) for name, searches in groups.items() if searches},
    }
    write_result(options.out, rounded(result))
    print(report(Results({"schedules_search": result})))
