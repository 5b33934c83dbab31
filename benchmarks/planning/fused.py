"""Fused pipelines: the twelve published instances through the command line, others, and memory against time.

``python -m benchmarks.planning.fused`` writes ``benchmarks/results/fused.json`` and ``docs/fused.png``; some
six minutes. The published makespans and peaks are those of the result files in the FlexFusion repository, the
official implementation of RLHFuse (NSDI'25); their annealer is meant for 512 CPUs.
"""

from __future__ import annotations

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
from cdmpp.compose.budget import Progress, SearchControl
from cdmpp.planning.fused import Model, Problem, search
from cdmpp.planning.fused.check import check
from cdmpp.planning.fused.schema import FusedRequest
from cdmpp.planning.registry import make_plan

OUT = Path("benchmarks/results/fused.json")
PICTURE = Path("docs/fused.png")
#: Stages, micro-batches and forward seconds of both models (backward takes twice as long), activation sizes;
#: published: greedy, annealed, seconds of annealing, peak memory of the plan (optimized where they did).
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
BUDGET_S = 30.0
OTHERS, OTHERS_BUDGET_S = 40, 2.0
LIMITED, LIMITS, LIMITED_BUDGET_S = 4, (18, 16, 14, 12, 10, 8, 6, 4, 2, 1), 4.0
_CLI = [sys.executable, "-c", "from cdmpp.cli.main import main; main()", "plan"]


def request_of(at: int, *, sizes: bool = True) -> dict[str, Any]:
    """A published instance as a request."""
    p, q, m, n, f, g, a, b = PUBLISHED[at][:8]
    models = [
        {"stages": p, "micro_batches": m, "forward_s": f, "backward_s": 2 * f, "direction": "down"},
        {"stages": q, "micro_batches": n, "forward_s": g, "backward_s": 2 * g, "direction": "up"},
    ]
    if sizes:
        models = [{**model, "activation": size} for model, size in zip(models, (a, b), strict=True)]
    return {"models": models, "ranks": p, "budget_s": BUDGET_S, "seed": 0}


def through_the_command_line(at: int, folder: Path, cold: bool = False) -> dict[str, Any]:
    """Plan and check an instance in processes of their own; seconds of the plan's whole process."""
    request, answer = folder / "request.json", folder / "answer.json"
    request.write_text(json.dumps(request_of(at)))
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
    found: dict[str, Any] = json.loads(done.stdout)
    return {**found, "wall_s": wall_s}


def until_proven_s(at: int) -> float | None:
    """Seconds of the search alone until its makespan is the lower bound; None: not within the budget."""
    request = FusedRequest.model_validate(request_of(at))
    reached: list[float] = []

    def listen(progress: Progress) -> None:
        assert progress.best is not None and progress.bound is not None
        if progress.best <= progress.bound * (1 + 1e-9):
            reached.append(progress.spent_s)
            watch.stop()

    watch = SearchControl(BUDGET_S, listen, every_s=0.0)
    request.solve([], watch)
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


def others() -> dict[str, Any]:
    """Gaps to the lower bound, and gains over serial 1F1B, on instances nobody published."""
    random = np.random.default_rng(7)
    gaps, gains = [], []
    for at in range(OTHERS):
        found = search(random_problem(random), SearchControl(OTHERS_BUDGET_S), seed=at)
        gaps.append(max(found.schedule.makespan_s / found.lower_bound_s - 1, 0.0))
        gains.append(found.baselines["serial_1f1b"] / found.schedule.makespan_s)
    return {
        "instances": OTHERS,
        "budget_s": OTHERS_BUDGET_S,
        "proven_best": sum(gap <= 1e-9 for gap in gaps),
        "within_1.5_percent": sum(gap <= 0.015 for gap in gaps),
        "mean_gap": float(np.mean(gaps)),
        "largest_gap": max(gaps),
        "mean_gain_over_serial_1f1b": float(np.mean(gains)),
        "largest_gain_over_serial_1f1b": max(gains),
    }


def limited() -> list[dict[str, Any]]:
    """Makespan by activation limit, one activation of either model counting 1."""
    rows = []
    for limit in LIMITS:
        request = {**request_of(LIMITED, sizes=False), "max_activations": limit, "budget_s": LIMITED_BUDGET_S}
        found = make_plan("pipeline", request)
        assert check(FusedRequest.model_validate(request), found) == []
        rows.append(
            {
                "max_activations": limit,
                "makespan_s": found["makespan_s"],
                "lower_bound_s": found["lower_bound_s"],
                "serial_1f1b_s": found["baselines"]["serial_1f1b"],
            }
        )
    return rows


def main() -> None:
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cold = through_the_command_line(2, folder, cold=True)
        for at, instance in enumerate(PUBLISHED):
            found = through_the_command_line(at, folder)
            greedy, annealed, annealed_s, peak = instance[8:]
            rows.append(
                {
                    "instance": at,
                    "serial_1f1b_s": found["baselines"]["serial_1f1b"],
                    "greedy_s": found["baselines"]["greedy"],
                    "published_greedy_s": greedy,
                    "published_annealed_s": annealed,
                    "published_annealing_took_s": annealed_s,
                    "published_peak": peak,
                    "lower_bound_s": found["lower_bound_s"],
                    "makespan_s": found["makespan_s"],
                    "gap": found["gap"],
                    "peak_activations": round(found["peak_activations"], 2),
                    "steps": found["steps"],
                    "command_took_s": round(found["wall_s"], 1),
                    "proven_after_s": until_proven_s(at),
                }
            )
            print(rows[-1], flush=True)
    values = {
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "instances": rows,
        "cold_start": {"instance": 2, "makespan_s": cold["makespan_s"], "command_took_s": round(cold["wall_s"], 1)},
        "other_instances": others(),
        "limited": {"instance": LIMITED, "budget_s": LIMITED_BUDGET_S, "rows": limited()},
    }
    write_result(OUT, values)
    from cdmpp.planning.fused.plot import draw

    value = {**request_of(LIMITED), "budget_s": 10}
    request = FusedRequest.model_validate(value)
    draw(request, make_plan("pipeline", value)).savefig(PICTURE, dpi=110, bbox_inches="tight")


if __name__ == "__main__":
    main()
