"""Ansor's schedules on GPUs: unseen tasks and devices, by the columns of launches.

``python -m benchmarks.schedules gpu --public-data DIR``: programs of ``sched_ansor.parquet``, drawn by
:func:`sample`, become one row of columns each (:mod:`cdmpp.features.launch_columns` with
:mod:`cdmpp.model.nn.launch_inputs`). XGBoost predicts log(latency / reference). Folds are by task (workload and
epilogue), so no task is in training. The ablation leaves out one group of columns at a time. A device that is left out
is predicted from its data sheet, then after measurements that KMeans chooses, with a Gaussian process on the residuals.
Features are kept in the user's cache. The figures go into ``benchmarks/results/schedules_gpu.json``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

import cdmpp
from benchmarks.report.results import STUDIES, rounded, write_result
from benchmarks.report.schedules import GPU_METRICS, GPUS, gpu_table
from cdmpp.data.importers import ansor_program
from cdmpp.data.load import public_data_dir
from cdmpp.devices.registry import lookup
from cdmpp.errors import CdmppError
from cdmpp.features.launch_columns import GPU_COLUMNS, GPU_FLAGS, GPU_WIDTH, launch_columns
from cdmpp.features.statements import Recorder
from cdmpp.model.nn.launch_inputs import LAUNCH_INPUTS, RESOURCES, launch_figures, launch_inputs
from cdmpp.programs.tvm_json import load
from cdmpp.train.evaluation.cache import cache_dir
from cdmpp.train.evaluation.metrics import measure, rank
from cdmpp.utils.writing import replacing

Array = np.ndarray[Any, np.dtype[Any]]
Row = dict[str, Any]
#: Workload, epilogue, steps.
Program = tuple[str, str, str]
FOLDS, FASTEST, SEEDS, MEASURED = 5, 2, 3, (40, 100)
TREES = {"n_estimators": 400, "max_depth": 5, "learning_rate": 0.05, "min_child_weight": 20}
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
    """Programs without an error: tasks and devices take turns, each with its two fastest first, then random ones."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        if row["error_no"] == 0 and row["latency_us"] is not None:
            groups.setdefault((row["device"], row["workload"], row["epilogue"]), []).append(row)
    random, turns = np.random.default_rng(seed), []
    for _, group in sorted(groups.items()):
        group.sort(key=lambda row: row["latency_us"])
        others = FASTEST + random.permutation(max(len(group) - FASTEST, 0))
        turns += list(enumerate([*group[:FASTEST], *(group[i] for i in others)]))
    return [row for _, row in sorted(turns, key=lambda item: item[0])[:programs]]


def columns_of(program: Program) -> Array:
    """Columns of the leaves of a program; none where it is refused."""
    try:
        nodes, root = load(ansor_program(program[0], program[2], epilogue=program[1]).tvm_json or "")
        recorder = Recorder(nodes, {})
        recorder.build(root)
        return launch_columns(recorder)
    except CdmppError:
        return np.zeros((0, GPU_WIDTH), np.float32)


def cached_columns(programs: Sequence[Program], jobs: int) -> list[Array]:
    """:func:`columns_of` programs. They are built once for the same programs and sources of the features."""
    root = Path(cdmpp.__file__).parent
    sources = (root / "data/importers/ansor.py", *sorted((root / "features").glob("*.py")))
    key = json.dumps(programs).encode() + b"".join(path.read_bytes() for path in sources)
    path = cache_dir() / "launch-columns" / f"{hashlib.sha256(key).hexdigest()[:24]}.npz"
    if not path.exists():
        with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
            built = list(pool.map(columns_of, programs, chunksize=50))
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as aside, aside.open("wb") as file:
            np.savez_compressed(file, rows=np.concatenate(built), counts=[len(part) for part in built])
    with np.load(path, allow_pickle=False) as kept:
        return np.split(kept["rows"], np.cumsum(kept["counts"])[:-1])


def program_columns(leaves: Array, devices: Array) -> tuple[dict[str, Array], Array]:
    """Columns of :data:`GROUPS` by name, (rows,) each, and the log of the reference.

    An input of the network is that of the leaf with the largest share of the time, a column of leaves the largest one
    (a flag: the smallest), and a ratio the log2 of a ratio of sums over leaves. The shapes are those of
    :func:`cdmpp.model.nn.launch_inputs.launch_inputs`.
    """
    inputs, log_reference = launch_inputs(leaves, devices)
    real = leaves[..., GPU_COLUMNS.index("threads")] > 0
    share = np.where(real, inputs[..., LAUNCH_INPUTS.index("kernel_share")], -1)
    main = inputs[np.arange(len(leaves)), share.argmax(axis=1)]
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


class Study:
    """Programs with their columns, and figures of what is predicted of them.

    Parameters
    ----------
    rows : sequence of dict
        As in the table: device, workload, epilogue, latency_us.
    columns : sequence of array, (leaves, GPU_WIDTH)
        Of each row.
    jobs : int
        Threads of XGBoost.
    """

    def __init__(self, rows: Sequence[Row], columns: Sequence[Array], jobs: int) -> None:
        specs = {name: lookup(name) for name in {row["device"] for row in rows}}
        self.jobs, self.device = jobs, np.array([specs[row["device"]].name for row in rows])
        self.task = np.unique([row["workload"] + row["epilogue"] for row in rows], return_inverse=True)[1]
        self.log_latency = np.log([row["latency_us"] * 1e-6 for row in rows])
        leaves = np.zeros((len(rows), max(map(len, columns)), GPU_WIDTH), np.float32)
        for i, part in enumerate(columns):
            leaves[i, : len(part)] = part
        devices = np.stack([launch_figures(specs[row["device"]]) for row in rows])
        self.columns, self.log_reference = program_columns(leaves, devices)

    def matrix(self, without: str = "", *, known: bool = True) -> Array:
        """Columns (rows, n) of all groups but one; of known devices also which one it is."""
        names = [name for group, names in GROUPS.items() if group != without for name in names.split()]
        one_hot = [self.device == name for name in np.unique(self.device)] if known else []
        return np.stack([*(self.columns[name] for name in names), *one_hot], axis=1)

    def predict(self, matrix: Array, train: Array) -> Array:
        """Log latencies of all rows by XGBoost, fitted on the rows of a mask."""
        import xgboost

        model = xgboost.XGBRegressor(**TREES, n_jobs=self.jobs)
        model.fit(matrix[train], (self.log_latency - self.log_reference)[train])
        return np.asarray(model.predict(matrix) + self.log_reference)

    def unseen_tasks(self, without: str = "") -> dict[str, Any]:
        """Figures by device; each task is predicted by a model that was fitted without it."""
        fold = (np.random.default_rng(0).permutation(self.task.max() + 1) % FOLDS)[self.task]
        matrix = self.matrix(without)
        return self.figures(np.sum([self.predict(matrix, fold != k) * (fold == k) for k in range(FOLDS)], axis=0))

    def figures(self, log_predicted: Array, keep: Array | None = None) -> dict[str, Any]:
        """Errors and order within tasks by device, of the rows of a mask."""
        out = {}
        for name in np.unique(self.device if keep is None else self.device[keep]):
            rows = np.flatnonzero((self.device == name) & (True if keep is None else keep))
            measured, predicted = np.exp(self.log_latency[rows]), np.exp(log_predicted[rows])
            out[str(name)] = measure(predicted, measured) | rank(predicted, measured, self.task[rows], rows)
        return out

    def left_out(self, device: str) -> dict[int, dict[str, Any]]:
        """Figures of a device without training rows, by measurements: none, or some that others are predicted from."""
        rows = np.flatnonzero(self.device == device)
        log_predicted = self.predict(self.matrix(known=False), self.device != device)
        names = [name for name in self.columns if name in LAUNCH_INPUTS]
        place = np.stack([self.columns[name][rows] for name in names], axis=1)
        place = np.clip((place - place.mean(axis=0)) / np.maximum(place.std(axis=0), 0.1), -3, 3)
        place = np.c_[place, (log_predicted - self.log_reference)[rows]]
        out = {0: self.figures(log_predicted, self.device == device)[device]}
        for count in MEASURED:
            runs = []
            for seed in range(SEEDS):
                chosen, residual = residuals(place, (self.log_latency - log_predicted)[rows], count, seed)
                adapted, keep = log_predicted.copy(), self.device == device
                adapted[rows] += residual
                keep[rows[chosen]] = False
                runs.append(self.figures(adapted, keep)[device])
            out[count] = {key: float(np.mean([run[key] for run in runs])) for key in GPU_METRICS}
        return out


def residuals(place: Array, residual: Array, count: int, seed: int) -> tuple[Array, Array]:
    """Rows nearest to the centres of KMeans, and residuals of all rows by a Gaussian process on theirs."""
    from sklearn.cluster import KMeans
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel

    chosen = np.unique(KMeans(count, n_init=1, random_state=seed).fit_transform(place).argmin(axis=0))
    kernel = ConstantKernel(0.3, (1e-4, 10)) * RBF(3.0, (1, 100)) + ConstantKernel(0.1, "fixed")
    process = GaussianProcessRegressor(kernel + WhiteKernel(0.05, (1e-3, 3)))
    return chosen, process.fit(place[chosen], residual[chosen]).predict(place)


def main(arguments: Sequence[str]) -> None:
    """Print the table and write the result file."""
    import pyarrow.parquet

    parser = argparse.ArgumentParser(prog="python -m benchmarks.schedules gpu", description=__doc__)
    parser.add_argument("--public-data", type=Path, help="folder of the public tables; default $CDMPP_PUBLIC_DATA")
    parser.add_argument("--programs", type=int, default=9000, help="how many programs are drawn")
    parser.add_argument("--jobs", type=int, default=2, help="processes that build programs, threads of XGBoost")
    study = STUDIES["schedules_gpu"]
    parser.add_argument("--out", type=Path, default=study.path)
    options = parser.parse_args(arguments)
    try:
        folder = public_data_dir(options.public_data)
    except CdmppError as error:
        raise SystemExit(f"{error}\nhint: {error.hint}") from None
    names = ["device", "workload", "epilogue", "steps", "latency_us", "error_no"]
    rows = sample(
        pyarrow.parquet.read_table(folder / "sched_ansor.parquet", columns=names).to_pylist(), options.programs
    )
    columns = cached_columns([(row["workload"], row["epilogue"], row["steps"]) for row in rows], options.jobs)
    built = [i for i, part in enumerate(columns) if len(part)]
    data = Study([rows[i] for i in built], [columns[i] for i in built], options.jobs)
    typical = np.median(data.log_latency - data.log_reference)
    result: dict[str, Any] = {
        "command": study.command,
        "programs": len(built),
        "refused": len(rows) - len(built),
        "unseen_tasks": data.unseen_tasks(),
        "reference": data.figures(data.log_reference + typical),
        "without": {group: data.unseen_tasks(group) for group in GROUPS},
        "left_out": {name: data.left_out(name) for name in GPUS},
    }
    write_result(options.out, rounded(result))
    print(gpu_table(result))
