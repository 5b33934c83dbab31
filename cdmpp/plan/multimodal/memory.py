"""Memory limit of the ranks, memory knobs, and the cost of a chunk of layers under each knob."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from cdmpp.plan.multimodal.modules import Module

Knob = Literal["keep", "recompute", "offload"]
#: Knob of each chunk, by module and chunk.
Knobs = tuple[tuple[Knob, ...], ...]


@dataclass(frozen=True)
class Memory:
    """Memory limit, and what may be done to keep it.

    Attributes
    ----------
    limit_bytes : float
        Memory of each rank; infinite without a limit.
    knobs : tuple of {"keep", "recompute", "offload"}
        What may be done with activations.
    host_bytes_per_s : float
        Bandwidth of a rank's link to the host, in each direction; for "offload".
    """

    limit_bytes: float = float("inf")
    knobs: tuple[Knob, ...] = ("keep",)
    host_bytes_per_s: float = float("inf")


class ChunkCost(NamedTuple):
    """Time and memory of a sub-micro-batch in a chunk of layers.

    Attributes
    ----------
    forward_s, backward_s : float
    kept_bytes : float
        Held from the start of the forward pass to the end of the backward pass.
    extra_forward_bytes, extra_backward_bytes : float
        Held in addition while the pass runs.
    """

    forward_s: float
    backward_s: float
    kept_bytes: float
    extra_forward_bytes: float
    extra_backward_bytes: float


def chunk_cost(module: Module, layers: tuple[int, int], items: int, knob: Knob, memory: Memory) -> ChunkCost:
    """Time and memory of ``items`` in a chunk of layers.

    Recomputation repeats the forward pass before the backward pass and keeps only the chunk's input between them.
    Offloading moves all activations to the host during the forward pass and back during the backward pass; a pass
    takes as long as the longer of its arithmetic and its transfer.

    Parameters
    ----------
    layers : (int, int)
        First layer and number of layers.
    """
    first, count = layers
    weight = sum(module.layers[first : first + count])
    forward_s, backward_s = (weight * layer_s for layer_s in module.layer_s(items))
    full = count * module.activation_bytes * items
    if knob == "recompute" and count:
        boundary = min(module.boundary_bytes * items, full)
        return ChunkCost(forward_s, backward_s + forward_s, boundary, 0.0, full - boundary)
    if knob == "offload" and count:
        transfer_s = full / memory.host_bytes_per_s
        return ChunkCost(max(forward_s, transfer_s), max(backward_s, transfer_s), 0.0, full, full)
    return ChunkCost(forward_s, backward_s, full, 0.0, 0.0)
