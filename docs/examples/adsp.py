"""ADSP: commit policies for unequal workers with one parameter server (Hu et al., AAAI 2020).

The model predicts the time of a step on each worker's device. With bulk-synchronous steps (BSP) all workers wait
for the slowest. With ADSP each worker computes steps until a common time and then commits. The replay has one
stream per worker and one for the link of the server.

    python docs/examples/adsp.py
"""

from __future__ import annotations

from cdmpp import LatencyPredictor
from cdmpp.simulate.replay import Graph, Link, Node, Timeline, replay

#: Forward and backward of a small convolution network, batch 32: three GEMMs a layer.
STEP = [
    ("conv2d:n=32,c_in=64,h=56,w=56,c_out=64,kh=3,kw=3,pad_h=1,pad_w=1", 12),
    ("conv2d:n=32,c_in=256,h=14,w=14,c_out=256,kh=3,kw=3,pad_h=1,pad_w=1", 24),
    ("linear:m=32,n=1000,k=512", 3),
]
WORKERS = ("a100-pcie-40gb", "v100-pcie-32gb", "t4", "t4")
#: An assumption of this example: the parameters (44 MB) over a 10 Gbit/s network, there and back.
COMMIT = 2 * Link(alpha_s=1e-4, beta_s_per_byte=8e-10).seconds(44e6)


def step_seconds(predictor: LatencyPredictor) -> list[float]:
    """Predicted seconds of a step on each worker."""
    seconds = []
    for device in WORKERS:
        predictions = predictor.predict([text for text, _ in STEP], device)
        seconds.append(sum(n * (p.latency_s or 0.0) for (_, n), p in zip(STEP, predictions, strict=True)))
    return seconds


def train(step_s: list[float], steps_between: list[int], rounds: int, synchronous: bool) -> Timeline:
    """Replay training: each worker computes its steps and commits; synchronous workers wait for all commits."""
    nodes: list[Node] = []
    before: list[list[str]] = [[] for _ in step_s]
    for r in range(rounds):
        for w, seconds in enumerate(step_s):
            nodes.append(Node(f"steps {r}.{w}", f"worker {w}", steps_between[w] * seconds, tuple(before[w])))
            nodes.append(Node(f"commit {r}.{w}", "server", COMMIT, (f"steps {r}.{w}",), kind="comm"))
        commits = [f"commit {r}.{w}" for w in range(len(step_s))]
        before = [commits if synchronous else [commits[w]] for w in range(len(step_s))]
    return replay(Graph(nodes))


def main() -> dict[str, float]:
    """Print and return the steps per second of each policy."""
    step_s = step_seconds(LatencyPredictor.load())
    rounds, slowest = 20, max(step_s)
    # Every worker commits once per period. The period is much longer than the commits.
    period = 4 * max(slowest, len(step_s) * COMMIT)
    policies = {
        "BSP, one step": ([1] * len(step_s), True),
        "BSP, equal steps in a period": ([max(1, round(period / slowest))] * len(step_s), True),
        "ADSP, as many steps as fit": ([max(1, round(period / s)) for s in step_s], False),
    }
    print("a step takes " + ", ".join(f"{1e3 * s:.1f} ms on {d}" for d, s in zip(WORKERS, step_s, strict=True)))
    rates = {}
    for name, (steps, synchronous) in policies.items():
        timeline = train(step_s, steps, rounds, synchronous)
        rates[name] = rounds * sum(steps) / timeline.makespan_s
        idle = [use.idle_s / timeline.makespan_s for use in timeline.streams if use.device != "server"]
        print(f"{name:30} {rates[name]:7.1f} steps/s, workers idle {100 * sum(idle) / len(idle):.0f} %")
    return rates


if __name__ == "__main__":
    main()
