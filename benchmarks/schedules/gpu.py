"""Ansor's schedules on GPUs: unseen tasks and devices, by columns of launches (``python -m benchmarks.schedules gpu``).

XGBoost predicts log(latency / reference) from :mod:`cdmpp.model.nn.launch_inputs` and a program's columns. Folds are by
task (workload and epilogue). The ablation leaves out one group of columns at a time. A device that is left out is
predicted from its data sheet, then after measurements that KMeans chooses, by a Gaussian process on the residuals.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import xgboost
from sklearn.cluster import KMeans
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel

import cdmpp
from benchmarks.report.results import STUDIES, Results, rounded, write_result
from benchmarks.report.schedules import GPU_METRICS, GPUS, gpu
from cdmpp.data.importers import ansor_program
from cdmpp.data.load import public_data_dir
from cdmpp.devices.registry import lookup
from cdmpp.errors import CdmppError
from cdmpp.features.encode import encode_tvm_json
from cdmpp.features.launch_columns import launch_columns
from cdmpp.features.launch_schema import GPU_COLUMNS, GPU_FLAGS, GPU_WIDTH
from cdmpp.features.statements import Recorder
from cdmpp.model.nn.figures import device_numbers
from cdmpp.model.nn.launch_inputs import LAUNCH_INPUTS, RESOURCES, launch_inputs
from cdmpp.programs.frontends.per_store import extract
from cdmpp.programs.tvm_json import load
from cdmpp.train.evaluation.cache import cache_dir
from cdmpp.train.evaluation.metrics import measure, rank
from cdmpp.utils.writing import replacing

Array = np.ndarray[Any, np.dtype[Any]]
Row = dict[str, Any]
FOLDS, FASTEST, SEEDS, MEASURED, ENCODED = 5, 2, 3, (40, 100), 100
TREES: dict[str, Any] = {"n_estimators": 400, "max_depth": 5, "learning_rate": 0.05, "min_child_weight": 20}
TREES |= {"subsample": 0.8, "colsample_bytree": 0.6, "objective": "reg:absoluteerror"}
#: Groups of columns (:func:`program_columns`), each left out in turn.
GROUPS = {
    "launch shape and occupancy": "occupancy waves fill active_warps shared_share threads vthreads lane_use kernel",
    "times of resources": " ".join(["latency", *(f"kernel_{name}" for name in RESOURCES)]),
    "requests per access": "global_load_sectors/global_loads global_store_sectors/global_stores active_lanes overhang "
    "shared_load_cycles/shared_loads shared_store_cycles/shared_stores ops/loads ops/global_loads global_loads "
    "global_vector_bytes shared_vector_bytes",
    "shape of the code": "unroll_limit straight_body spilled_words loop_steps/work index_ops/work barriers/work "
    "slow_ops/work",
    "registers": "spilled local_words accumulators",
}


def sample(rows: Sequence[Row], programs: int, seed: int = 0) -> list[Row]:
    """Tasks and devices take turns, each with its two fastest programs first, then random ones."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["device"], row["workload"], row["epilogue"]), []).append(row)
    random, turns = np.random.default_rng(seed), []
    for _, group in sorted(groups.items()):
        group.sort(key=lambda row: row["latency_us"])
        others = FASTEST + random.permutation(max(len(group) - FASTEST, 0))
        turns += list(enumerate([*group[:FASTEST], *(group[i] for i in others)]))
    return [row for _, row in sorted(turns, key=lambda item: item[0])[:programs]]


def columns_of(row: Row) -> Array:
    """Columns of the leaves of a row's program; none where it is refused."""
    try:
        nodes, root = load(ansor_program(row["workload"], row["steps"], epilogue=row["epilogue"]).tvm_json or "")
        recorder = Recorder(nodes, {})
        recorder.build(root)
        return launch_columns(recorder)
    except CdmppError:
        return np.zeros((0, GPU_WIDTH), np.float32)


def cached_columns(rows: Sequence[Row], jobs: int) -> list[Array]:
    """:func:`columns_of` rows, kept in the user's cache for the same rows and the same sources of the features."""
    root = Path(cdmpp.__file__).parent
    sources = (root / "data/importers/ansor.py", *sorted((root / "features").glob("*.py")))
    key = hashlib.sha256(json.dumps(rows).encode() + b"".join(path.read_bytes() for path in sources)).hexdigest()
    path = cache_dir() / "launch-columns" / f"{key[:24]}.npz"
    if not path.exists():
        with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
            built = list(pool.map(columns_of, rows, chunksize=50))
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as aside, aside.open("wb") as file:
            np.savez_compressed(file, rows=np.concatenate(built), counts=[len(part) for part in built])
    with np.load(path, allow_pickle=False) as kept:
        return np.split(kept["rows"], np.cumsum(kept["counts"])[:-1])


def encoding(rows: Sequence[Row]) -> dict[str, float]:
    """Processor milliseconds of a program, least of three runs: TVM's module to features, and TVM's PerStoreFeature.

    PerStoreFeature is extracted from schedules that are at hand; ours start with ``save_json``.
    """
    from tvm import ir

    texts = [ansor_program(row["workload"], row["steps"], epilogue=row["epilogue"]).tvm_json or "" for row in rows]
    modules = [ir.load_json(text) for text in texts]
    per_store = [partial(extract, [text]) for text in texts]
    ours = [partial(lambda module: encode_tvm_json(str(ir.save_json(module)), schedule=True), m) for m in modules]
    parsing = [partial(ir.load_json, text) for text in texts]

    def least_ms(calls: Sequence[Callable[[], Any]]) -> float:
        seconds = []
        for _ in range(3):
            start = time.process_time()
            for call in calls:
                call()
            seconds.append(time.process_time() - start)
        return 1e3 * min(seconds) / len(calls)

    per_store_ms, encode_ms = least_ms(per_store) - least_ms(parsing), least_ms(ours)
    ratio = per_store_ms / encode_ms
    return {"programs": len(rows), "encode_ms": encode_ms, "per_store_ms": per_store_ms, "ratio": ratio}


def program_columns(leaves: Array, devices: Array) -> tuple[dict[str, Array], Array]:
    """Columns of :data:`GROUPS` by name, (rows,) each, and the log of the reference.

    Inputs are those of the leaf with the largest share of the time, columns of leaves the largest ones (flags: the
    smallest), ratios the log2 of a ratio of sums over leaves. Shapes are those of :func:`launch_inputs`.
    """
    inputs, log_reference = launch_inputs(leaves, devices)
    real = leaves[..., GPU_COLUMNS.index("threads")] > 0
    main = inputs[np.arange(len(leaves)), inputs[..., LAUNCH_INPUTS.index("kernel_share")].argmax(axis=1)]
    sums = dict(zip(GPU_COLUMNS, (np.exp2(leaves.astype(np.float64)) - 1).sum(axis=1).T, strict=True))
    sums["ops"] = sums["float_ops"] + sums["int_ops"] + 4 * sums["slow_ops"]
    sums["loads"] = sums["global_loads"] + sums["shared_loads"]
    sums["work"] = sums["ops"] + sums["loads"]

    def column(name: str) -> Array:
        if name in LAUNCH_INPUTS:
            return np.asarray(main[:, LAUNCH_INPUTS.index(name)])
        if "/" in name:
            a, b = (sums[part] + 1e-3 for part in name.split("/"))
            return np.asarray(np.log2(a / b))
        values = leaves[..., GPU_COLUMNS.index(name)]
        return np.asarray(np.where(real, values, 1).min(axis=1) if name in GPU_FLAGS else values.max(axis=1))

    return {name: column(name) for names in GROUPS.values() for name in names.split()}, log_reference


class GpuStudy:
    """Rows of the table with the columns of their leaves, and figures of what is predicted of them."""

    def __init__(self, rows: Sequence[Row], columns: Sequence[Array], jobs: int) -> None:
        specs = {name: lookup(name) for name in {row["device"] for row in rows}}
        self.jobs, self.device = jobs, np.array([specs[row["device"]].name for row in rows])
        self.task = np.unique([row["workload"] + row["epilogue"] for row in rows], return_inverse=True)[1]
        self.log_latency = np.log([row["latency_us"] * 1e-6 for row in rows])
        leaves = np.zeros((len(rows), max(map(len, columns)), GPU_WIDTH), np.float32)
        for i, part in enumerate(columns):
            leaves[i, : len(part)] = part
        devices = np.stack([device_numbers(specs[row["device"]]) for row in rows])
        self.columns, self.log_reference = program_columns(leaves, devices)

    def predict(self, train: Array, without: str = "", *, one_hot: bool = True) -> Array:
        """Log latencies of all rows by XGBoost, fitted on the rows of a mask, without a group of columns."""
        names = [name for group, names in GROUPS.items() if group != without for name in names.split()]
        known = [self.device == name for name in np.unique(self.device)] if one_hot else []
        matrix = np.stack([*(self.columns[name] for name in names), *known], axis=1)
        model = xgboost.XGBRegressor(**TREES, n_jobs=self.jobs)
        model.fit(matrix[train], (self.log_latency - self.log_reference)[train])
        return np.asarray(model.predict(matrix) + self.log_reference)

    def unseen_tasks(self, without: str = "") -> dict[str, Any]:
        """Figures by device; each task is predicted by a model that was fitted without it."""
        fold = (np.random.default_rng(0).permutation(self.task.max() + 1) % FOLDS)[self.task]
        predicted = np.sum([self.predict(fold != k, without) * (fold == k) for k in range(FOLDS)], axis=0)
        return {str(name): self.figures(predicted, self.device == name) for name in np.unique(self.device)}

    def figures(self, log_predicted: Array, keep: Array) -> dict[str, Any]:
        """Errors and order within tasks, of the rows of a mask."""
        measured, predicted = np.exp(self.log_latency[keep]), np.exp(log_predicted[keep])
        return measure(predicted, measured) | rank(predicted, measured, self.task[keep], np.flatnonzero(keep))

    def left_out(self, device: str) -> dict[int, dict[str, Any]]:
        """Figures of a device without training rows, by how many of its rows correct the others."""
        held = self.device == device
        rows, log_predicted = np.flatnonzero(held), self.predict(~held, one_hot=False)
        residual = (self.log_latency - log_predicted)[rows]
        place = np.stack([values[rows] for name, values in self.columns.items() if name in LAUNCH_INPUTS], axis=1)
        place = np.clip((place - place.mean(axis=0)) / np.maximum(place.std(axis=0), 0.1), -3, 3)
        place = np.c_[place, (log_predicted - self.log_reference)[rows]]
        # Fixed: 40 rows do not determine its four constants.
        kernel = ConstantKernel(0.3) * RBF(3.0) + ConstantKernel(0.3) + WhiteKernel(0.05)
        process = GaussianProcessRegressor(kernel, optimizer=None)
        out = {0: self.figures(log_predicted, held)}
        for count in MEASURED:
            runs = []
            for seed in range(SEEDS):
                nearest = np.unique(KMeans(count, n_init=1, random_state=seed).fit_transform(place).argmin(axis=0))
                process.fit(place[nearest], residual[nearest])
                adapted, keep = log_predicted.copy(), held.copy()
                adapted[rows], keep[rows[nearest]] = adapted[rows] + process.predict(place), False
                runs.append(self.figures(adapted, keep))
            out[count] = {key: float(np.mean([run[key] for run in runs])) for key in GPU_METRICS}
        return out


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table and write the result file."""
    study = STUDIES["schedules_gpu"]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.schedules gpu", description=__doc__)
    parser.add_argument("--public-data", type=Path, help="folder of the public tables; default $CDMPP_PUBLIC_DATA")
    parser.add_argument("--programs", type=int, default=9000)
    parser.add_argument("--jobs", type=int, default=2, help="processes that build programs, threads of XGBoost")
    parser.add_argument("--out", type=Path, default=study.path)
    options = parser.parse_args(arguments)
    try:
        folder = public_data_dir(options.public_data)
    except CdmppError as error:
        raise SystemExit(f"{error}\nhint: {error.hint}") from None
    names = ["device", "workload", "epilogue", "steps", "latency_us"]
    table = pq.read_table(folder / "sched_ansor.parquet", columns=names, filters=[("error_no", "=", 0)])
    rows = sample(table.drop_null().to_pylist(), options.programs)
    built = [pair for pair in zip(rows, cached_columns(rows, options.jobs), strict=True) if len(pair[1])]
    data = GpuStudy([row for row, _ in built], [columns for _, columns in built], options.jobs)
    typical = data.log_reference + np.median(data.log_latency - data.log_reference)
    result: dict[str, Any] = {
        "command": study.command,
        "programs": len(built),
        "refused": len(rows) - len(built),
        "unseen_tasks": data.unseen_tasks(),
        "reference": {name: data.figures(typical, data.device == name) for name in GPUS},
        "without": {group: data.unseen_tasks(group) for group in GROUPS},
        "left_out": {name: data.left_out(name) for name in GPUS},
        "encoding": encoding(rows[:: len(rows) // ENCODED or 1][:ENCODED]),
    }
    write_result(options.out, rounded(result))
    print(gpu(Results({"schedules_gpu": result})))
