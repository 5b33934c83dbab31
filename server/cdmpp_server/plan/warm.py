"""Compilation of loops before requests wait for them.

On a new machine compilation takes seconds, which must not count against the budget of a search. Afterwards the
compiled code is loaded from a folder (``NUMBA_CACHE_DIR``). A planning process solves a small request of a planner
before the first real one, and small requests of the other planners while it is idle.
"""

from __future__ import annotations

import logging
from typing import Any

from cdmpp.errors import CdmppError
from cdmpp.plan.base.solve import solve_priced
from cdmpp.plan.registry import PLANNERS
from cdmpp.predict.requests.budget import SearchControl

_log = logging.getLogger(__name__)
_STAGES = {"stages": 2, "micro_batches": 2, "forward_s": 1, "backward_s": 2}
_CURVES = {"sizes": [1, 2], "forward_s": [1, 1.5], "backward_s": [2, 3]}
#: Small requests of each form with compiled code, by planner.
REQUESTS: dict[str, list[dict[str, Any]]] = {
    "replay": [
        {
            "nodes": [
                {"id": "load", "device": "host", "stream": "io", "duration_s": 0.002},
                {"id": "a", "device": "gpu", "duration_s": 0.003, "deps": ["load"]},
                {"id": "send", "device": "gpu", "stream": "net", "bytes": 1e6, "link": "net", "deps": ["a"]},
                {"id": "b", "device": "gpu", "duration_s": 0.004, "deps": ["a"]},
            ],
            "links": {"net": {"alpha_s": 1e-5, "bandwidth_bytes_per_s": 1e9}},
        }
    ],
    "simulate": [
        {
            "stages": [{"forward_s": 0.005, "backward_s": 0.01}, {"forward_s": 0.006, "backward_s": 0.01}],
            "micro_batches": 4,
            "schedule": "1f1b",
        }
    ],
    "pipeline": [
        {
            "models": [{**_STAGES, "direction": "down"}, {**_STAGES, "direction": "up"}],
            "ranks": 2,
            "max_activations": 2,
            "max_steps": 20,
        },
        {
            "modules": [
                {"name": "vision", "layers": 4, "cost": _CURVES},
                {"name": "language", "layers": 4, "cost": _CURVES, "after": ["vision"]},
            ],
            "batch": {"vision": 4, "language": 2},
            "ranks": 2,
            "max_steps": 20,
        },
        {  # short enough to be solved exactly, by other code than the one before
            "modules": [
                {"name": "vision", "layers": 2, "cost": _CURVES},
                {"name": "language", "layers": 2, "cost": _CURVES, "after": ["vision"]},
            ],
            "batch": {"vision": 1, "language": 3},
            "ranks": 2,
            "max_steps": 20,
        },
    ],
    "rl": [
        {
            "lengths": {"quantiles": {"0.5": 500, "0.9": 1500}, "max_tokens": 4000},
            "samples_per_step": 16,
            "decode": {"batch": [1, 8], "seconds": [0.01, 0.012]},
            "kv": {"max_batch": 8},
            "pools": [{"name": "near", "units": 4}],
            "training": {"seconds_per_token": 0.0003},
            "draws": 2,
            "max_steps": 4,
        }
    ],
    "precision": [
        {
            "devices": [{"name": "gpu", "dtypes": ["float16", "float32"]}],
            "operators": [
                {
                    "id": "fc",
                    "output_elements": 4096,
                    "weight_elements": 65536,
                    "costs": [
                        {"dtype": "float16", "forward_s": 0.001, "backward_s": 0.002},
                        {"dtype": "float32", "forward_s": 0.003, "backward_s": 0.006},
                    ],
                    "sensitivity": {"float16": 0.1},
                }
            ],
            "max_steps": 20,
        }
    ],
    "compress": [
        {
            "tensors": [{"name": "fc", "bytes": 1e6, "backward": 0.001}],
            "compressors": [
                {"name": "top1%", "ratio": 0.02, "gpu": {"compress_s_per_byte": 1e-10, "decompress_s_per_byte": 1e-11}}
            ],
            "workers": 4,
            "link": {"alpha_s": 1e-5, "bandwidth_bytes_per_s": 1e9},
            "max_steps": 20,
        }
    ],
}


class Warmth:
    """Planners whose code is not compiled yet in this process."""

    def __init__(self) -> None:
        self._cold = {name: forms for name, forms in REQUESTS.items() if name in PLANNERS}

    def __bool__(self) -> bool:
        """Whether there is code left to compile."""
        return bool(self._cold)

    def warm(self, kind: str | None = None) -> None:
        """Compile the code of one planner, by default of any that is left; once for each planner."""
        name = kind if kind is not None else next(iter(self._cold), None)
        for value in self._cold.pop(name, []) if name is not None else []:
            try:
                solve_priced(PLANNERS[str(name)].read(value), [], SearchControl(1.0))
            except CdmppError as error:
                _log.warning("%s could not be compiled: %s", name, error)
