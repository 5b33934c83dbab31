"""Layouts of an instance that generates: model and cache on a number of devices."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import InfeasibleError
from cdmpp.llm.config import LLMConfig
from cdmpp.llm.layout import Layout, Types, allowed_tp, expert_fits
from cdmpp.llm.memory import cache_tokens, part_memory

#: Part of a device that an engine uses.
CACHE_SHARE = 0.9
#: Samples of mean length that the cache of a generation instance holds at least.
IN_FLIGHT = 16


@dataclass(frozen=True)
class InstanceLayout:
    """Layout of a generation instance."""

    tp: int
    ep: int
    # Keys and values of a token, and the whole cache, on all its devices.
    token_bytes: float
    cache_bytes: float | None
    weights: str | None = None  # type of quantised weights


def instance_layouts(
    model: LLMConfig,
    device: DeviceSpec,
    gpus: int,
    node: int,
    mean: int,
    longest: int,
    tp: int | None,
    weights: str | None,
) -> list[InstanceLayout]:
    """Layouts of a generation instance that hold the model and the cache of some samples, smallest first.

    ``node``: devices of a node: an instance lies on one node, or fills several. ``tp``: tensor-parallel ranks; None:
    all that fit. ``weights``: type of quantised weights.
    Raises InfeasibleError: no layout fits.
    """
    types, max_ranks = Types.of(model, "bfloat16", weights, None), gpus
    layouts: list[InstanceLayout] = []
    for ranks in (n for n in allowed_tp(model) if n & (n - 1) == 0 and gpus % n == 0):
        if ranks > max_ranks or (ranks > node and ranks % node) or tp not in (None, ranks):
            continue
        degrees = [1]
        if model.experts is not None:
            fitting = [n for n in range(1, ranks + 1) if expert_fits(model, ranks, n)]
            degrees = sorted({fitting[0], fitting[-1]})
        for ep in degrees:
            layout = Layout(ranks, 1, ep)
            tokens = cache_tokens(model, layout, types, device.memory_bytes, CACHE_SHARE, longest)
            if tokens < max(longest, IN_FLIGHT * mean):
                continue
            token_bytes = ranks * part_memory(model, layout, types, None, longest)[1] / longest
            cache_bytes = None if tokens == inf else tokens * token_bytes
            layouts.append(InstanceLayout(ranks, ep, token_bytes, cache_bytes, weights))
            # Instances of several nodes only where none fits on one.
            max_ranks = min(max_ranks, node if ranks <= node else ranks)
    if not layouts:
        raise InfeasibleError(
            f"no instance of up to {gpus} {device.name} holds the model and {IN_FLIGHT} samples of {mean} tokens"
            + ("" if tp is None else f" with tp={tp}"),
            path="gpus",
            hint="use more devices, or devices with more memory",
        )
    return layouts
