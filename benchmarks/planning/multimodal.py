"""Pipeline plans of a multimodal model against 1F1B, over random modality mixes.

``python -m benchmarks.planning.multimodal [--mixes 100] [--steps 1200]``: a vision encoder (ViT-L/14, 577
tokens an image), a language model (7 B, 2,048 tokens a sequence) and a diffusion decoder (DiT-XL/2, 1,024
tokens an image) on eight pipeline ranks. The seconds of a layer forward and backward by sub-micro-batch size
are predicted by the shipped model for one device (float16); nothing is measured on it here, so the gains are
those of a simulation over predicted costs. The mixes are drawn with a seed.

Three queries: each mix alone (placements balanced for that mix, of 1F1B too); the first of them as steps of
one run on one placement (weights stay where they are, of 1F1B too); and with no more memory on a rank than
1F1B's fullest has. Writes
``benchmarks/results/multimodal.json``, and with ``--figure`` a picture of the median mix.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report.results import write_result
from cdmpp.compose.budget import SearchControl
from cdmpp.compose.jit import COMPILED
from cdmpp.compose.predict import predict_prices
from cdmpp.compose.solve import read_request
from cdmpp.planning.multimodal import Module, Plan, plan_step, plan_steps
from cdmpp.planning.multimodal.answer import plan_answer
from cdmpp.planning.multimodal.knobs import peaks_bytes
from cdmpp.planning.multimodal.plot import timelines
from cdmpp.planning.multimodal.schema import MultimodalRequest
from cdmpp.planning.multimodal.search import Counter
from cdmpp.planning.multimodal.tasks import Memory
from cdmpp.predictor import LatencyPredictor

#: Mixes that share a placement, and that are planned within 1F1B's memory.
RUN = 25
#: Of a layer: 34 bytes for each token and element of the width between the passes (Korthikanti et al. 2022,
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
OUT = Path("benchmarks/results/multimodal.json")
DEVICE, RANKS, SEED = "a100-sxm4-80gb", 8, 0
#: Items of a mix: at least one sequence, and from none to many images on either side.
MOST = {"vision": 96, "language": 48, "diffusion": 96}


def linear(tokens: int, n: int, k: int) -> dict[str, Any]:
    """A linear layer over the tokens of a sub-micro-batch."""
    return {"operator": "linear", "m": f"batch*{tokens}", "n": n, "k": k, "dtype": "float16"}


def layer(
    tokens: int, hidden: int, inner: int, heads: int, *, gated: bool, causal: bool
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Programs of one transformer layer, forward and backward.

    The backward pass of a product are two products (by the weights, by the inputs). That of attention is
    taken as three of its forward pass: 2.5 times the arithmetic, at a somewhat lower rate. That of what reads
    and writes once is taken as two of it.
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
    """The model, with programs instead of costs."""
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


def figures(plans: list[Plan]) -> dict[str, float]:
    """Gains and gaps of plans."""
    made = np.array([plan.schedule.makespan_s for plan in plans])
    usual = np.array([plan.baselines_s["1f1b"] for plan in plans])
    segments = np.array([plan.baselines_s["1f1b_segments"] for plan in plans])
    gap = made / np.array([plan.bound_s for plan in plans]) - 1
    return {
        "mean_gain": float((usual / made - 1).mean()),
        "median_gain": float(np.median(usual / made - 1)),
        "best_gain": float((usual / made - 1).max()),
        "least_gain": float((usual / made - 1).min()),
        "mean_gain_over_1f1b_segments": float((segments / made - 1).mean()),
        "mean_gap": float(gap.mean()),
        "worst_gap": float(gap.max()),
        "at_bound": int((gap < 1e-9).sum()),
        "total_s": float(made.sum()),
        "total_1f1b_s": float(usual.sum()),
        "total_bound_s": float(sum(plan.bound_s for plan in plans)),
    }


def main() -> None:
    """Price, plan, write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mixes", type=int, default=100)
    parser.add_argument("--steps", type=int, default=1200, help="orders that each search tries")
    parser.add_argument("--figure", type=Path)
    given = parser.parse_args()
    asked = read_request(MultimodalRequest, request())
    predictor = LatencyPredictor.load()
    prices = predict_prices(asked.price_requests(), predictor)
    modules: list[Module] = asked.priced(prices)
    drawn = mixes(given.mixes)
    plan_step(modules, drawn[0], RANKS, watch=SearchControl(600.0), max_steps=10)  # compiles
    alone, spent, counter = [], [], Counter()
    for number, mix in enumerate(drawn):
        # Steps rather than seconds end a search here: the plans do not depend on how busy the machine is.
        began = time.process_time()
        plan = plan_step(
            modules, mix, RANKS, watch=SearchControl(600.0), seed=SEED, max_steps=given.steps, counter=counter
        )
        spent.append(time.process_time() - began)
        alone.append(plan)
        print(
            number,
            mix,
            f"1F1B {plan.baselines_s['1f1b']:.3f} s, plan {plan.schedule.makespan_s:.3f} s, "
            f"bound {plan.bound_s:.3f} s, {plan.steps} orders",
            flush=True,
        )
    median = sorted(alone, key=lambda plan: plan.baselines_s["1f1b"] / plan.schedule.makespan_s)[len(alone) // 2]
    if given.figure is not None:
        draw(modules, median, given.figure)
    result: dict[str, Any] = {
        "what": "simulated steps over predicted costs; gain = 1F1B / plan - 1, gap = plan / bound - 1",
        "model_id": predictor.model_id,
        "device": DEVICE,
        "ranks": RANKS,
        "mixes": given.mixes,
        "steps": given.steps,
        "compiled": COMPILED,
        "modules": [
            {
                "name": module.name,
                "layers": len(module.layers),
                "sizes": module.sizes.tolist(),
                "forward_s": module.forward_s.tolist(),
                "backward_s": module.backward_s.tolist(),
                "rule_size": module.sub_batch(0.95),
            }
            for module in modules
        ],
        "each_alone": figures(alone)
        | {
            "cpu_seconds_each_mean": float(np.mean(spent)),
            "cpu_seconds_each_most": float(np.max(spent)),
            "orders_mean": float(np.mean([plan.steps for plan in alone])),
            "cache_hit_rate": counter.hits / counter.total,
        },
        "rows": [
            {
                "batch": list(plan.batch),
                "makespan_s": plan.schedule.makespan_s,
                "bound_s": plan.bound_s,
                "baselines_s": plan.baselines_s,
                "placement": plan.schedule.tasks.placement.name,
            }
            for plan in alone
        ],
    }
    write_result(OUT, result)
    steps = drawn[:RUN]
    together = plan_steps(
        modules, steps, RANKS, watch=SearchControl(6000.0), seed=SEED, max_steps=given.steps * len(steps)
    )
    result["one_placement"] = {"mixes": len(steps)} | figures(together)
    within = []
    for plan in alone[:RUN]:
        usual = plan.one_f_one_b
        assert usual is not None
        limit = max(peaks_bytes(usual.tasks, usual.orders)) * (1 + 1e-9)
        memory = Memory(limit, ("keep", "recompute"))
        within.append(
            plan_step(
                modules,
                plan.batch,
                RANKS,
                memory=memory,
                watch=SearchControl(600.0),
                seed=SEED,
                max_steps=3 * given.steps,
            )
        )
    result["within_1f1b_memory"] = {"mixes": len(within)} | figures(within)
    print({name: result[name] for name in ("each_alone", "one_placement", "within_1f1b_memory")})
    write_result(OUT, result)


def draw(modules: list[Module], plan: Plan, path: Path) -> None:
    """1F1B above the plan, on one axis of time."""
    usual = plan.one_f_one_b
    assert usual is not None
    panels = [
        (title, schedule.makespan_s, plan_answer(one)["order"])
        for title, schedule, one in (
            ("1F1B, modules one behind the other", usual, plan.as_schedule(usual)),
            ("plan", plan.schedule, plan),
        )
    ]
    figure = timelines([module.name for module in modules], panels)
    figure.savefig(path, dpi=110, bbox_inches="tight")


if __name__ == "__main__":
    main()
