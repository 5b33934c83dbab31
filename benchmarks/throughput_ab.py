"""Throughput of this checkout relative to another one, in one run.

``python -m benchmarks.throughput_ab --baseline FOLDER`` where FOLDER is a checkout of another commit, such as
283c9af (``git worktree add FOLDER 283c9af``). Both sides run as processes of their own and take turns, batch by
batch, so that a busy machine slows both alike. Reported are the median rate of each side, and the median over the
rounds of new rate / baseline rate, by wall time and by processor time.

Modes:

* ``predict cold``, ``predict warm``: 256 queries to a predictor in the process, new programs or cached predictions.
* ``http cold``, ``http warm``, ``http cold 1``, ``http warm 1``: requests of 256 items and of one item to a server.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.serving.process import free_port
from benchmarks.serving.queries import distinct, repeated

ITEMS = 256
#: Requests of one item that are timed together.
SINGLES = 32
Seconds = dict[str, float]
Predict = Callable[[list[dict[str, Any]]], Seconds]


def environment(folder: Path) -> dict[str, str]:
    """Environment in which Python imports cdmpp and its server from a checkout."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(folder), *([str(folder / "server")] if renamed(folder) else [])]),
    }


def renamed(folder: Path) -> bool:
    """Whether the server's package is called cdmpp_server, as from 0.1.0 on; before, it was called server."""
    return (folder / "server" / "cdmpp_server").is_dir()


@contextmanager
def in_process(folder: Path) -> Iterator[Predict]:
    """A predictor of a checkout, in a process of its own."""
    command = [sys.executable, "-P", str(Path(__file__).with_name("throughput_worker.py"))]
    with subprocess.Popen(
        command, cwd=folder, env=environment(folder), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        def predict(items: list[dict[str, Any]]) -> Seconds:
            stdin.write(json.dumps({"items": items}) + "\n")
            stdin.flush()
            seconds: Seconds = json.loads(stdout.readline())
            return seconds

        yield predict
        stdin.close()


def cpu_s(process: int) -> float:
    """Processor time of a process's threads, in seconds; 0 where the system does not report it."""
    files = Path(f"/proc/{process}/task").glob("*/schedstat")
    return sum(int(file.read_text().split()[0]) for file in files) / 1e9


@contextmanager
def served(folder: Path, database: Path, split: bool) -> Iterator[Predict]:
    """A server of a checkout; ``split``: send each item in a request of its own."""
    package = "cdmpp_server" if renamed(folder) else "server"
    port = free_port()
    command = [sys.executable, "-m", package, "--port", str(port)]
    env = environment(folder) | {"CDMPP_DATABASE": f"sqlite:///{database}"}
    process = subprocess.Popen(
        command, cwd=folder, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        _wait_until_ready(port)
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

        def predict(items: list[dict[str, Any]]) -> Seconds:
            parts = [[item] for item in items] if split else [items]
            bodies = [json.dumps({"items": part}).encode() for part in parts]
            started, cpu = time.perf_counter(), cpu_s(process.pid)
            for body in bodies:
                connection.request("POST", "/predict", body, {"Content-Type": "application/json"})
                response = connection.getresponse()
                text = response.read()
                if response.status != 200 or b'"error":' in text:
                    raise SystemExit(f"/predict answered {response.status}: {text[:300]!r}")
            return {"wall_s": time.perf_counter() - started, "cpu_s": cpu_s(process.pid) - cpu}

        yield predict
    finally:
        process.terminate()
        process.wait(30)


def _wait_until_ready(port: int, limit_s: float = 120.0) -> None:
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/readyz")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        time.sleep(0.2)
    raise SystemExit(f"the server was not ready within {limit_s:.0f} s")


def compare(sides: dict[str, Predict], rounds: int, items: int, cold: bool) -> dict[str, Any]:
    """Rates of both sides and their median ratios; the side that comes first alternates."""
    fresh = distinct(9_000_000)
    cached = repeated(items)
    seconds: dict[str, list[Seconds]] = {name: [] for name in sides}
    for number in range(-3, rounds):
        batch = list(itertools.islice(fresh, items)) if cold else cached
        names = list(sides) if number % 2 else list(reversed(sides))
        for name in names:
            taken = sides[name](batch)
            if number >= 0:
                seconds[name].append(taken)
    result: dict[str, Any] = {
        f"{name}_items_per_s": items / statistics.median(s["wall_s"] for s in seconds[name]) for name in sides
    }
    for clock in ("wall_s", "cpu_s"):
        pairs = list(zip(seconds["baseline"], seconds["new"], strict=True))
        ratios = [old[clock] / new[clock] for old, new in pairs if new[clock] > 0]
        result[f"ratio_{clock.removesuffix('_s')}"] = statistics.median(ratios) if ratios else None
    return result


def measure(baseline: Path, new: Path, rounds: int, with_http: bool, folder: Path) -> dict[str, Any]:
    """All modes."""
    results: dict[str, Any] = {}
    checkouts = {"baseline": baseline, "new": new}
    with ExitStack() as stack:
        sides = {name: stack.enter_context(in_process(path)) for name, path in checkouts.items()}
        for mode in ("cold", "warm"):
            results[f"predict {mode}"] = compare(sides, rounds, ITEMS, mode == "cold")
    for split in (False, True) if with_http else ():
        with ExitStack() as stack:
            sides = {
                name: stack.enter_context(served(path, folder / f"{name}-{split}.db", split))
                for name, path in checkouts.items()
            }
            for mode in ("cold", "warm"):
                items = SINGLES if split else ITEMS
                results[f"http {mode}{' 1' if split else ''}"] = compare(sides, rounds, items, mode == "cold")
    return results


def main() -> None:
    """Measure and print a table."""
    import tempfile

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--baseline", required=True, type=Path, help="checkout of the commit to compare with")
    parser.add_argument("--rounds", type=int, default=60, help="batches per mode and side")
    parser.add_argument("--no-http", action="store_true", help="predictor only")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    new = Path(__file__).parents[1]
    with tempfile.TemporaryDirectory() as folder:
        results = measure(options.baseline.resolve(), new, options.rounds, not options.no_http, Path(folder))
    if options.json:
        print(json.dumps(results, indent=1))
        return
    header = ("mode", "baseline items/s", "new items/s", "ratio (wall)", "ratio (processor time)")
    rows = [
        (
            mode,
            f"{r['baseline_items_per_s']:,.0f}",
            f"{r['new_items_per_s']:,.0f}",
            f"{r['ratio_wall']:.3f}",
            "" if r["ratio_cpu"] is None else f"{r['ratio_cpu']:.3f}",
        )
        for mode, r in results.items()
    ]
    for row in (header, *rows):
        print(f"{row[0]:<14}" + "".join(f"{cell:>24}" for cell in row[1:]))


if __name__ == "__main__":
    main()
