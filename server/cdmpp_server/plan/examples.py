"""Example requests of all planners, for the OpenAPI document."""

from __future__ import annotations

from typing import Any

from cdmpp_server.plan.warm import REQUESTS

#: One request of each planner, with given costs: it needs no model.
EXAMPLE_REQUESTS: dict[str, dict[str, Any]] = {
    **{name: forms[0] for name, forms in REQUESTS.items()},
    "data-parallel": {
        "layers": [
            {"name": "embedding", "forward": 0.0002, "backward": 0.0004, "gradient_bytes": [3e7]},
            {"name": "block", "forward": 0.001, "backward": 0.002, "gradient_bytes": [1e7, 2e7]},
        ],
        "ranks": 4,
        "link": {"alpha_s": 1e-5, "bandwidth_bytes_per_s": 1e10},
    },
    "split": {
        "layers": [
            {
                "name": "embedding",
                "forward_s": 0.0001,
                "backward_s": 0.0002,
                "weight_bytes": 1e9,
                "activation_bytes": 1e7,
                "transfer_s": 0.0001,
            },
            {
                "name": "block",
                "count": 4,
                "forward_s": 0.001,
                "backward_s": 0.002,
                "weight_bytes": 1e8,
                "activation_bytes": 1e7,
                "transfer_s": 0.0001,
            },
        ],
        "ranks": [{}, {}],
        "micro_batches": 4,
    },
    "afd": {
        "layers": 48,
        "attention": {"layer": {"batch": [1, 64, 256], "seconds": [0.0001, 0.0002, 0.0005]}, "instances": 4},
        "ffn": {"layer": {"batch": [1, 64, 512], "seconds": [0.0001, 0.0001, 0.0003]}, "instances": 4},
        "link": {"bytes_per_token": 10240, "bandwidth_bytes_per_s": 5e10, "alpha_s": 1e-5},
        "tpot_s": 0.05,
    },
    "cluster": {
        "gpus": 8,
        "jobs": [
            {"name": "language", "workers": [4, 8], "remaining_samples": 500000, "samples_per_s": [40, 72]},
            {"name": "ranking", "workers": [1, 2, 4], "remaining_samples": 90000, "samples_per_s": [20, 38, 55]},
        ],
    },
    "application": {
        "engines": [
            {"name": "search", "curve": {"batch": [1, 8], "seconds": [0.004, 0.006]}},
            {"name": "decode", "curve": {"batch": [1, 8], "seconds": [0.9, 1.0]}},
        ],
        "primitives": [{"id": "search", "engine": "search"}, {"id": "answer", "engine": "decode", "after": ["search"]}],
        "arrivals_s": [0, 0.1],
    },
}
