"""RL plans evaluated on true lengths: seven regimes, three seeds, two kinds of rankers. All times are simulated.

    python -m benchmarks.planning.rl

Lengths are synthetic: log-normal (median 1,500 tokens, sigma 0.9), truncated at 20,480. The planner gets 20,000
lengths of other steps and the ranker's recall, never the lengths of the evaluated step. Writes
``benchmarks/results/rl.json`` and prints the tables of docs/rl.md.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from cdmpp import make_plan
from cdmpp.plan.rl.costs import Pool, TrainingCost
from cdmpp.plan.rl.dispatch import Dispatcher, TailSplit
from cdmpp.plan.rl.engine import GenerationEngine, SampleQueues
from cdmpp.plan.rl.generation import generate
from cdmpp.plan.rl.lengths import LengthDistribution, LengthRanker, Misses, SampledSteps, draw_steps
from cdmpp.plan.rl.problem import RlProblem
from cdmpp.plan.rl.search import search
from cdmpp.plan.rl.search_result import SearchResult
from cdmpp.plan.rl.sizes import SizingProblem
from cdmpp.plan.rl.streaming import Mode
from cdmpp.predict.requests.budget import SearchControl

#: Decode curve a_s + b_s * batch; samples; instances; largest batch of an instance.
Regime = tuple[float, float, int, int, int]
REGIMES: tuple[Regime, ...] = (
    (0.008, 0.00002, 1024, 16, 16),
    (0.008, 0.00002, 1024, 16, 32),
    (0.008, 0.00002, 1024, 16, 64),
    (0.008, 0.0001, 2048, 16, 128),
    (0.008, 0.0001, 4096, 16, 256),
    (0.008, 0.00005, 2048, 8, 128),
    (0.01, 0.00003, 1024, 8, 128),
)
SEEDS = (0, 1, 2)
MODES: tuple[Mode, ...] = ("sync", "async")
MEDIAN, SIGMA, CUT = 1500, 0.9, 20_480
RECALL, SHARE = 0.87, 0.2
#: Length distributions: "heavy" as above, and three others for queues with several waves of batches.
Kind = Literal["heavy", "narrow", "uniform", "cut"]
KINDS: tuple[Kind, ...] = ("narrow", "uniform", "cut")
RESULTS = Path(__file__).parents[1] / "results" / "rl.json"


def true_lengths(count: int, seed: int, kind: Kind = "heavy") -> np.ndarray[Any, np.dtype[np.int64]]:
    """Draw true response lengths, in tokens."""
    rng = np.random.default_rng(seed)
    if kind == "uniform":
        drawn = rng.uniform(10, 8000, count)
    else:
        median, sigma = {"heavy": (MEDIAN, SIGMA), "narrow": (2000, 0.4), "cut": (6000, 1.0)}[kind]
        drawn = rng.lognormal(np.log(median), sigma, count)
    return np.clip(np.rint(drawn), 1, 16_384 if kind == "cut" else CUT).astype(np.int64)


def request(regime: Regime, seed: int, misses: Misses, kind: Kind = "heavy") -> dict[str, Any]:
    """The planning request: past lengths, not those of the evaluated step."""
    a_s, b_s, samples, instances, max_batch = regime
    return {
        "lengths": {"samples": true_lengths(20_000, 10_000 + seed, kind).tolist()},
        "samples_per_step": samples,
        "ranker": {"recall": RECALL, "share": SHARE, "misses": misses},
        "decode": {"a_s": a_s, "b_s": b_s},
        "kv": {"max_batch": max_batch},
        "pools": [{"name": "generation", "units": instances, "stages": ["generation"]}],
        "budget_s": 60,
        "seed": seed,
    }


def judge(regime: Regime, seed: int, misses: Misses, split: TailSplit, kind: Kind = "heavy") -> dict[str, float]:
    """Seconds of one step with its true lengths: the plan's split and alternatives.

    Parameters
    ----------
    regime : tuple
    seed : int
    misses : {"near", "any"}
        Errors of the ranker in this step; the planner may have assumed others.
    split : TailSplit
    kind : str
        Length distribution.
    """
    a_s, b_s, samples, instances, max_batch = regime
    lengths = true_lengths(samples, 20_000 + seed, kind)
    rng = np.random.default_rng([seed, 30_000])
    ranker = LengthRanker(RECALL, SHARE, misses)
    row = lengths[ranker.rank(lengths, rng)]
    guesses = row * np.exp(0.5 * rng.standard_normal(samples))
    step = SampledSteps(row[None], ranker.tail_samples(samples), rng.permutation(samples)[None], guesses[None])
    dispatcher = Dispatcher(GenerationEngine(a_s + b_s * np.arange(max_batch + 1)), step)
    splits = [TailSplit(tail, instances - tail) for tail in range(instances)]

    def makespan(split: TailSplit) -> float:
        return float(dispatcher.makespans(split)[0])

    return {
        "random": float(dispatcher.random_finish_times(instances).max()),
        "dealt": generate(dispatcher.engine, row, SampleQueues.dealt(samples, instances)).end_s,
        "lpt": makespan(TailSplit(0, instances)),
        "rule_sum": makespan(dispatcher.quantile_rule_split(instances, "sum")),
        "rule_max": makespan(dispatcher.quantile_rule_split(instances)),
        "guesses": float(dispatcher.guessed_finish_times(instances).max()),
        "plan": makespan(split),
        "best": min(map(makespan, splits)),
        "floor": float(dispatcher.longest_alone_s()[0]),
    }


def planned_split(request: dict[str, Any]) -> TailSplit:
    """The split that the planner chooses."""
    groups = make_plan("rl", request)["tail_split"]
    return TailSplit(groups["tail"]["instances"], groups["regular"]["instances"])


def splits(regimes: Sequence[Regime], seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Tail splits of every regime, seed and assumed ranker, evaluated on true lengths."""
    rows = []
    assumed: Misses
    for regime in regimes:
        for assumed in ("near", "any"):
            for seed in seeds:
                started = time.perf_counter()
                split = planned_split(request(regime, seed, assumed))
                seconds = time.perf_counter() - started
                true_misses: tuple[Misses, ...] = ("near", "any") if assumed == "near" else ("any",)
                for misses in true_misses:
                    ends = judge(regime, seed, misses, split)
                    rows.append(
                        {"regime": list(regime), "seed": seed, "asked": assumed, "ranker": misses}
                        | {"tail_instances": split.tail, "search_s": seconds, "ends_s": ends}
                        | {"over_lpt": ends["plan"] / ends["lpt"] - 1, "over_best": ends["plan"] / ends["best"] - 1}
                    )
    return rows


def waves(regimes: Sequence[Regime], seeds: Sequence[int]) -> list[dict[str, Any]]:
    """One shared queue against dealing samples in advance, where not all samples run at once."""
    rows = []
    for kind in KINDS:
        for regime in regimes:
            for seed in seeds:
                split = planned_split(request(regime, seed, "near", kind))
                ends = judge(regime, seed, "near", split, kind)
                over_lpt = ends["plan"] / ends["lpt"] - 1
                rows.append(
                    {"lengths": kind, "regime": list(regime), "seed": seed, "ends_s": ends}
                    | {"tail_instances": split.tail, "over_lpt": over_lpt}
                )
    return rows


def sizes(units: int) -> dict[str, Any]:
    """Size searches: twelve sizes against all sizes on one site, and two sites."""
    curve = 0.008 + 0.00005 * np.arange(129)
    cost = TrainingCost(per_token_s=0.0005, fixed_s=2)
    pool = Pool("site", units, 4.0, engine=GenerationEngine(curve), training=cost)
    lengths = LengthDistribution.of_samples(true_lengths(20_000, 1).tolist())
    ranker = LengthRanker(RECALL, SHARE)

    def figures(result: SearchResult) -> list[float]:
        return [result.sizes.generation_units, result.sizes.training_units, result.sizes.step_s]

    out: dict[str, Any] = {"units": units}
    for mode in MODES:
        problem = RlProblem(lengths, ranker, 1024, SizingProblem((pool,), mode), doubt=0.1)
        complete, twelve = search(problem), search(problem, max_steps=12)
        out[mode] = {
            "all": figures(complete),
            "twelve": figures(twelve),
            "shared": complete.sizes.shared,
            "not_streamed_s": float(complete.unstreamed.step_s.mean()),
            "colocated_s": None if complete.colocated is None else complete.colocated[0],
            "lower_bound_s": complete.bound_s,
        }
    far = Pool("far", units, 1.5, "b", engine=GenerationEngine(1.4 * curve))
    near = Pool("near", units, 4.0, "a", training=cost)
    sizing = SizingProblem((far, near), "async", cross_site_s=5)
    two_sites = search(RlProblem(lengths, ranker, 4096, sizing, doubt=0.1))
    out["two_sites"] = {
        "sizes": figures(two_sites),
        "generation_s": float(two_sites.outcome.stage_s.mean()),
        "training_s": float(two_sites.outcome.training_s.mean()),
        "lower_bound_s": two_sites.bound_s,
    }
    return out


def large(units: int, budget_s: float) -> dict[str, Any]:
    """A search with many units and the largest step of the service: seconds it takes, and the gap it leaves."""
    control = SearchControl(budget_s)
    cost = {"seconds_per_token": 0.0003, "fixed_s": 1.5, "efficiency": 0.95, "batch_overhead_s": 0.1}
    value = request((0.008, 0.00005, 65_536, units, 128), 0, "near") | {
        "inference": 0.06,
        "training": cost,
        "pools": [
            {"name": "near", "units": units, "price_per_hour": 4.0, "site": "a"},
            {"name": "far", "units": units, "price_per_hour": 1.8, "site": "b"},
        ],
        "weights": {"same_site_s": 0.5, "cross_site_s": 6.0},
        "budget_s": budget_s,
    }
    plan = make_plan("rl", value, control=control)
    figures = {"units": units, "budget_s": budget_s, "search_s": control.spent_s, "sizes_tried": plan["sizes_tried"]}
    return figures | {name: plan[name] for name in ("step_s", "lower_bound_s", "gap")}


def migration(regimes: Sequence[Regime]) -> list[dict[str, Any]]:
    """Inference (reward, reference, critic) beside the tail of generation, against after it (RLHFuse)."""
    rows = []
    for regime in regimes:
        for inference_s in (0.1, 0.3, 0.6):
            kv = {"max_batch": regime[4], "bytes_per_token": 131072.0}
            plan = make_plan("rl", request(regime, 0, "near") | {"inference": inference_s, "kv": kv})
            moved = plan["migration"]
            rows.append(
                {
                    "regime": list(regime),
                    "inference_s": inference_s,
                    "stage_s": plan["step_s"],
                    "not_migrated_s": plan["baselines"].get("not_migrated", plan["step_s"]),
                    "lower_bound_s": plan["lower_bound_s"],
                    "threshold_share": None if moved is None else moved["threshold_share"],
                    "remaining": None if moved is None else moved["remaining_instances"],
                }
            )
    return rows


def speed() -> dict[str, float]:
    """Samples simulated per second on one core."""
    engine = GenerationEngine(0.008 + 0.00005 * np.arange(129))
    lengths = LengthDistribution.of_samples(true_lengths(20_000, 1).tolist())
    steps = draw_steps(lengths, LengthRanker(), 2048, 16, 0)
    seconds = []
    for _ in range(20):
        started = time.perf_counter()
        Dispatcher(engine, steps).finish_times(TailSplit(0, 8))
        seconds.append(time.perf_counter() - started)
    # The fastest of many: other processes may use the machine.
    return {"samples_per_s": steps.lengths.size / min(seconds)}


def table(rows: list[dict[str, Any]], regimes: Sequence[Regime], assumed: str, misses: str) -> str:
    """Markdown table of means over the seeds, one line per regime."""
    names = ("random", "lpt", "rule_sum", "rule_max", "guesses", "plan", "best", "floor")
    head = ("random", "LPT only", "rule, sum", "rule, max", "guesses", "**plan**", "best split", "longest alone")
    lines = [
        "| a + b·batch (ms); samples, instances, batch | "
        + " | ".join(head)
        + " | tail instances | worst over LPT | worst over best |",
        "| --- |" + " ---: |" * (len(head) + 3),
    ]
    for regime in regimes:
        selected = [
            row for row in rows if (tuple(row["regime"]), row["asked"], row["ranker"]) == (regime, assumed, misses)
        ]
        means = {name: float(np.mean([row["ends_s"][name] for row in selected])) for name in names}
        cells = [f"**{mean:.1f}**" if name == "plan" else f"{mean:.1f}" for name, mean in means.items()]
        a_s, b_s, samples, instances, max_batch = regime
        tails = "/".join(str(row["tail_instances"]) for row in selected)
        lines.append(
            f"| {1e3 * a_s:g} + {1e3 * b_s:g}·batch; {samples}, {instances}, {max_batch} | "
            + " | ".join(cells)
            + f" | {tails} | {100 * max(row['over_lpt'] for row in selected):+.1f} %"
            + f" | {100 * max(row['over_best'] for row in selected):+.1f} % |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run all parts, write the results, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="number of seeds (default: %(default)s)")
    parser.add_argument("--regimes", type=int, default=len(REGIMES), help="use the first regimes (default: all)")
    parser.add_argument("--units", type=int, default=64, help="units of a site (default: %(default)s)")
    parser.add_argument("--large-units", type=int, default=10_000, help="units of large pools (default: %(default)s)")
    parser.add_argument("--budgets", type=float, nargs="*", default=[1, 3, 30], help="budgets of large pools")
    parser.add_argument("--out", type=Path, default=RESULTS, help="result file (default: %(default)s)")
    options = parser.parse_args()
    regimes, seeds = REGIMES[: options.regimes], range(options.seeds)
    wave_regimes = regimes[:2]
    rows, wave_rows = splits(regimes, seeds), waves(wave_regimes, seeds)
    results = {
        "lengths": {"median": MEDIAN, "sigma": SIGMA, "cut": CUT},
        "machine": platform.processor() or platform.machine(),
        "splits": rows,
        "waves": wave_rows,
        "sizes": sizes(options.units),
        "migration": migration([regime for index, regime in enumerate(regimes) if index in (0, 5, 6)]),
        "speed": speed(),
        "large": [large(options.large_units, budget_s) for budget_s in options.budgets],
    }
    options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    for assumed, misses in (("near", "near"), ("near", "any"), ("any", "any")):
        print(f"\nassumed misses: {assumed}; true misses: {misses}\n")
        print(table(rows, regimes, assumed, misses))
    for kind in KINDS:
        for regime in wave_regimes:
            selected = [row for row in wave_rows if (row["lengths"], row["regime"]) == (kind, list(regime))]
            means = {name: np.mean([row["ends_s"][name] for row in selected]) for name in selected[0]["ends_s"]}
            tails, worst = [row["tail_instances"] for row in selected], max(row["over_lpt"] for row in selected)
            print(kind, regime, tails, f"{worst:+.4f}", {name: f"{mean:.1f}" for name, mean in means.items()})
    print(json.dumps({key: results[key] for key in ("sizes", "migration", "speed", "large")}, indent=1))


if __name__ == "__main__":
    main()
