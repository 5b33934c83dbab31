"""BGL: stages of data preparation in GNN training (Liu et al., NSDI 2023).

Each mini-batch is sampled, its features are fetched (from the cache or over the network), gathered and copied to
the GPU, and the network is trained. Stages of different batches overlap. The example replays the graph for several
cache hit rates, and halves the time of each stage to find the one that is worth optimising.

    python docs/examples/bgl.py
"""

from __future__ import annotations

from cdmpp import LatencyPredictor
from cdmpp.simulate.replay import Graph, Node, Replayer

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
    """Graph of batches through the stages; at most ``ahead`` batches are prepared in advance."""
    nodes = []
    for b in range(batches):
        for i, stage in enumerate(STAGES):
            deps = [f"{STAGES[i - 1]} {b}"] if i else [f"train {b - ahead}"] if b >= ahead else []
            nodes.append(Node(f"{stage} {b}", stage, seconds[stage], tuple(deps)))
    return Replayer(Graph(nodes))


def main() -> dict[float, dict[str, float]]:
    """Print and return batches per second by cache hit rate, unchanged and with each stage halved."""
    predictor, batches = LatencyPredictor.load(), 200
    predictions = predictor.predict([text for text, _ in TRAIN], "v100-pcie-32gb")
    train_s = sum(n * (p.latency_s or 0.0) for (_, n), p in zip(TRAIN, predictions, strict=True))
    by_hit_rate: dict[float, dict[str, float]] = {}
    for hit_rate in (0.0, 0.5, 0.9):
        seconds = stage_seconds(train_s, hit_rate)
        replayer = pipeline(seconds, batches, ahead=4)
        base = replayer.run()
        stage_of = [node.device for node in replayer.graph.nodes]
        rates = {"unchanged": batches / base.makespan_s}
        for stage in STAGES:
            halved = [s / 2 if name == stage else s for s, name in zip(base.duration_s, stage_of, strict=True)]
            rates[f"{stage} halved"] = batches / float(replayer.makespans([halved])[0])
        by_hit_rate[hit_rate] = rates
        best = max(STAGES, key=lambda stage: rates[f"{stage} halved"])
        busy = max(base.streams, key=lambda use: use.busy_s)
        print(
            f"cache hits {100 * hit_rate:3.0f} %: {rates['unchanged']:6.1f} batches/s; {busy.device} is busy "
            f"{100 * busy.busy_s / base.makespan_s:.0f} %; with {best} halved "
            f"{rates[f'{best} halved']:.1f} batches/s"
        )
    return by_hit_rate


if __name__ == "__main__":
    main()
