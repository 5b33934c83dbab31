"""``python -m benchmarks.serving.jobs``: does a long search hold up predictions?

Requests of one item at a fixed rate, every fourth new to the server, in turns with nothing else to do and
with a pipeline search running as a job. Everything in one run on one machine, on loopback; writes
``benchmarks/results/jobs.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.serving import rates
from benchmarks.serving.process import Served, running

RESULT = Path(__file__).parents[1] / "results" / "jobs.json"
#: Two models on sixteen ranks under a limit of memory: not proven best for minutes.
SEARCH: dict[str, Any] = {
    "models": [
        {"stages": 16, "micro_batches": 33, "forward_s": 5, "backward_s": 11, "direction": "down"},
        {"stages": 8, "micro_batches": 27, "forward_s": 3, "backward_s": 7.3, "direction": "up"},
    ],
    "ranks": 16,
    "max_activations": 18,
    "budget_s": 600,
    "seed": 0,
}


def begin(served: Served) -> str:
    """Submit the search; its identity once it runs."""
    status, answer = served.ask("POST", "/pipeline/search", SEARCH)
    if status != 202:
        raise SystemExit(f"/pipeline/search answered {status}: {str(answer)[:300]}")
    id: str = answer["job_id"]
    give_up = time.monotonic() + 60
    while job(served, id)["progress"] == 0:
        if time.monotonic() > give_up:
            raise SystemExit("the search did not begin")
        time.sleep(0.2)
    return id


def job(served: Served, id: str) -> dict[str, Any]:
    """The job."""
    job_state: dict[str, Any] = served.ask("GET", f"/jobs/{id}")[1]
    return job_state


def cpu_seconds(served: Served) -> float:
    """Processor time of what the server started, so far."""
    total = 0
    for pid in served.processes()[1:]:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def compare(served: Served, seconds: float, rate: float, rounds: int) -> dict[str, Any]:
    """Median and tail of single requests without and with the search, in turns."""
    idle: list[dict[str, Any]] = []
    busy: list[dict[str, Any]] = []
    searched_s = 0.0
    for _ in range(rounds):
        idle.append(rates.single(served, seconds, rate))
        id = begin(served)
        before = cpu_seconds(served)
        busy.append(rates.single(served, seconds, rate))
        searched_s += cpu_seconds(served) - before
        if job(served, id)["state"] != "running":
            raise SystemExit("the search ended before the load")
        served.ask("DELETE", f"/jobs/{id}")
        time.sleep(1.0)
    out: dict[str, Any] = {"rate_per_s": rate, "rounds": rounds, "seconds": seconds}
    for name in ("p50_s", "p99_s"):
        out[f"idle_{name}"] = statistics.median(load[name] for load in idle)
        out[f"searching_{name}"] = statistics.median(load[name] for load in busy)
    out["p99_ratio"] = out["searching_p99_s"] / out["idle_p99_s"]
    out["p99_ratios"] = [b["p99_s"] / i["p99_s"] for i, b in zip(idle, busy, strict=True)]
    out["search_cores"] = searched_s / (rounds * seconds)
    return out


def main() -> None:
    """Compare at two rates, write and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="duration of each load")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--rates", type=float, nargs="*", default=[100.0, 200.0])
    options = parser.parse_args()
    result: dict[str, Any] = {"cores": len(os.sched_getaffinity(0)), "load_before": os.getloadavg()[0]}
    with running() as served:
        served.ask("POST", "/pipeline/search", {**SEARCH, "budget_s": 1, "max_steps": 1})  # compiles
        rates.single(served, options.seconds, 100.0)  # caches and connections
        result["rates"] = [compare(served, options.seconds, rate, options.rounds) for rate in options.rates]
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    for part in result["rates"]:
        print(
            f"{part['rate_per_s']:.0f} requests/s: p50 {1e3 * part['idle_p50_s']:.2f} -> "
            f"{1e3 * part['searching_p50_s']:.2f} ms, p99 {1e3 * part['idle_p99_s']:.2f} -> "
            f"{1e3 * part['searching_p99_s']:.2f} ms, ratio {part['p99_ratio']:.2f} (rounds: "
            + ", ".join(f"{ratio:.2f}" for ratio in part["p99_ratios"])
            + f"); the search had {part['search_cores']:.2f} cores"
        )


if __name__ == "__main__":
    main()
