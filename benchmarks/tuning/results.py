"""Figures of finished searches: best latencies, time, ratios."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

#: Cost models, in the order in which they are run and shown.
METHODS = ("random", "xgboost", "frozen", "fine-tuned", "exploring")
#: Numbers of measured trials at which searches are compared.
AT = (8, 16, 24, 32, 64, 128)
#: Goals: trials after which a search is as good as TVM's model in the end, and the time of a round's search relative
#: to the time with TVM's model.
GOAL_TRIALS, GOAL_TIME = 24, 0.7
#: What the ratios are to: TVM's model with all of its trials.
AGAINST, AGAINST_TRIALS = "xgboost", 128


def best_so_far(search: Mapping[str, Any]) -> list[float]:
    """Least seconds of the first 1, 2, ... measured trials; infinite before the first that succeeded."""
    latencies = [
        math.inf if latency is None else latency for each in search["rounds"] for _, latency, _ in each["trials"]
    ]
    return list(accumulate(latencies, min))


def best_at(search: Mapping[str, Any], trials: int) -> float:
    """Least seconds of the first so many trials; a search whose space had fewer ended with what it had."""
    best = best_so_far(search)
    return best[min(trials, len(best)) - 1]


def over_time(search: Mapping[str, Any]) -> list[tuple[float, float]]:
    """(Wall-clock seconds, least seconds so far) after each round.

    Every trial is charged with what building and timing it took when that was done, though a program that
    another search had measured was not measured again.
    """
    points, clock, best = [], 0.0, math.inf
    for round in search["rounds"]:
        clock += round["search_s"] + round["update_s"] + sum(cost for _, _, cost in round["trials"])
        best = min([best, *(latency for _, latency, _ in round["trials"] if latency is not None)])
        points.append((clock, best))
    return points


def summarise(searches: Sequence[Mapping[str, Any]], trials: int) -> dict[str, Any]:
    """Figures of all methods over the searches that every method finished.

    Parameters
    ----------
    searches : sequence of search
        As :func:`benchmarks.tuning.search.run_search` gives them.
    trials : int
        Measured trials of each.
    """
    by = {(s["task"], s["seed"], s["method"]): s for s in searches}
    methods = [m for m in METHODS if any(key[2] == m for key in by)]
    pairs = sorted({(t, s) for t, s, _ in by if all((t, s, m) in by for m in methods)}, key=_order(searches))
    last = min(AGAINST_TRIALS, trials)
    per_round = {}
    for m in methods if pairs else ():
        rounds = [r for t, s in pairs for r in by[t, s, m]["rounds"]]
        model = [r["predict_s"] + r["update_s"] for r in rounds]
        per_round[m] = {
            "rounds": len(rounds),
            "search_s": mean(r["search_s"] + r["update_s"] for r in rounds),
            "predict_s": mean(r["predict_s"] for r in rounds),
            "update_s": mean(r["update_s"] for r in rounds),
            "cost_model_s": mean(model),
            "candidates": mean(r["predicted"] for r in rounds),
            "measuring_s": mean(sum(cost for _, _, cost in r["trials"]) for r in rounds),
        }
    return {
        "trials": trials,
        "methods": methods,
        "against": f"{AGAINST} at {last} trials",
        "searches": len(pairs) * len(methods),
        "tasks": [
            {"task": name, "hash": by[name, seeds[0], methods[0]]["hash"], "seeds": seeds}
            for name in dict.fromkeys(task for task, _ in pairs)
            if (seeds := [s for t, s in pairs if t == name])
        ],
        "per_round": per_round,
        "reached": reached(by, pairs, last) if AGAINST in methods else {},
        "curves": [
            {
                "task": t,
                "seed": s,
                "method": m,
                "best_s": [_short(b) for b in best_so_far(by[t, s, m])],
                "time_s": [[_short(clock), _short(b)] for clock, b in over_time(by[t, s, m])],
            }
            for t, s in pairs
            for m in methods
        ],
    }


def ratios(result: Mapping[str, Any], method: str) -> dict[int, float]:
    """Geometric mean, over tasks and seeds, of the best latency relative to the final one of TVM's model.

    Returns
    -------
    dict of int to float
        By number of trials; those after which every search has a program that ran.
    """
    goals = {(c["task"], c["seed"]): c["best_s"][-1] for c in result["curves"] if c["method"] == AGAINST}
    curves = [c for c in result["curves"] if c["method"] == method]
    means = {}
    for n in range(1, result["trials"] + 1 if goals else 1):
        best = [(after(c, n), goals[c["task"], c["seed"]]) for c in curves]
        if all(seconds is not None for seconds, _ in best):
            means[n] = geometric([seconds / goal for seconds, goal in best])
    return means


def after(curve: Mapping[str, Any], trials: int) -> Any:
    """Best seconds of a curve after so many trials; None before the first program that ran."""
    return curve["best_s"][min(trials, len(curve["best_s"])) - 1]


def reached(
    by: Mapping[tuple[str, int, str], Mapping[str, Any]], pairs: Iterable[tuple[str, int]], last: int
) -> dict[str, dict[str, Any]]:
    """In how many searches a method reached what TVM's model had in the end, and after how many trials."""
    summary: dict[str, dict[str, Any]] = {}
    for t, s in pairs:
        goal = best_at(by[t, s, AGAINST], last)
        for m in METHODS:
            if (t, s, m) not in by:
                continue
            entry = summary.setdefault(m, {"searches": 0, "reached": 0, "after": []})
            entry["searches"] += 1
            count = next((i + 1 for i, b in enumerate(best_so_far(by[t, s, m])) if b <= goal), None)
            if count is not None:
                entry["reached"] += 1
                entry["after"].append(count)
    return summary


def geometric(values: Iterable[float]) -> float:
    """Geometric mean."""
    logs = [math.log(v) for v in values]
    return math.exp(sum(logs) / len(logs))


def mean(values: Iterable[float]) -> float:
    """Arithmetic mean."""
    numbers = list(values)
    return sum(numbers) / len(numbers)


def _short(value: float) -> float | None:
    """Five digits for a curve; None for what is not there yet."""
    return None if math.isinf(value) else float(f"{value:.5g}")


def _order(searches: Sequence[Mapping[str, Any]]) -> Any:
    """Tasks as they come in the searches, then seeds."""
    names = list(dict.fromkeys(s["task"] for s in searches))
    return lambda pair: (names.index(pair[0]), pair[1])
