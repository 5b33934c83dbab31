"""Sensitivities of a small network by QSync's indicator, and the plan that follows from them.

A training step of a multilayer perceptron is watched on this machine; the layers are priced on a T4 that
trains beside a V100. ``python docs/examples/sensitivities.py``.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import nn

from cdmpp import LatencyPredictor, make_plan
from cdmpp.plan.precision.torch_statistics import operator_statistics

BATCH, WIDTHS = 256, (512, 2048, 2048, 10)


def request() -> dict[str, Any]:
    """Layers in the order of the calls, with statistics of one step on random data."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inside, outside in pairwise(WIDTHS):
        layers += [nn.Linear(inside, outside), nn.ReLU()]
    net = nn.Sequential(*layers[:-1])
    labels = torch.randint(WIDTHS[-1], (BATCH,))
    seen = operator_statistics(
        net, (torch.randn(BATCH, WIDTHS[0]),), lambda out: nn.functional.cross_entropy(out, labels)
    )
    operators: list[dict[str, Any]] = []
    for name, statistics in seen.items():
        layer = net[int(name)]
        operator: dict[str, Any] = {"id": name, "deps": [operators[-1]["id"]] if operators else []}
        operator["statistics"] = statistics.model_dump(exclude_none=True)
        if isinstance(layer, nn.Linear):
            m, n, k = BATCH, layer.out_features, layer.in_features
            operator |= {
                "output_elements": m * n,
                "weight_elements": n * k,
                "forward": [{"program": {"operator": "linear", "m": m, "n": n, "k": k}}],
                "backward": [
                    {"program": {"operator": "linear", "m": m, "n": k, "k": n}},
                    {"program": {"operator": "linear", "m": n, "n": k, "k": m}},
                ],
            }
        else:
            n = operators[-1]["output_elements"]
            program = {"operator": "relu", "rows": BATCH, "cols": n // BATCH}
            operator |= {"output_elements": n, "forward": [{"program": program}], "backward_factor": 1.0}
        operators.append(operator)
    operators[0]["kept_elements"] = BATCH * WIDTHS[0]
    return {
        "devices": [
            {"name": "t4", "device": "t4", "dtypes": ["int8", "float16", "float32"]},
            {"name": "v100", "device": "v100-pcie-16gb", "dtypes": ["float16", "float32"]},
        ],
        "operators": operators,
        "max_steps": 5000,
    }


def main() -> dict[str, Any]:
    """Print and return the plan."""
    answer = make_plan("precision", request(), LatencyPredictor.load())
    for device in answer["devices"]:
        print(device["name"], device["dtypes"])
    print(*answer["explanation"], sep="\n")
    return answer


if __name__ == "__main__":
    main()
