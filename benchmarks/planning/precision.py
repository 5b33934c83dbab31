"""Precision and compression plans compared with the published heuristics and with their lower bounds.

On random networks (synthetic costs and sensitivities, three types, every third operator with a skip connection):

1. up to 12 operators: the heap above the proven best;
2. larger networks: gap to the lower bound and proofs, for several budgets, with the heap alone;
3. the error of pricing a change without the casts on the producer's side;
4. speed of incremental and of full pricing;
5. compression plans of 8 tensors against every strategy, and of 50 tensors against the bound.

``--against CHECKOUT`` also runs the search that the solver replaced, from a checkout of commit 283c9af, on the same
problems with the same budgets. Writes ``benchmarks/results/precision.json``.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.planning.precision_cases import make_costs, problems
from benchmarks.planning.precision_compare import compare, run, solve, summary
from benchmarks.report.results import rounded, write_result
from cdmpp.plan.compress.search import exhaustive as every_strategy
from cdmpp.plan.compress.search import search as compress
from cdmpp.plan.compress.strategy import Option, Tensor, timeline
from cdmpp.plan.precision.pricing import Pricing, lowest
from cdmpp.plan.precision.qsync import heap

OUT = Path("benchmarks/results/precision.json")


def small(networks: int) -> dict[str, Any]:
    """Networks of at most 12 operators, which the solver proves; tests compare it with every choice."""
    heaps, seconds = [], []
    for seed in range(networks):
        for costs, limit_s in problems(6 + seed % 7, [seed]):
            began = time.process_time()
            best = solve(costs, limit_s, None)
            seconds.append(time.process_time() - began)
            assert best.proven
            if best.objective:  # otherwise everything fits in float32
                levels = heap(costs, lowest(costs), limit_s)
                heaps.append(Pricing(costs, levels).sensitivity / best.objective - 1)
    return {
        "problems": len(heaps),
        "heap_mean_above_best": float(np.mean(heaps)),
        "heap_within_2_percent": float(np.mean(np.array(heaps) <= 0.02)),
        "solver_median_cpu_s": float(np.median(seconds)),
    }


def large(count: int, seeds: int, budgets: list[float]) -> dict[str, Any]:
    """Networks of one size against their lower bounds."""
    out: dict[str, Any] = {"operators": count}
    rows: list[Any] = []
    for budget_s in budgets:
        rows = run(count, seeds, budget_s)
        out[f"budget_{budget_s:g}_s"] = summary(rows)
    heaps = []
    for (costs, limit_s), (_, bound, *_) in zip(problems(count, range(seeds)), rows, strict=True):
        if bound:
            heaps.append(Pricing(costs, heap(costs, lowest(costs), limit_s)).sensitivity / bound - 1)
    out["heap_mean_gap"] = float(np.mean(heaps)) if heaps else 0.0
    return out


def forgotten() -> dict[str, Any]:
    """Raises of one operator, priced without the casts between it and its producers.

    The published allocator accepts a raise that does not increase the time, so it accepts or rejects mispriced
    raises wrongly. ``sign_wrong``: share of raises for which both pricings disagree whether the time increases.
    """
    wrong, changes, errors = 0, 0, []
    for seed in range(10):
        costs = make_costs(30, seed)
        levels = np.random.default_rng(seed).integers(0, 3, 30).tolist()
        for i in range(30):
            before = Pricing(costs, levels)
            if levels[i] == 2:
                continue
            after = list(levels)
            after[i] += 1
            full = Pricing(costs, after).iteration_s - before.iteration_s
            # Its own forward slot and its producers' backward slots keep the old casts.
            old = sum(
                (
                    edge.forward_s[levels[edge.producer], levels[i]]
                    - edge.forward_s[levels[edge.producer], after[i]]
                    + edge.backward_s[levels[edge.producer], levels[i]]
                    - edge.backward_s[levels[edge.producer], after[i]]
                )
                for edge in costs.edges
                if edge.consumer == i
            )
            changes += 1
            wrong += (full > 0) != (full + old > 0)
            errors.append(abs(old) / max(abs(full), 1e-12))
    return {"changes": changes, "sign_wrong": float(wrong / changes), "median_relative_error": float(np.median(errors))}


def pricing() -> dict[str, Any]:
    """Changes of one operator per second: incremental and full pricing."""
    costs = make_costs(200, 0)
    random = np.random.default_rng(0)
    moves = [(int(random.integers(200)), int(random.integers(3))) for _ in range(2000)]
    priced = Pricing(costs, lowest(costs))
    began = time.process_time()
    for i, level in moves:
        priced.change(i, level)
        _ = priced.within(1.0)
    incremental = time.process_time() - began
    levels = lowest(costs)
    began = time.process_time()
    for i, level in moves[:200]:
        levels[i] = level
        _ = Pricing(costs, levels).within(1.0)
    full = 10 * (time.process_time() - began)
    return {"operators": 200, "changes_per_s": len(moves) / incremental, "times_faster": full / incremental}


def tensors(count: int, seed: int) -> list[Tensor]:
    """Synthetic gradients: exchanges of 0.5 to 8 ms, backward passes of 0.5 to 4 ms, CPUs of three speeds."""
    random = np.random.default_rng(seed)
    out = []
    for i in range(count):
        network_s, backward_s = random.uniform(0.5e-3, 8e-3), random.uniform(0.5e-3, 4e-3)
        small_s = 0.1 * network_s + 1e-4
        slow = 1 + seed % 3
        options = (
            Option(None, "none", network_s),
            Option("c", "gpu", small_s, 0.15 * network_s + 1e-4, 0.12 * network_s + 1e-4),
            Option("c", "cpu", small_s, slow * 0.6 * network_s + 1e-4, slow * 0.3 * network_s + 1e-4),
        )
        out.append(Tensor(f"t{i}", backward_s, options))
    return out


def steps(most: int) -> Callable[[], bool]:
    """A function that returns True ``most`` times."""
    remaining = iter(range(most))
    return lambda: next(remaining, None) is not None


def compression(problems: int, larger: int) -> dict[str, Any]:
    """Plans of 8 tensors against all 6,561 strategies; of 50 against the bound."""
    excess, heuristic, none, seconds = [], [], [], []
    for seed in range(problems):
        gradients = tensors(8, seed)
        _, best_s = every_strategy(gradients)
        began = time.process_time()
        plan = compress(gradients, lambda: True)
        seconds.append(time.process_time() - began)
        excess.append(plan.iteration_s / best_s - 1)
        heuristic.append(timeline(gradients, plan.heuristic).makespan_s / best_s - 1)
        none.append(timeline(gradients, (0,) * 8).makespan_s / best_s - 1)
    gaps = []
    for seed in range(larger):
        plan = compress(tensors(50, seed), steps(10_000))
        gaps.append(plan.iteration_s / plan.bound_s - 1)
    return {
        "problems": len(excess),
        "search_worst_above_best": float(np.max(excess)),
        "bytecomp_mean_above_best": float(np.mean(heuristic)),
        "bytecomp_worst_above_best": float(np.max(heuristic)),
        "none_mean_above_best": float(np.mean(none)),
        "search_median_s": float(np.median(seconds)),
        "mean_gap_50_tensors_10000_steps": float(np.mean(gaps)) if gaps else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operators", type=int, nargs="+", default=[12, 50, 200, 500], help="sizes of large networks")
    parser.add_argument("--seeds", type=int, default=3, help="networks of each size")
    parser.add_argument("--budgets", type=float, nargs="+", default=[1.0, 8.0], metavar="S", help="seconds of a search")
    parser.add_argument("--networks", type=int, default=21, help="small networks")
    parser.add_argument("--tensors", type=int, nargs=2, default=[10, 3], help="problems of 8 and of 50 tensors")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="compare with the earlier search there")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    result: dict[str, Any] = {
        "small": small(options.networks),
        "forgotten": forgotten(),
        "pricing": pricing(),
        "compression": compression(*options.tensors),
    }
    for name, figures in result.items():
        print(name, figures, flush=True)
    result["large"] = []
    for count in options.operators:
        result["large"].append(large(count, options.seeds, options.budgets))
        print(result["large"][-1], flush=True)
    if options.against is not None:
        result["comparison"] = compare(options.against, options.operators, options.seeds, options.budgets)
    elif options.out.exists():  # the last comparison stays
        result["comparison"] = json.loads(options.out.read_text()).get("comparison", [])
    write_result(options.out, rounded(result))


if __name__ == "__main__":
    main()
