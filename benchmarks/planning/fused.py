"""Fused pipelines: the twelve published instances, random instances, and makespan by memory limit.

``python -m benchmarks.planning.fused`` takes about two minutes and writes ``--out``. ``--full`` takes about six
minutes and writes ``benchmarks/results/fused.json`` and ``docs/fused.png``. The published makespans and peaks are
those of the result files in the FlexFusion repository, the official implementation of RLHFuse (NSDI'25), whose
annealer is meant for 512 CPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report.results import write_result
from cdmpp.plan.fused import Model, Problem, search
from cdmpp.plan.fused.check import check
from cdmpp.plan.fused.schema import FusedRequest
from cdmpp.plan.registry import make_plan
from cdmpp.predict.requests.budget import Progress, SearchControl

OUT = Path("benchmarks/results/fused.json")
PICTURE = Path("docs/fused.png")
#: Stages, micro-batches and forward seconds of both models (backward takes twice as long), activation sizes; then
#: the published greedy makespan, annealed makespan, seconds of annealing, and peak memory of the plan.
PUBLISHED = (
    (8, 4, 32, 16, 5, 4, 1.95, 2.0, 741, 708, 918, 19.70),
    (8, 4, 16, 8, 5, 4, 1.95, 2.0, 425, 372, 473, 15.75),
    (8, 4, 8, 4, 5, 4, 1.95, 2.0, 239, 225, 20, 15.60),
    (8, 8, 32, 32, 5, 2, 1.95, 1.0, 755, 702, 4979, 20.50),
    (8, 8, 16, 16, 5, 2, 1.95, 1.0, 419, 366, 1416, 18.55),
    (8, 8, 8, 8, 5, 2, 1.95, 1.0, 225, 225, 167, 15.60),
    (16, 8, 64, 32, 2, 2, 1.64, 2.0, 632, 618, 4042, 39.72),
    (16, 8, 32, 16, 2, 2, 1.64, 2.0, 366, 330, 1075, 29.88),
    (16, 8, 16, 8, 2, 2, 1.64, 2.0, 214, 186, 679, 26.24),
    (16, 16, 64, 64, 2, 1, 1.64, 1.0, 651, 613, 3976, 38.72),
    (16, 16, 32, 32, 2, 1, 1.64, 1.0, 363, 318, 1564, 32.16),
    (16, 16, 16, 16, 2, 1, 1.64, 1.0, 219, 186, 249, 26.24),
)
RANDOM_INSTANCES = 40
LIMITED, LIMITS = 4, (18, 16, 14, 12, 10, 8, 6, 4, 2, 1)
_CLI = [sys.executable, "-c", "from cdmpp.cli.main import main; main()", "plan"]


def request_of(instance: int, budget_s: float, *, sizes: bool = True) -> dict[str, Any]:
    """Request of a published instance; ``sizes``: with its activation sizes."""
    p, q, m, n, f, g, first_size, second_size = PUBLISHED[instance][:8]
    models = [
        {"stages": p, "micro_batches": m, "forward_s": f, "backward_s": 2 * f, "direction": "down"},
        {"stages": q, "micro_batches": n, "forward_s": g, "backward_s": 2 * g, "direction": "up"},
    ]
    if sizes:
        models = [{**model, "activation": size} for model, size in zip(models, (first_size, second_size), strict=True)]
    return {"models": models, "ranks": p, "budget_s": budget_s, "seed": 0}


def run_command(instance: int, budget_s: float, folder: Path, cold: bool = False) -> tuple[dict[str, Any], float]:
    """Plan and check an instance by ``cdmpp plan``; the plan, and the seconds of the planning process.

    ``cold``: with an empty folder of compiled code.
    """
    request, answer = folder / "request.json", folder / "answer.json"
    request.write_text(json.dumps(request_of(instance, budget_s)))
    environment = dict(os.environ)
    if cold:
        environment["NUMBA_CACHE_DIR"] = str(folder / "cache")
    began = time.perf_counter()
    done = subprocess.run(
        [*_CLI, "pipeline", str(request), "--json"], capture_output=True, text=True, check=True, env=environment
    )
    wall_s = time.perf_counter() - began
    answer.write_text(done.stdout)
    subprocess.run([*_CLI, "check", str(request), str(answer)], capture_output=True, check=True)
    return json.loads(done.stdout), wall_s


def proven_after_s(instance: int, budget_s: float) -> float | None:
    """Seconds of the search alone until its makespan is the lower bound; None: not within the budget."""
    request = FusedRequest.model_validate(request_of(instance, budget_s))
    reached: list[float] = []

    def listen(progress: Progress) -> None:
        assert progress.best is not None and progress.bound is not None
        if progress.best <= progress.bound * (1 + 1e-9):
            reached.append(progress.spent_s)
            control.stop()

    control = SearchControl(budget_s, listen, every_s=0.0)
    request.solve(control)
    return round(reached[0], 3) if reached else None


def random_problem(random: np.random.Generator) -> Problem:
    """One to three models of unequal depth, load, pass times and directions."""
    ranks = int(random.choice([4, 6, 8, 12, 16]))
    depths = [d for d in range(2, ranks + 1) if ranks % d == 0][-3:]
    models = []
    for _ in range(int(random.choice([1, 2, 2, 2, 3]))):
        forward = float(random.choice([1.0, 2.0, 3.0, 5.0, 0.37]))
        models.append(
            Model(
                int(random.choice(depths)),
                int(random.choice([2, 4, 7, 8, 12, 16, 24, 32])),
                forward,
                forward * float(random.choice([0.8, 1.0, 1.5, 2.0, 3.0])),
                "down" if random.random() < 0.5 else "up",
            )
        )
    return Problem(ranks, tuple(models))


def solve_random(instances: int, budget_s: float) -> dict[str, Any]:
    """Gaps to the lower bound, and gains over serial 1F1B, on random instances."""
    random = np.random.default_rng(7)
    gaps, gains = [], []
    for seed in range(instances):
        result = search(random_problem(random), SearchControl(budget_s), seed=seed)
        gaps.append(max(result.schedule.makespan_s / result.lower_bound_s - 1, 0.0))
        gains.append(result.baselines["serial_1f1b"] / result.schedule.makespan_s)
    return {
        "instances": instances,
        "budget_s": budget_s,
        "proven_best": sum(gap <= 1e-9 for gap in gaps),
        "within_1.5_percent": sum(gap <= 0.015 for gap in gaps),
        "mean_gap": float(np.mean(gaps)),
        "largest_gap": max(gaps),
        "mean_gain_over_serial_1f1b": float(np.mean(gains)),
        "largest_gain_over_serial_1f1b": max(gains),
    }


def solve_limited(budget_s: float) -> list[dict[str, Any]]:
    """Makespan by memory limit; an activation of either model counts 1."""
    rows = []
    for limit in LIMITS:
        value = {**request_of(LIMITED, budget_s, sizes=False), "max_activations": limit}
        plan = make_plan("pipeline", value)
        assert check(FusedRequest.model_validate(value), plan) == []
        rows.append(
            {
                "max_activations": limit,
                "makespan_s": plan["makespan_s"],
                "lower_bound_s": plan["lower_bound_s"],
                "serial_1f1b_s": plan["baselines"]["serial_1f1b"],
            }
        )
    return rows


def solve_published(instances: int, budget_s: float, folder: Path) -> list[dict[str, Any]]:
    """Plans of the published instances beside the published results."""
    rows = []
    for instance, published in enumerate(PUBLISHED[:instances]):
        plan, wall_s = run_command(instance, budget_s, folder)
        greedy, annealed, annealed_s, peak = published[8:]
        rows.append(
            {
                "instance": instance,
                "serial_1f1b_s": plan["baselines"]["serial_1f1b"],
                "greedy_s": plan["baselines"]["greedy"],
                "published_greedy_s": greedy,
                "published_annealed_s": annealed,
                "published_annealing_took_s": annealed_s,
                "published_peak": peak,
                "lower_bound_s": plan["lower_bound_s"],
                "makespan_s": plan["makespan_s"],
                "gap": plan["gap"],
                "peak_activations": round(plan["peak_activations"], 2),
                "steps": plan["steps"],
                "command_took_s": round(wall_s, 1),
                "proven_after_s": proven_after_s(instance, budget_s),
            }
        )
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=len(PUBLISHED), help="published instances to plan")
    parser.add_argument("--random-instances", type=int, default=RANDOM_INSTANCES)
    parser.add_argument("--budget", type=float, default=4.0, metavar="S", help="seconds for a published instance")
    parser.add_argument("--random-budget", type=float, default=0.5, metavar="S", help="seconds for a random instance")
    parser.add_argument("--limited-budget", type=float, default=1.0, metavar="S", help="seconds for a memory limit")
    parser.add_argument("--skip-cold", action="store_true", help="leave out the start without compiled code")
    parser.add_argument("--out", type=Path, help="result file")
    parser.add_argument("--figure", type=Path, help="plot of a plan")
    parser.add_argument("--full", action="store_true", help="the budgets, result file and plot of the documentation")
    options = parser.parse_args()
    if options.full:
        options.budget, options.random_budget, options.limited_budget = 30.0, 2.0, 4.0
        options.out, options.figure = OUT, PICTURE
    with tempfile.TemporaryDirectory() as name:
        cold, cold_wall_s = run_command(2, options.budget, Path(name), cold=not options.skip_cold)
        rows = solve_published(options.instances, options.budget, Path(name))
    results = {
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "instances": rows,
        "cold_start": {"instance": 2, "makespan_s": cold["makespan_s"], "command_took_s": round(cold_wall_s, 1)},
        "other_instances": solve_random(options.random_instances, options.random_budget),
        "limited": {
            "instance": LIMITED,
            "budget_s": options.limited_budget,
            "rows": solve_limited(options.limited_budget),
        },
    }
    print(json.dumps({name: results[name] for name in ("cold_start", "other_instances", "limited")}, indent=1))
    if options.out is not None:
        write_result(options.out, results)
    if options.figure is not None:
        from cdmpp.plan.fused.view import draw

        request = FusedRequest.model_validate(request_of(LIMITED, min(10.0, options.budget)))
        plan = request.solve(SearchControl(request.budget))
        draw(request, plan).savefig(options.figure, dpi=110, bbox_inches="tight")


if __name__ == "__main__":
    main()
