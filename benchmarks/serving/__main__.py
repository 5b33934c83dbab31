"""``python -m benchmarks.serving [--seconds 10]``: the service's figures on this machine.

Server and client share the machine, on loopback. Writes ``benchmarks/results/serving.json`` and prints a
table.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from benchmarks.serving import rates
from benchmarks.serving.process import running

RESULT = Path(__file__).parents[1] / "results" / "serving.json"


def main() -> None:
    """Run the parts and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="duration of each load")
    parser.add_argument("--connections", type=int, default=2)
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    results: dict[str, Any] = {"cores": len(os.sched_getaffinity(0))}
    for workers in options.workers:
        with running("--workers", str(workers)) as served:
            results[f"workers_{workers}"] = {
                "cold": rates.cold(served, options.seconds, options.connections),
                "warm": rates.warm(served, options.seconds, options.connections),
                "single": rates.single(served, options.seconds, 200.0),
            }
    results["in_process"] = rates.in_process(options.seconds)
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
    return lines


if __name__ == "__main__":
    main()
