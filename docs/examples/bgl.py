"""BGL: where does the time of GNN training go when data are prepared? (Liu et al., NSDI 2023)

A mini-batch is sampled, its features fetched (over the network where the cache has none), gathered, copied to
the GPU, and trained on; stages of different batches overlap. The graph is replayed for several cache hit
rates, and what-ifs on the same graph say which stage is worth speeding up.

    python docs/examples/bgl.py
"""

from __future__ import annotations

from cdmpp import LatencyPredictor
from cdmpp.replay import Graph, Node, Replayer

#: Assumptions of this example: 1000 seeds touch 400,000 vertices with 400 bytes of features each.
VERTICES, FEATURE_BYTES = 400_000, 400
SAMPLE_S = 0.012  # on 8 cores
NETWORK, MEMORY, PCIE = 1.25e9, 2.0e10, 1.2e10  # bytes/s
#: A GraphSAGE layer pair on the sampled blocks, forward and backward.
TRAIN = [("linear:m=400000,n=256,k=100", 3), ("linear:m=40000,n=256,k=256", 3), ("linear:m=1000,n=47,k=256", 3)]
STAGES = ("sample", "fetch", "gather", "copy", "train")


def stage_seconds(train_s: float, hit_rate: float) -> dict[str, float]:
    """Seconds of each stage of one batch."""
    size = VERTICES * FEATURE_BYTES
    return {
        "sample": SAMPLE_S,
        "fetch": (1 - hit_rate) * size / NETWORK,
        "gather": size / MEMORY,
        "copy": size / PCIE,
        "train": train_s,
    }


def pipeline(seconds: dict[str, float], batches: int, ahead: int) -> Replayer:
    """Batches through the stages; at most ``ahead`` of them are prepared and not yet trained on."""
    nodes = []
    for b in range(batches):
        for i, stage in enumerate(STAGES):
            deps = [f"{STAGES[i - 1]} {b}"] if i else [f"train {b - ahead}"] if b >= ahead else []
            nodes.append(Node(f"{stage} {b}", stage, seconds[stage], tuple(deps)))
    return Replayer(Graph(nodes))


def main() -> dict[float, dict[str, float]]:
    """Print and return batches a second by cache hit rate, also with each stage in half its time."""
    predictor, batches = LatencyPredictor.load(), 200
    answers = predictor.predict([text for text, _ in TRAIN], "v100-pcie-32gb")
    train_s = sum(n * (answer.latency_s or 0.0) for (_, n), answer in zip(TRAIN, answers, strict=True))
    found: dict[float, dict[str, float]] = {}
    for hit_rate in (0.0, 0.5, 0.9):
        seconds = stage_seconds(train_s, hit_rate)
        replayer = pipeline(seconds, batches, ahead=4)
        base = replayer.run()
        stage_of = [node.device for node in replayer.graph.nodes]
        rates = {"as it is": batches / base.makespan_s}
        for stage in STAGES:
            halved = [s / 2 if name == stage else s for s, name in zip(base.duration_s, stage_of, strict=True)]
            rates[f"{stage} halved"] = batches / float(replayer.makespans([halved])[0])
        found[hit_rate] = rates
        best = max(STAGES, key=lambda stage: rates[f"{stage} halved"])
        busy = max(base.streams, key=lambda use: use.busy_s)
        print(
            f"cache hits {100 * hit_rate:3.0f} %: {rates['as it is']:6.1f} batches/s; {busy.device} is busy "
            f"{100 * busy.busy_s / base.makespan_s:.0f} %; {best} in half the time: "
            f"{rates[f'{best} halved']:.1f} batches/s"
        )
    return found


if __name__ == "__main__":
    main()
