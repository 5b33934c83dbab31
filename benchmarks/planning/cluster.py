"""Mean completion time on **synthetic** traces by policy: ``python -m benchmarks.planning.cluster``.

Everything here is simulated: Poisson arrivals and exponential work (:mod:`cdmpp.plan.cluster.trace`).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from cdmpp.plan.cluster import allocate, equal_share, greedy, least
from cdmpp.plan.cluster.trace import mean_completion_s, synthetic_trace

RESULT = Path(__file__).parents[1] / "results" / "cluster.json"
POLICIES = {"least workers": least, "equal share": equal_share, "greedy": greedy, "knapsack": allocate}
GPUS, LENT = 32, 8
#: Mean seconds between arrivals: from a cluster with room to one that is nearly full.
LOADS = {"light": 600.0, "medium": 300.0, "heavy": 180.0}
WORK_S = 3600.0


def main() -> None:
    """Simulate, print a table, write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=150, help="jobs of a trace")
    parser.add_argument("--seeds", type=int, default=5, help="traces for each load")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    completion_s: dict[str, dict[str, float]] = {}
    for load, gap_s in LOADS.items():
        traces = [synthetic_trace(options.jobs, seed, gap_s, WORK_S) for seed in range(options.seeds)]
        row = {
            name: sum(mean_completion_s(trace, GPUS, policy) for trace in traces) / options.seeds
            for name, policy in POLICIES.items()
        }
        row["knapsack, 8 lent"] = sum(mean_completion_s(t, GPUS + LENT, allocate) for t in traces) / options.seeds
        completion_s[load] = row
        print(load + ": " + ", ".join(f"{name} {seconds:,.0f} s" for name, seconds in row.items()))
    result = {
        "synthetic": True,
        "jobs": options.jobs,
        "seeds": options.seeds,
        "gpus": GPUS,
        "lent": LENT,
        "mean_work_s": WORK_S,
        "mean_gap_s": LOADS,
        "mean_completion_s": completion_s,
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
