"""Largest sizes of plan requests. They protect a service from its clients; the library has no such limits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cdmpp.predict.requests.request import Request

LOCAL_HINT = "send a smaller request, or plan it in your own process: cdmpp plan and cdmpp.make_plan have no such limit"
#: By planner and size, as ``Request.sizes`` of the planner names it; ``budget_s`` is for all planners.
DEFAULTS: dict[str, float] = {
    "budget_s": 600,
    "replay.nodes": 200_000,
    "replay.work": 60_000_000,
    "replay.events": 500_000,
    "data-parallel.layers": 2048,
    "data-parallel.bucket_sizes": 16,
    "data-parallel.all_reduces": 100_000,
    "training.gpus": 16_384,
    "training.compressors": 4,
    "simulate.stages": 256,
    "simulate.passes": 16_384,
    "simulate.passes_of_all_copies": 4 * 16_384,
    "simulate.classes": 16,
    "simulate.copies": 257,
    "split.layers": 512,
    "split.ranks": 64,
    "split.micro_batches": 512,
    "split.devices": 16,
    "split.cells": 100_000_000,
    "pipeline.ranks": 128,
    "pipeline.models": 8,
    "pipeline.passes": 32_768,
    "pipeline.modules": 8,
    "pipeline.layers": 128,
    "pipeline.steps": 8,
    "pipeline.items": 8 * 1024,
    "pipeline.tasks": 20_000,
    "precision.operators": 1000,
    "precision.devices": 8,
    "precision.pairs": 2000,
    "precision.deps": 3000,
    "precision.programs": 50_000,
    "rl.units": 512,
    "rl.pools": 8,
    "rl.samples": 65_536,
    "rl.simulated_samples": 131_072,
    "rl.batch": 8192,
    "rl.lengths": 100_000,
    "rl.programs": 10_000,
    "rl.pipeline_ranks": 128,
    "rl.pipeline_models": 8,
    "rl.pipeline_passes": 32_768,
    "compress.tensors": 256,
    "compress.compressors": 4,
    "afd.instances": 64,
    "afd.tokens": 8192,
    "afd.choices": 40_000_000,
    "cluster.gpus": 20_480,
    "cluster.jobs": 256,
    "cluster.counts": 32,
    "cluster.layout_searches": 16,
    "cluster.server_sets": 12_870,
    "application.engines": 32,
    "application.primitives": 384,
    "application.requests": 128,
    "application.items": 10_000,
}


def with_defaults(given: Mapping[str, float]) -> dict[str, float]:
    """The default limits, with the given ones in their place.

    Raises ValueError: a name is not known, or a limit is not positive.
    """
    for name, limit in given.items():
        if name not in DEFAULTS:
            near = get_close_matches(name, DEFAULTS, 1)
            suggestion = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"no size is called {name!r}{suggestion} Known: {', '.join(DEFAULTS)}")
        if not (limit > 0 and math.isfinite(limit)):
            raise ValueError(f"{name}: {limit:g}, but a limit is a positive number")
    return {**DEFAULTS, **given}


def too_large(kind: str, request: Request[Any], limits: Mapping[str, float]) -> tuple[str, str] | None:
    """Name and message of the first size of a request beyond its limit; None if there is none.

    Raises FieldError: sizes cannot be determined because the request is wrong.
    """
    sizes: dict[str, float] = {"budget_s": request.budget or 0.0}
    sizes |= {f"{kind}.{name}": size for name, size in request.sizes().items()}
    for name, size in sizes.items():
        if size > limits[name]:
            field = name.rpartition(".")[2]
            return field, f"{field}: {size:,.12g}, and this service takes at most {limits[name]:,.12g}"
    return None
