"""``python -m benchmarks.serving [--seconds 10] [--only NAME ...]``: the service's figures on this machine.

Server and client share the machine, on loopback. Writes ``benchmarks/results/serving.json`` and prints a
table. Parts: rates, memory, overload, kill.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.serving import endurance, rates
from benchmarks.serving.process import running

RESULT = Path(__file__).parents[1] / "results" / "serving.json"
PARTS = ("rates", "memory", "overload", "kill")


def main() -> None:
    """Run the parts and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="duration of each load")
    parser.add_argument("--connections", type=int, default=2)
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--requests", type=int, default=20_000, help="requests of the memory run; published: 200000")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--only", nargs="*", choices=PARTS, default=PARTS)
    options = parser.parse_args()
    results: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    results["cores"] = len(os.sched_getaffinity(0))
    if "rates" in options.only:
        for workers in options.workers:
            with running("--workers", str(workers)) as served:
                results[f"workers_{workers}"] = {
                    "cold": rates.cold(served, options.seconds, options.connections),
                    "warm": rates.warm(served, options.seconds, options.connections),
                    "single": rates.single(served, options.seconds, 200.0),
                }
        results["in_process"] = rates.in_process(options.seconds)
    if "memory" in options.only:
        with running() as served:
            results["memory"] = endurance.memory(served, options.requests, 600.0)
    if "overload" in options.only:
        with running() as served:
            results["overload"] = endurance.overload(served, options.seconds)
    if "kill" in options.only:
        with tempfile.TemporaryDirectory() as folder:
            results["kill"] = endurance.kill_nine(Path(folder), rounds=5, seconds=2.0)
    options.out.write_text(json.dumps(results, indent=1) + "\n")
    print("\n".join(table(results)))


def table(figures: dict[str, Any]) -> list[str]:
    """Markdown lines."""
    lines = ["| what | figure |", "| --- | ---: |"]
    for name, part in figures.items():
        if name.startswith("workers_"):
            label = f"{name.removeprefix('workers_')} worker(s)"
            lines += [
                f"| {label}: warm, batches of 256 | **{part['warm']['items_per_s']:,.0f}** items/s |",
                f"| {label}: new operators, the same | **{part['cold']['items_per_s']:,.0f}** items/s |",
                f"| {label}: one item a request, 200 requests a second, p50 / p99 | "
                f"{1e3 * part['single']['p50_s']:.1f} / **{1e3 * part['single']['p99_s']:.1f}** ms |",
            ]
    if "in_process" in figures:
        part = figures["in_process"]
        lines.append(
            f"| predictor in this process: warm / new | {part['warm_items_per_s']:,.0f} / "
            f"{part['cold_items_per_s']:,.0f} items/s |"
        )
    if "memory" in figures:
        part = figures["memory"]
        first, last = part["resident_bytes"][0] / 2**20, part["resident_bytes"][-1] / 2**20
        lines.append(
            f"| memory over {part['requests']:,} requests | {first:.0f} to {last:.0f} MiB, at most "
            f"**{100 * part['growth']:+.1f} %** |"
        )
    if "overload" in figures:
        part = figures["overload"]
        lines.append(
            f"| {part['offered_requests_per_s']:,.0f} requests/s of 64 new items where "
            f"{part['capacity_requests_per_s']:,.0f} is all it can | {part['answered']:,} answered, "
            f"{part['refused']:,} refused, {part['too_late']:,} too late, **{part['lost']} lost**; longest "
            f"{part['longest_s']:.1f} s; as before after {part['recovered_after_s']:.1f} s |"
        )
    if "kill" in figures:
        part = figures["kill"]
        lines.append(
            f"| kill -9 under load, {part['rounds']} times | {part['accepted']:,} observations accepted, "
            f"{part['stored']:,} there, **{part['lost']} lost** |"
        )
    return lines


if __name__ == "__main__":
    main()
