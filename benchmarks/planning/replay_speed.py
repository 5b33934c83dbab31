"""Replay speed of a graph of 100,000 nodes, compiled and as plain Python, with reading and answering; and time and
memory of ``cdmpp replay`` with 1,000,000 nodes, from JSON and from Parquet.

``python -m benchmarks.planning.replay_speed`` writes ``benchmarks/results/replay_speed.json``. One core: set
OMP_NUM_THREADS=1. The graph is made by this program: 16 devices with two streams each, two dependencies a
node, durations drawn at random.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from cdmpp.plan.base.solve import read_request, solve_request
from cdmpp.simulate.replay import Graph, Node, Replayer
from cdmpp.simulate.replay.parquet import write_parquet
from cdmpp.simulate.replay.schema import ReplayRequest
from cdmpp.utils import jit

RESULT = Path(__file__).parents[1] / "results" / "replay_speed.json"
DEVICES, STREAMS, REACH, DEPS = 16, 2, 200, 2


def make_request(nodes: int, seed: int = 0) -> dict[str, Any]:
    """A request without programs."""
    draw = random.Random(seed)
    made = []
    for i in range(nodes):
        deps = {f"n{draw.randrange(max(0, i - REACH), i)}" for _ in range(DEPS)} if i else set()
        made.append(
            {
                "id": f"n{i}",
                "device": f"rank{i % DEVICES}",
                "stream": str(i % STREAMS),
                "duration_s": draw.random() * 1e-3,
                "deps": sorted(deps),
                "class": "comm" if i % 5 == 0 else "compute",
            }
        )
    return {"nodes": made}


def median_s(run: Callable[[], Any], repeats: int) -> float:
    """Median CPU seconds of several calls, after one that does not count: others use the machine too."""
    run()
    taken = []
    for _ in range(repeats):
        began = time.process_time()
        run()
        taken.append(time.process_time() - began)
    return statistics.median(taken)


def measure(nodes: int, repeats: int) -> dict[str, Any]:
    """CPU seconds of each step, in this process."""
    value = make_request(nodes)
    text = json.dumps(value)
    graph = Graph([Node(n["id"], n["device"], n["duration_s"], tuple(n["deps"]), n["stream"]) for n in value["nodes"]])
    replayer = Replayer(graph)
    own = np.array([node.duration_s for node in graph.nodes])
    request = read_request(ReplayRequest, value)
    answer = solve_request(read_request(ReplayRequest, value)).to_json()
    replay_s = median_s(lambda: Replayer(graph).run(), repeats)
    again_s = median_s(lambda: replayer.run(own), repeats)
    return {
        "compiled": jit.COMPILED,
        "nodes": nodes,
        "edges": sum(len(node.deps) for node in graph.nodes),
        "makespan_s": replayer.run().makespan_s,
        "replay_s": replay_s,
        "nodes_per_s": nodes / replay_s,
        "replay_again_s": again_s,
        "nodes_per_s_again": nodes / again_s,
        "read_s": median_s(lambda: read_request(ReplayRequest, json.loads(text)), repeats),
        "answer_s": median_s(lambda: solve_request(request.model_copy()).to_json(), repeats),
        "write_s": median_s(lambda: json.dumps(answer), repeats),
    }


def measure_command(path: Path) -> dict[str, float]:
    """Elapsed seconds, CPU seconds and largest memory of ``cdmpp replay`` with a file, as a process of its own."""
    began = time.perf_counter()
    child = os.posix_spawn(
        sys.executable,
        [sys.executable, "-m", "cdmpp", "replay", str(path), "--json"],
        os.environ,
        file_actions=[(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)],
    )
    _, status, usage = os.wait4(child, 0)
    if status:
        raise SystemExit(f"cdmpp replay {path} failed")
    return {
        "elapsed_s": time.perf_counter() - began,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "peak_bytes": usage.ru_maxrss * 1024.0,
    }


def measure_files(nodes: int) -> dict[str, Any]:
    """Figures of the command, by form of the file."""
    with tempfile.TemporaryDirectory() as folder:
        text, columns = Path(folder, "graph.json"), Path(folder, "graph.parquet")
        value = make_request(nodes)
        text.write_text(json.dumps(value))
        write_parquet(columns, value, read_request(ReplayRequest, value).nodes)
        del value
        return {"nodes": nodes, "json": measure_command(text), "parquet": measure_command(columns)}


def main() -> None:
    """Measure in two processes: as it is installed, and without numba."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=100_000)
    parser.add_argument("--file-nodes", type=int, default=1_000_000, help="nodes of the files for the command")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--plain", action="store_true", help="hide numba, print the figures, write nothing")
    options = parser.parse_args()
    if options.plain:
        print(json.dumps(measure(options.nodes, options.repeats)))
        return
    compiled = measure(options.nodes, options.repeats)
    hide = (
        "import sys; sys.modules['numba'] = None; import runpy; "
        "runpy.run_module('benchmarks.planning.replay_speed', run_name='__main__')"
    )
    same = ["--nodes", str(options.nodes), "--repeats", str(options.repeats), "--plain"]
    output = subprocess.run([sys.executable, "-c", hide, *same], check=True, capture_output=True, text=True).stdout
    plain = json.loads(output)
    assert plain["makespan_s"] == compiled["makespan_s"]
    files = measure_files(options.file_nodes)
    result = {"compiled": compiled, "plain": plain, "files": files, "load_average": os.getloadavg()[0]}
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    for name, timing in (("compiled", compiled), ("plain Python", plain)):
        print(
            f"{name}: {timing['nodes']:,} nodes in {timing['replay_s']:.2f} s ({timing['nodes_per_s']:,.0f} nodes/s), "
            f"again with other durations {timing['replay_again_s'] * 1e3:.0f} ms; JSON and schema "
            f"{timing['read_s']:.2f} s, answer {timing['answer_s']:.2f} s, JSON out {timing['write_s']:.2f} s"
        )
    for name in ("json", "parquet"):
        timing = files[name]
        print(
            f"cdmpp replay, {files['nodes']:,} nodes from {name}: {timing['elapsed_s']:.1f} s, "
            f"CPU {timing['cpu_s']:.1f} s, {timing['peak_bytes'] / 1e9:.2f} GB"
        )
    print(f"load average {result['load_average']:.1f}")


if __name__ == "__main__":
    main()
