"""Precision and compression plans beside exhaustive search, the published heuristics and their bounds.

``python -m benchmarks.planning.precision``: on networks made by chance (synthetic costs and sensitivities,
every fourth with a skip connection), (1) up to 12 operators with three types each against every choice,
(2) larger ones against the lower bound, with the heap alone beside the whole search, (3) what forgetting the
producer's side of a change would have mispriced, (4) incremental against full pricing, and (5) compression
plans of up to 8 tensors against every strategy. Writes ``benchmarks/results/precision.json``. Times are
of the processor, on one core.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.planning.precision_cases import limited, make_costs
from benchmarks.report.results import rounded, write_result
from cdmpp.compose.budget import SearchControl
from cdmpp.planning.compress.search import exhaustive as every_strategy
from cdmpp.planning.compress.search import search as compress
from cdmpp.planning.compress.strategy import Option, Tensor, timeline
from cdmpp.planning.precision.allocate import Steps, exhaustive, search, simple
from cdmpp.planning.precision.pricing import DeviceCosts, Pricing, lowest

OUT = Path("benchmarks/results/precision.json")
_SMALL, _LARGE, _TENSORS = range(21), (50, 200, 500), range(10)
_STEPS = (5_000, 50_000)


def problems(count: int, seeds: range) -> Iterator[tuple[int, DeviceCosts, float]]:
    """Networks whose lowest precision fits, with limits between the lowest and the highest precision."""
    for seed in seeds:
        share = np.random.default_rng([count, seed]).uniform(0.15, 0.7, 2)
        costs, limit_s = limited(make_costs(count, seed), float(share[0]), float(share[1]))
        if Pricing(costs, lowest(costs)).within(limit_s):
            yield seed, costs, limit_s


def small() -> dict[str, Any]:
    """At most 12 operators: the whole search, and its part without the tree, against every choice."""
    heaps, found, quick, seconds = [], [], [], []
    for seed in _SMALL:
        for _, costs, limit_s in problems(6 + seed % 7, range(seed, seed + 1)):
            best = exhaustive(costs, limit_s)
            assert best is not None
            if not best[1]:
                continue  # everything in float32 keeps the limits
            first = simple(costs, lowest(costs), limit_s)
            began = time.process_time()
            whole = search(costs, first, limit_s, Steps(SearchControl(30.0)))
            seconds.append(time.process_time() - began)
            short = search(costs, first, limit_s, Steps(SearchControl(30.0), 500))
            heaps.append(Pricing(costs, first.heap).sensitivity / best[1] - 1)
            found.append(whole.objective / best[1] - 1)
            quick.append(short.objective / best[1] - 1)
    return {
        "problems": len(found),
        "heap_mean_above_best": float(np.mean(heaps)),
        "heap_within_2_percent": float(np.mean(np.array(heaps) <= 0.02)),
        "search_worst_above_best": float(np.max(found)),
        "search_500_steps_worst_above_best": float(np.max(quick)),
        "search_500_steps_within_2_percent": float(np.mean(np.array(quick) <= 0.02)),
        "search_median_s": float(np.median(seconds)),
    }


def large(count: int) -> dict[str, Any]:
    """A network against its lower bound, after some steps: the same on every machine."""
    out: dict[str, Any] = {"operators": count}
    for most in _STEPS:
        gaps, heaps, seconds = [], [], []
        for _, costs, limit_s in problems(count, range(3)):
            first = simple(costs, lowest(costs), limit_s)
            if not first.objective:
                continue  # everything in float32 keeps the limits
            began = time.process_time()
            found = search(costs, first, limit_s, Steps(SearchControl(None), most))
            seconds.append(time.process_time() - began)
            gaps.append(found.objective / found.bound - 1)
            heaps.append(Pricing(costs, first.heap).sensitivity / found.bound - 1)
        out[f"steps_{most}"] = {
            "mean_gap": float(np.mean(gaps)),
            "worst_gap": float(np.max(gaps)),
            "cpu_s": float(np.mean(seconds)),
        }
        out["heap_mean_gap"] = float(np.mean(heaps))
    return out


def forgotten() -> dict[str, Any]:
    """Changes of one operator, priced without the casts between it and its producers.

    The published allocator keeps a raise where the time does not rise; so mispriced raises are kept or
    rejected wrongly. Counted where both pricings disagree whether the raise makes the iteration longer.
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
    """Changes of one operator: incremental against full."""
    costs = make_costs(200, 0)
    chance = np.random.default_rng(0)
    moves = [(int(chance.integers(200)), int(chance.integers(3))) for _ in range(2000)]
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
    """Synthetic: exchanges of 0.5 to 8 ms behind backward passes of 0.5 to 4 ms, CPUs of three speeds."""
    chance = np.random.default_rng(seed)
    out = []
    for i in range(count):
        network_s, backward_s = chance.uniform(0.5e-3, 8e-3), chance.uniform(0.5e-3, 4e-3)
        small_s = 0.1 * network_s + 1e-4
        slow = 1 + seed % 3
        options = (
            Option(None, "none", network_s),
            Option("c", "gpu", small_s, 0.15 * network_s + 1e-4, 0.12 * network_s + 1e-4),
            Option("c", "cpu", small_s, slow * 0.6 * network_s + 1e-4, slow * 0.3 * network_s + 1e-4),
        )
        out.append(Tensor(f"t{i}", backward_s, options))
    return out


def compression() -> dict[str, Any]:
    """Plans of 8 tensors against all 6,561 strategies; of 50 against the bound."""
    found, heuristic, none, seconds = [], [], [], []
    for seed in _TENSORS:
        made = tensors(8, seed)
        _, best_s = every_strategy(made)
        began = time.process_time()
        plan = compress(made, lambda: True)
        seconds.append(time.process_time() - began)
        found.append(plan.iteration_s / best_s - 1)
        heuristic.append(timeline(made, plan.heuristic).makespan_s / best_s - 1)
        none.append(timeline(made, (0,) * 8).makespan_s / best_s - 1)
    gaps = []
    for seed in range(3):
        plan = compress(tensors(50, seed), Steps(SearchControl(None), 10_000).go_on)
        gaps.append(plan.iteration_s / plan.bound_s - 1)
    return {
        "problems": len(found),
        "search_worst_above_best": float(np.max(found)),
        "bytecomp_mean_above_best": float(np.mean(heuristic)),
        "bytecomp_worst_above_best": float(np.max(heuristic)),
        "none_mean_above_best": float(np.mean(none)),
        "search_median_s": float(np.median(seconds)),
        "mean_gap_50_tensors_10000_steps": float(np.mean(gaps)),
    }


def main() -> None:
    result: dict[str, Any] = {}
    for study in (small, forgotten, pricing, compression):
        result[study.__name__] = study()
        print(study.__name__, result[study.__name__])
    result["large"] = [large(count) for count in _LARGE]
    print(*result["large"], sep="\n")
    write_result(OUT, rounded(result))


if __name__ == "__main__":
    main()
