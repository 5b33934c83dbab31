"""Precision plans of the solver next to those of the search that it replaced, at equal budgets.

The earlier search is run from a checkout of commit 283c9af, in its own process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.planning.precision_cases import problems
from cdmpp.plan.precision.highs import Effort
from cdmpp.plan.precision.milp import Solution, minimise_error
from cdmpp.plan.precision.pricing import DeviceCosts, lowest
from cdmpp.plan.precision.qsync import best_simple, heap
from cdmpp.predict.requests.budget import SearchControl

EARLIER = "283c9af"
#: Objective, bound, proof, seconds and processor seconds of each problem, as JSON.
_EARLIER_SCRIPT = """
import json, sys, time
from benchmarks.planning.precision import problems
from cdmpp.plan.base.watch import Watch
from cdmpp.plan.precision.allocate import Steps, search, simple
from cdmpp.plan.precision.pricing import lowest
count, seeds, budget_s = json.loads(sys.argv[1])
rows = []
for _, costs, limit_s in problems(count, range(seeds)):
    began, cpu = time.perf_counter(), time.process_time()
    plan = search(costs, simple(costs, lowest(costs), limit_s), limit_s, Steps(Watch(budget_s)))
    rows.append([plan.objective, plan.bound, plan.proven, time.perf_counter() - began, time.process_time() - cpu])
print(json.dumps(rows))
"""
Row = tuple[float, float, bool, float, float]


def solve(costs: DeviceCosts, limit_s: float, budget_s: float | None) -> Solution:
    """The solver's plan, from the heap's."""
    control = SearchControl(budget_s)
    start = best_simple(costs, heap(costs, lowest(costs), limit_s), limit_s)
    return minimise_error(costs, start, limit_s, Effort(control))


def run(count: int, seeds: int, budget_s: float) -> list[Row]:
    """Objective, bound, proof, seconds and processor seconds of the solver on each problem."""
    rows: list[Row] = []
    for costs, limit_s in problems(count, range(seeds)):
        began, cpu = time.perf_counter(), time.process_time()
        plan = solve(costs, limit_s, budget_s)
        seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu
        rows.append((plan.objective, plan.bound, plan.proven, seconds, cpu_s))
    return rows


def run_earlier(checkout: Path, count: int, seeds: int, budget_s: float) -> list[Row]:
    """The same of the earlier search, on the same problems."""
    search_path = os.pathsep.join([str(checkout), str(checkout / "server")])
    command = [sys.executable, "-c", _EARLIER_SCRIPT, json.dumps([count, seeds, budget_s])]
    environment = {**os.environ, "PYTHONPATH": search_path, "OMP_NUM_THREADS": "1"}
    text = subprocess.run(command, cwd=checkout, env=environment, check=True, capture_output=True, text=True).stdout
    return [tuple(row) for row in json.loads(text)]


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Gaps, proofs and times of some problems; those whose best error is 0 have no gap."""
    gaps = [objective / bound - 1 for objective, bound, *_ in rows if objective and bound]
    return {
        "problems": len(rows),
        "without_bound": sum(objective > 0 and not bound for objective, bound, *_ in rows),
        "proven": sum(proven for _, _, proven, *_ in rows),
        "mean_gap": float(np.mean(gaps)) if gaps else 0.0,
        "worst_gap": float(np.max(gaps)) if gaps else 0.0,
        "mean_s": float(np.mean([row[3] for row in rows])),
        "mean_cpu_s": float(np.mean([row[4] for row in rows])),
    }


def compare(checkout: Path, counts: Sequence[int], seeds: int, budgets: Sequence[float]) -> list[dict[str, Any]]:
    """A row for each number of operators and budget; both run one after the other."""
    out: list[dict[str, Any]] = []
    for count in counts:
        for budget_s in budgets:
            earlier, solver = run_earlier(checkout, count, seeds, budget_s), run(count, seeds, budget_s)
            ratios = [after[0] / before[0] for before, after in zip(earlier, solver, strict=True) if before[0]]
            row = {
                "operators": count,
                "budget_s": budget_s,
                "earlier": {"commit": EARLIER, **summary(earlier)},
                "solver": summary(solver),
                "error_over_earlier_mean": float(np.mean(ratios)) if ratios else 1.0,
                "error_over_earlier_worst": float(np.max(ratios)) if ratios else 1.0,
            }
            print(table_row(row), flush=True)
            out.append(row)
    return out


def table_row(row: dict[str, Any]) -> str:
    """One comparison in words."""
    texts = [f"{row['operators']:4} operators, {row['budget_s']:g} s:"]
    for name in ("earlier", "solver"):
        figures = row[name]
        texts.append(
            f"{name} {figures['proven']}/{figures['problems']} proven, gap {100 * figures['mean_gap']:.2f} % "
            f"(worst {100 * figures['worst_gap']:.2f} %, {figures['without_bound']} without a bound), "
            f"{figures['mean_s']:.2f} s;"
        )
    return " ".join([*texts, f"error x {row['error_over_earlier_mean']:.4f}"])
