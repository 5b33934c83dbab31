"""Tables of operators: rows per second of one process, and per core with Ray on this machine.

``python -m benchmarks.tables [--rows 80000] [--rounds 3] [--workers 2]``: the same table by one process with one
thread and by Ray workers with one core each, in turns. Rates begin with the first answered slices, so they include
neither the start of Ray nor loading the model. ``rows_per_cpu_s`` counts the processor time of all processes, Ray's
own included; it depends less on other load of the machine. Both ways are checked to give the same answers.

``python -m benchmarks.tables --memory-rows 100000 1000000``: peak memory of ``cdmpp predict`` for Parquet tables of
these lengths with 30,000 distinct operators.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from cdmpp.plan.distributed.cluster import ray_cluster
from cdmpp.plan.distributed.tables import RAY_SLICE_ROWS, load_predictor, predict_slices_on_ray
from cdmpp.predict.tables.predict import AnsweredSlice, SlicePredictor, TableTask, predict_slices
from cdmpp.predict.tables.rows import TableOptions
from cdmpp.predict.tables.sources import SLICE_ROWS


def write_table(path: Path, rows: int) -> None:
    """Distinct matrix products, softmaxes and attention of decoding steps."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 8192, (rows, 3)).tolist()
    forms = (
        "linear:m={0},n={1},k={2},dtype=float16",
        "softmax:rows={0},cols={1}",
        "attention_decode:batch={0},past_len={1},heads=32,kv_heads=8,head_dim=128,dtype=bfloat16",
    )
    path.write_text("".join(forms[i % 3].format(*size) + "\n" for i, size in enumerate(sizes)))


class CpuTime:
    """Processor seconds of this process, and of all processes that it started, also of those that have ended.

    Parameters
    ----------
    children : bool
        Whether to count the started processes.
    """

    def __init__(self, children: bool) -> None:
        self._children, self._seconds = children, dict[int, float]()

    def total_s(self) -> float:
        """Sum so far; processes that ended count with their last value."""
        own = psutil.Process()
        for process in [own, *(own.children(recursive=True) if self._children else [])]:
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            self._seconds[process.pid] = times.user + times.system
        return sum(self._seconds.values())


def measure(parts: Iterator[AnsweredSlice], skipped: int, cores: int, begun: float) -> dict[str, Any]:
    """Rates after the first ``skipped`` slices, and a digest of all answers.

    ``begun`` rows are not counted: workers have done half a slice each, on average, when the measurement starts.
    """
    digest, rows, started_s, started_cpu_s, cpu = hashlib.sha256(), -begun, 0.0, 0.0, CpuTime(cores > 1)
    for number, part in enumerate(parts, 1):
        digest.update(part.body.encode())
        spent_s = cpu.total_s()
        if number > skipped:
            rows += part.rows
        elif number == skipped:
            started_s, started_cpu_s = time.perf_counter(), spent_s
    return {
        "rows_per_s_and_core": rows / (time.perf_counter() - started_s) / cores,
        "rows_per_cpu_s": rows / (cpu.total_s() - started_cpu_s),
        "digest": digest.hexdigest(),
    }


def run(rows: int, rounds: int, workers: int, slice_rows: int) -> dict[str, Any]:
    """Both ways, in turns."""
    with tempfile.TemporaryDirectory() as folder, ray_cluster(processors=workers) as ray:
        path = Path(folder) / "operators.txt"
        write_table(path, rows)
        load = partial(load_predictor, None)
        task = TableTask(path, TableOptions(("t4",)))
        begun = workers * slice_rows / 2
        single: list[dict[str, Any]] = []
        several: list[dict[str, Any]] = []
        for _ in range(rounds):
            # A new predictor has no cached predictions, like a new worker.
            single.append(measure(predict_slices(SlicePredictor(task, load()), rows=SLICE_ROWS), 1, 1, 0.0))
            several.append(measure(predict_slices_on_ray(ray, task, load, slice_rows), workers, workers, begun))
    if len({result["digest"] for result in (*single, *several)}) != 1:
        raise SystemExit("the answers differ")
    out: dict[str, Any] = {"rows": rows, "rounds": rounds, "workers": workers, "load_average": os.getloadavg()}
    for name in ("rows_per_s_and_core", "rows_per_cpu_s"):
        values = [[result[name] for result in results] for results in (single, several)]
        out[name] = {
            "one_process": round(statistics.median(values[0])),
            "ray": round(statistics.median(values[1])),
            "ratio": round(statistics.median(b / a for a, b in zip(*values, strict=True)), 3),
        }
    return out


def peak_memory(rows: int) -> dict[str, Any]:
    """Peak resident memory and processor time of the command for a Parquet table."""
    rng = np.random.default_rng(0)
    distinct = [f"linear:m={m},n={n},k={k},dtype=float16" for m, n, k in rng.integers(1, 8192, (30_000, 3)).tolist()]
    with tempfile.TemporaryDirectory() as folder:
        table, out = Path(folder) / "operators.parquet", Path(folder) / "answers.parquet"
        programs = [distinct[i] for i in rng.integers(0, len(distinct), rows).tolist()]
        pq.write_table(pa.table({"program": programs}), table)
        del programs
        command = ["predict", str(table), "--device", "t4", "--out", str(out)]
        process = subprocess.Popen([sys.executable, "-m", "cdmpp", *command])
        _, status, usage = os.wait4(process.pid, 0)
        if status or pq.read_metadata(out).num_rows != rows:
            raise SystemExit("the command failed")
    cpu = usage.ru_utime + usage.ru_stime
    return {"rows": rows, "peak_bytes": 1024 * usage.ru_maxrss, "rows_per_cpu_s": round(rows / cpu)}


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=80_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--slice-rows", type=int, default=RAY_SLICE_ROWS, help="rows of a slice with Ray")
    parser.add_argument("--memory-rows", type=int, nargs="+", help="measure peak memory for these lengths instead")
    chosen = parser.parse_args()
    if chosen.memory_rows:
        print(json.dumps([peak_memory(rows) for rows in chosen.memory_rows], indent=1))
        return
    print(json.dumps(run(chosen.rows, chosen.rounds, chosen.workers, chosen.slice_rows), indent=1))


if __name__ == "__main__":
    main()
