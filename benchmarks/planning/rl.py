"""RL plans judged on true lengths: seven regimes, three seeds, two kinds of rankers. All times are simulated.

    python -m benchmarks.planning.rl

Lengths are log-normal (median 1,500 tokens, sigma 0.9), cut at 20,480: invented, heavy-tailed. The planner
sees 20,000 lengths of other steps and the ranker's recall, never the lengths of the step that it is judged
on. Writes ``benchmarks/results/rl.json`` and prints the tables of docs/rl.md.
"""

from __future__ import annotations

import json
import platform
import time
from pathlib import Path
from typing import Any, Literal

import numpy as np

from cdmpp import make_plan
from cdmpp.planning.rl import (
    Dispatcher,
    Drawn,
    Engine,
    Lengths,
    Pool,
    Problem,
    Queues,
    Ranker,
    Split,
    Terms,
    TrainingCost,
    draw_steps,
    generate,
    search,
)
from cdmpp.planning.rl.streaming import Mode

#: a_s, b_s of PTL(batch) = a + b batch; samples, instances, samples that an instance holds at a time.
REGIMES = (
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
#: Lengths: as said above; and three others, for queues where the batch makes several waves.
Kind = Literal["heavy", "narrow", "uniform", "cut"]
KINDS: tuple[Kind, ...] = ("narrow", "uniform", "cut")
RESULTS = Path(__file__).parents[1] / "results" / "rl.json"


def true_lengths(count: int, seed: int, kind: Kind = "heavy") -> np.ndarray[Any, np.dtype[np.int64]]:
    """Lengths as they turn out."""
    rng = np.random.default_rng(seed)
    if kind == "uniform":
        drawn = rng.uniform(10, 8000, count)
    else:
        median, sigma = {"heavy": (MEDIAN, SIGMA), "narrow": (2000, 0.4), "cut": (6000, 1.0)}[kind]
        drawn = rng.lognormal(np.log(median), sigma, count)
    return np.clip(np.rint(drawn), 1, 16_384 if kind == "cut" else CUT).astype(np.int64)


def request(regime: tuple[float, float, int, int, int], seed: int, misses: str, kind: Kind = "heavy") -> dict[str, Any]:
    """What the planner is asked: past lengths, not those of the step."""
    a_s, b_s, samples, instances, cap = regime
    return {
        "lengths": {"samples": true_lengths(20_000, 10_000 + seed, kind).tolist()},
        "samples_per_step": samples,
        "ranker": {"recall": RECALL, "share": SHARE, "misses": misses},
        "decode": {"a_s": a_s, "b_s": b_s},
        "kv": {"max_batch": cap},
        "pools": [{"name": "generation", "units": instances, "stages": ["generation"]}],
        "budget_s": 60,
        "seed": seed,
    }


def judge(
    regime: tuple[float, float, int, int, int], seed: int, truth: str, split: Split, kind: Kind = "heavy"
) -> dict[str, float]:
    """One step with its true lengths: the plan's split beside others, seconds.

    Parameters
    ----------
    truth : {"near", "any"}
        How the ranker of this step errs, whatever the planner took it to do.
    """
    a_s, b_s, samples, instances, cap = regime
    lengths = true_lengths(samples, 20_000 + seed, kind)
    rng = np.random.default_rng([seed, 30_000])
    ranker = Ranker(RECALL, SHARE, "near" if truth == "near" else "any")
    row = lengths[ranker.rank(lengths, rng)]
    guesses = row * np.exp(0.5 * rng.standard_normal(samples))
    drawn = Drawn(row[None], ranker.tail(samples), rng.permutation(samples)[None], guesses[None])
    steps = Dispatcher(Engine(a_s + b_s * np.arange(cap + 1)), drawn)
    whole = Split(0, instances)
    every = [whole, *(Split(tail, instances - tail) for tail in range(1, instances))]

    def ends(one: Split) -> float:
        return float(steps.ends(one)[0])

    return {
        "random": float(steps.random_finish(instances).max()),
        "dealt": generate(steps.engine, row, Queues.dealt(samples, instances)).end_s,
        "lpt": ends(whole),
        "rule_sum": ends(steps.by_rule(instances, "sum")),
        "rule_max": ends(steps.by_rule(instances)),
        "guesses": float(steps.guessed_finish(instances).max()),
        "plan": ends(split),
        "best": min(map(ends, every)),
        "floor": float(steps.floor()[0]),
    }


def splits() -> list[dict[str, Any]]:
    """Every regime and seed."""
    found = []
    for regime in REGIMES:
        for misses in ("near", "any"):
            for seed in SEEDS:
                began = time.perf_counter()
                answer = make_plan("rl", request(regime, seed, misses))
                seconds = time.perf_counter() - began
                group = answer["tail_split"]
                split = Split(group["tail"]["instances"], group["regular"]["instances"])
                for truth in ("near", "any") if misses == "near" else ("any",):
                    ends = judge(regime, seed, truth, split)
                    found.append(
                        {"regime": list(regime), "seed": seed, "asked": misses, "ranker": truth}
                        | {"tail_instances": split.tail, "search_s": seconds, "ends_s": ends}
                        | {"over_lpt": ends["plan"] / ends["lpt"] - 1, "over_best": ends["plan"] / ends["best"] - 1}
                    )
    return found


def waves() -> list[dict[str, Any]]:
    """One queue against dealing round the instances beforehand, where not all samples run at once."""
    found = []
    for kind in KINDS:
        for regime in REGIMES[:2]:
            for seed in SEEDS:
                group = make_plan("rl", request(regime, seed, "near", kind))["tail_split"]
                split = Split(group["tail"]["instances"], group["regular"]["instances"])
                ends = judge(regime, seed, "near", split, kind)
                found.append({"lengths": kind, "regime": list(regime), "seed": seed, "ends_s": ends})
                found[-1] |= {"tail_instances": split.tail, "over_lpt": ends["plan"] / ends["lpt"] - 1}
    return found


def sizes(units: int = 64) -> dict[str, Any]:
    """One site: few sizes tried, coarse to fine, against all of them; the layouts beside each other."""
    curve = 0.008 + 0.00005 * np.arange(129)
    cost = TrainingCost(per_token_s=0.0005, fixed_s=2)
    pool = Pool("site", units, 4.0, engine=Engine(curve), training=cost)
    lengths = Lengths.of_samples(true_lengths(20_000, 1).tolist())
    out: dict[str, Any] = {"units": units}
    for mode in MODES:
        problem = Problem(lengths, Ranker(RECALL, SHARE), 1024, Terms((pool,), mode), doubt=0.1)
        whole, few = search(problem), search(problem, max_steps=12)
        out[mode] = {
            "all": [whole.sizes.generation_units, whole.sizes.training_units, whole.sizes.step_s],
            "twelve": [few.sizes.generation_units, few.sizes.training_units, few.sizes.step_s],
            "shared": whole.sizes.shared,
            "not_streamed_s": float(whole.serial.step_s.mean()),
            "colocated_s": None if whole.colocated is None else whole.colocated[0],
            "lower_bound_s": whole.bound_s,
        }
    far = Pool("far", units, 1.5, "b", engine=Engine(1.4 * curve))
    near = Pool("near", units, 4.0, "a", training=cost)
    terms = Terms((far, near), "async", cross_site_s=5)
    apart = search(Problem(lengths, Ranker(RECALL, SHARE), 4096, terms, doubt=0.1))
    out["two_sites"] = {
        "sizes": [apart.sizes.generation_units, apart.sizes.training_units, apart.sizes.step_s],
        "generation_s": float(apart.outcome.stage_s.mean()),
        "training_s": float(apart.outcome.training_s.mean()),
        "lower_bound_s": apart.bound_s,
    }
    return out


def migration() -> list[dict[str, Any]]:
    """Inference of rewards, reference and critic beside the tail, against after it (RLHFuse)."""
    found = []
    for regime in (REGIMES[0], REGIMES[5], REGIMES[6]):
        for each_s in (0.1, 0.3, 0.6):
            kv = {"max_batch": regime[4], "bytes_per_token": 131072.0}
            answer = make_plan("rl", request(regime, 0, "near") | {"inference": each_s, "kv": kv})
            moved = answer["migration"]
            found.append(
                {
                    "regime": list(regime),
                    "inference_s": each_s,
                    "stage_s": answer["step_s"],
                    "not_migrated_s": answer["baselines"].get("not_migrated", answer["step_s"]),
                    "lower_bound_s": answer["lower_bound_s"],
                    "threshold_share": None if moved is None else moved["threshold_share"],
                    "remaining": None if moved is None else moved["remaining_instances"],
                }
            )
    return found


def speed() -> dict[str, float]:
    """Samples simulated in a second, one core."""
    engine = Engine(0.008 + 0.00005 * np.arange(129))
    lengths = Lengths.of_samples(true_lengths(20_000, 1).tolist())
    steps = draw_steps(lengths, Ranker(), 2048, 16, 0)
    seconds = []
    for _ in range(20):
        began = time.perf_counter()
        Dispatcher(engine, steps).finish(Split(0, 8))
        seconds.append(time.perf_counter() - began)
    # The best of many: others may be using the machine.
    return {"samples_per_s": steps.lengths.size / min(seconds)}


def table(rows: list[dict[str, Any]], asked: str, ranker: str) -> str:
    """Means over the seeds, one line for each regime."""
    names = ("random", "lpt", "rule_sum", "rule_max", "guesses", "plan", "best", "floor")
    head = ("random", "LPT only", "rule, sum", "rule, max", "guesses", "**plan**", "best split", "floor")
    lines = [
        "| a + b·batch (ms); samples, instances, batch | "
        + " | ".join(head)
        + " | N_l | worst over LPT | worst over best |",
        "| --- |" + " ---: |" * (len(head) + 3),
    ]
    for regime in REGIMES:
        ours = [row for row in rows if (tuple(row["regime"]), row["asked"], row["ranker"]) == (regime, asked, ranker)]
        means = [float(np.mean([row["ends_s"][name] for row in ours])) for name in names]
        cells = [
            f"**{mean:.1f}**" if name == "plan" else f"{mean:.1f}" for name, mean in zip(names, means, strict=True)
        ]
        a_s, b_s, samples, instances, cap = regime
        tails = "/".join(str(row["tail_instances"]) for row in ours)
        lines.append(
            f"| {1e3 * a_s:g} + {1e3 * b_s:g}·batch; {samples}, {instances}, {cap} | "
            + " | ".join(cells)
            + f" | {tails} | {100 * max(row['over_lpt'] for row in ours):+.1f} %"
            + f" | {100 * max(row['over_best'] for row in ours):+.1f} % |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run all, write the results, print the tables."""
    rows = splits()
    results = {
        "lengths": {"median": MEDIAN, "sigma": SIGMA, "cut": CUT},
        "machine": platform.processor() or platform.machine(),
        "splits": rows,
        "waves": waves(),
        "sizes": sizes(),
        "migration": migration(),
        "speed": speed(),
    }
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    for asked, ranker in (("near", "near"), ("near", "any"), ("any", "any")):
        print(f"\nasked for misses {asked!r}, true ranker {ranker!r}\n")
        print(table(rows, asked, ranker))
    for kind in KINDS:
        for regime in REGIMES[:2]:
            ours = [one for one in results["waves"] if (one["lengths"], one["regime"]) == (kind, list(regime))]
            means = {name: np.mean([one["ends_s"][name] for one in ours]) for name in ours[0]["ends_s"]}
            tails, worst = [one["tail_instances"] for one in ours], max(one["over_lpt"] for one in ours)
            print(kind, regime, tails, f"{worst:+.4f}", {name: f"{mean:.1f}" for name, mean in means.items()})
    print(json.dumps({key: results[key] for key in ("sizes", "migration", "speed")}, indent=1))


if __name__ == "__main__":
    main()
