"""Pipeline plans of a multimodal model against 1F1B, over random modality mixes.

A vision encoder (ViT-L/14, 577 tokens an image), a language model (7 B, 2,048 tokens a sequence) and a diffusion
decoder (DiT-XL/2, 1,024 tokens an image) on eight pipeline ranks. The shipped model predicts the seconds of a layer
by sub-micro-batch size for one device (float16); nothing is measured, so the gains are those of a simulation over
predicted costs. The mixes are random with a fixed seed.

Three experiments: each mix alone, with placements balanced for that mix; the first mixes as steps of one run on one
placement; and the first mixes with no more memory per rank than the fullest rank of 1F1B. 1F1B is treated alike.
``--mixes 100 --out benchmarks/results/multimodal.json`` gives the figures of the documentation in about ten
minutes.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report.results import write_result
from cdmpp.plan.base.predict import predict_prices
from cdmpp.plan.base.solve import read_request
from cdmpp.plan.multimodal import Module, StepSolution, plan_step, plan_steps
from cdmpp.plan.multimodal.knobs import peak_bytes
from cdmpp.plan.multimodal.memory import Memory
from cdmpp.plan.multimodal.report import order_entries
from cdmpp.plan.multimodal.schema import MultimodalRequest
from cdmpp.plan.multimodal.tree import CacheCounts
from cdmpp.plan.multimodal.view import draw_timelines
from cdmpp.predict.predictor import LatencyPredictor
from cdmpp.predict.requests.budget import SearchControl
from cdmpp.utils.jit import COMPILED

#: Most mixes that share a placement, and that are planned within 1F1B's memory.
MAX_RUN = 25
#: Memory of a layer: 34 bytes for each token and element of the width between the passes (Korthikanti et al. 2022,
#: without the attention matrix), 2 of them at its input; 16 bytes for each weight (Adam, mixed precision).
MEMORY = {
    name: {
        "activation_bytes": 34.0 * tokens * width,
        "boundary_bytes": 2.0 * tokens * width,
        "weight_bytes": 16.0 * weights,
    }
    for name, tokens, width, weights in (
        ("vision", 577, 1024, 12 * 1024**2),
        ("language", 2048, 4096, 4 * 4096**2 + 3 * 4096 * 11008),
        ("diffusion", 1024, 1152, 18 * 1152**2),
    )
}
DEVICE, RANKS, SEED = "a100-sxm4-80gb", 8, 0
#: Most items of each module in a mix.
MOST = {"vision": 96, "language": 48, "diffusion": 96}


def linear(tokens: int, n: int, k: int) -> dict[str, Any]:
    """A linear layer over the tokens of a sub-micro-batch."""
    return {"operator": "linear", "m": f"batch*{tokens}", "n": n, "k": k, "dtype": "float16"}


def layer(
    tokens: int, hidden: int, inner: int, heads: int, *, gated: bool, causal: bool
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Programs of one transformer layer, forward and backward.

    The backward pass of a product is two products (by the weights, by the inputs). That of attention counts as three
    forward passes: 2.5 times the arithmetic, at a somewhat lower rate. That of element-wise operators counts as two
    forward passes.
    """
    products = [(3 * hidden, hidden), (hidden, hidden), ((2 if gated else 1) * inner, hidden), (hidden, inner)]
    rows = f"batch*{tokens}"
    attention: dict[str, Any] = {
        "operator": "attention_prefill" if causal else "attention_encoder",
        "batch": "batch",
        "q_len": tokens,
        "heads": heads,
        "kv_heads": heads,
        "head_dim": hidden // heads,
        "dtype": "float16",
    }
    norm = {"operator": "rmsnorm" if gated else "layernorm", "rows": rows, "cols": hidden, "dtype": "float16"}
    act = {"operator": "silu_and_mul" if gated else "gelu", "rows": rows, "cols": inner, "dtype": "float16"}
    add = {"operator": "add", "rows": rows, "cols": hidden, "dtype": "float16"}
    forward = [{"program": linear(tokens, n, k)} for n, k in products] + [
        {"program": attention},
        {"program": norm, "count": 2},
        {"program": act},
        {"program": add, "count": 2},
    ]
    backward = [
        {"program": program}
        for n, k in products
        for program in (linear(tokens, k, n), {"operator": "linear", "m": n, "n": k, "k": rows, "dtype": "float16"})
    ] + [
        {"program": attention, "count": 3},
        {"program": norm, "count": 4},
        {"program": act, "count": 2},
        {"program": add, "count": 2},
    ]
    return forward, backward


def request() -> dict[str, Any]:
    """Request with programs instead of costs."""
    modules = []
    for name, layers, after, sizes, shape in (
        ("vision", 24, [], [1, 2, 4, 8, 16, 32], layer(577, 1024, 4096, 16, gated=False, causal=False)),
        ("language", 32, ["vision"], [1, 2, 4, 8], layer(2048, 4096, 11008, 32, gated=True, causal=True)),
        ("diffusion", 28, ["language"], [1, 2, 4, 8, 16, 32], layer(1024, 1152, 4608, 16, gated=False, causal=False)),
    ):
        forward, backward = shape
        cost = {
            "forward": {"batch": sizes, "programs": forward, "device": DEVICE},
            "backward": {"batch": sizes, "programs": backward, "device": DEVICE},
        }
        modules.append({"name": name, "layers": layers, "after": after, "cost": cost, **MEMORY[name]})
    return {"modules": modules, "batch": dict.fromkeys(MOST, 1), "ranks": RANKS}


def mixes(count: int) -> list[list[int]]:
    """Items of each module in each step."""
    rng = np.random.default_rng(SEED)
    least = {"vision": 0, "language": 8, "diffusion": 0}
    return [[int(rng.integers(least[name], most + 1)) for name, most in MOST.items()] for _ in range(count)]


def summarize(solutions: list[StepSolution]) -> dict[str, float]:
    """Gains over 1F1B, and gaps to the lower bound."""
    plan_s = np.array([solution.schedule.makespan_s for solution in solutions])
    baseline_s = np.array([solution.baselines_s["1f1b"] for solution in solutions])
    segments_s = np.array([solution.baselines_s["1f1b_segments"] for solution in solutions])
    gap = plan_s / np.array([solution.bound_s for solution in solutions]) - 1
    searched_gap = plan_s / np.array([solution.searched_bound_s for solution in solutions]) - 1
    return {
        "mean_gain": float((baseline_s / plan_s - 1).mean()),
        "median_gain": float(np.median(baseline_s / plan_s - 1)),
        "best_gain": float((baseline_s / plan_s - 1).max()),
        "least_gain": float((baseline_s / plan_s - 1).min()),
        "mean_gain_over_1f1b_segments": float((segments_s / plan_s - 1).mean()),
        "mean_gap": float(gap.mean()),
        "worst_gap": float(gap.max()),
        "mean_searched_gap": float(searched_gap.mean()),
        "worst_searched_gap": float(searched_gap.max()),
        "at_bound": int((gap < 1e-9).sum()),
        "total_s": float(plan_s.sum()),
        "total_1f1b_s": float(baseline_s.sum()),
        "total_bound_s": float(sum(solution.bound_s for solution in solutions)),
    }


def plan_alone(
    modules: list[Module], drawn: list[list[int]], max_steps: int
) -> tuple[list[StepSolution], dict[str, float]]:
    """Plan each mix by itself; the solutions, and their summary with times and cache hits."""
    plan_step(modules, drawn[0], RANKS, control=SearchControl(600.0), max_steps=10)  # compiles
    solutions, spent_s, counts = [], [], CacheCounts()
    for number, mix in enumerate(drawn):
        # Steps rather than seconds end a search: the plans do not depend on how busy the machine is.
        began = time.process_time()
        solution = plan_step(
            modules, mix, RANKS, control=SearchControl(600.0), seed=SEED, max_steps=max_steps, counts=counts
        )
        spent_s.append(time.process_time() - began)
        solutions.append(solution)
        print(
            f"{number} {mix} 1F1B {solution.baselines_s['1f1b']:.3f} s, plan {solution.schedule.makespan_s:.3f} s, "
            f"bound {solution.bound_s:.3f} s, {solution.steps} orders",
            flush=True,
        )
    return solutions, summarize(solutions) | {
        "cpu_seconds_each_mean": float(np.mean(spent_s)),
        "cpu_seconds_each_most": float(np.max(spent_s)),
        "orders_mean": float(np.mean([solution.steps for solution in solutions])),
        "cache_hit_rate": counts.hits / counts.total,
    }


def plan_within_memory(modules: list[Module], solution: StepSolution, max_steps: int) -> StepSolution:
    """Plan a mix again with no more memory per rank than the fullest rank of its 1F1B."""
    baseline = solution.one_f_one_b
    assert baseline is not None
    limit = max(peak_bytes(baseline.tasks, baseline.orders)) * (1 + 1e-9)
    return plan_step(
        modules,
        solution.batch,
        RANKS,
        memory=Memory(limit, ("keep", "recompute")),
        control=SearchControl(600.0),
        seed=SEED,
        max_steps=max_steps,
    )


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixes", type=int, default=40)
    parser.add_argument("--steps", type=int, default=1200, help="orders that each search evaluates")
    parser.add_argument("--out", type=Path, help="result file")
    parser.add_argument("--figure", type=Path, help="plot of the median mix")
    options = parser.parse_args()
    value = read_request(MultimodalRequest, request())
    predictor = LatencyPredictor.load()
    modules = value.with_prices(predict_prices(value.price_requests(), predictor)).resolved_modules()
    drawn = mixes(options.mixes)
    alone, summary = plan_alone(modules, drawn, options.steps)
    steps = drawn[:MAX_RUN]
    together = plan_steps(
        modules, steps, RANKS, control=SearchControl(6000.0), seed=SEED, max_steps=options.steps * len(steps)
    )
    within = [plan_within_memory(modules, solution, 3 * options.steps) for solution in alone[:MAX_RUN]]
    result: dict[str, Any] = {
        "what": "simulated steps over predicted costs; gain = 1F1B / plan - 1, gap = plan / bound of all plans - 1",
        "model_id": predictor.model_id,
        "device": DEVICE,
        "ranks": RANKS,
        "mixes": options.mixes,
        "steps": options.steps,
        "compiled": COMPILED,
        "modules": [
            {
                "name": module.name,
                "layers": len(module.layers),
                "sizes": module.sizes.tolist(),
                "forward_s": module.forward_s.tolist(),
                "backward_s": module.backward_s.tolist(),
                "rule_size": module.efficient_size(0.95),
            }
            for module in modules
        ],
        "each_alone": summary,
        "rows": [
            {
                "batch": list(solution.batch),
                "makespan_s": solution.schedule.makespan_s,
                "bound_s": solution.bound_s,
                "searched_bound_s": solution.searched_bound_s,
                "baselines_s": solution.baselines_s,
                "placement": solution.schedule.tasks.placement.name,
            }
            for solution in alone
        ],
        "one_placement": {"mixes": len(steps)} | summarize(together),
        "within_1f1b_memory": {"mixes": len(within)} | summarize(within),
    }
    print({name: result[name] for name in ("each_alone", "one_placement", "within_1f1b_memory")})
    if options.out is not None:
        write_result(options.out, result)
    if options.figure is not None:
        by_gain = sorted(alone, key=lambda s: s.baselines_s["1f1b"] / s.schedule.makespan_s)
        draw(modules, by_gain[len(alone) // 2], options.figure)


def draw(modules: list[Module], solution: StepSolution, path: Path) -> None:
    """Plot 1F1B above the plan, on a common time axis."""
    baseline = solution.one_f_one_b
    assert baseline is not None
    panels = [
        (title, schedule.makespan_s, order_entries(schedule))
        for title, schedule in (("1F1B with contiguous modules", baseline), ("plan", solution.schedule))
    ]
    figure = draw_timelines([module.name for module in modules], panels)
    figure.savefig(path, dpi=110, bbox_inches="tight")


if __name__ == "__main__":
    main()
