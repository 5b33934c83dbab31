"""Blocks of published systems in eager PyTorch, by name: published_blocks.py dsv-attention step3-attention"""

from __future__ import annotations

import sys

from cdmpp.predict.predictor import LatencyPredictor
from cdmpp.programs.zoo import parse_network


def main(*names: str, device: str = "h100-sxm") -> dict[str, tuple[float | None, str | None]]:
    """Milliseconds and domain of each network (docs/networks.md) in bfloat16."""
    predictor, answers = LatencyPredictor.load(), {}
    for name in names:
        network = parse_network(name)
        prediction = predictor.predict_module(network.module, network.inputs, device, dtype="bfloat16")
        answers[name] = (prediction.latency_ms, prediction.domain)
        bound = "at least " * prediction.total.lower_bound
        print(
            f"{name}: {bound}{prediction.latency_ms:.3f} ms, {len(prediction.programs)} programs, {prediction.domain}"
        )
    return answers


if __name__ == "__main__":
    main(*sys.argv[1:])
