"""Modules of a multimodal model: cost of a layer by size, links between their items, memory of a chunk of layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

import numpy as np

from cdmpp.errors import FieldError
from cdmpp.plan.base.batch_curve import interpolate
from cdmpp.plan.base.task_graph import sort_topologically

#: Share of the peak items per second that PipeWeaver's sub-micro-batches reach.
EFFICIENCY = 0.95
#: Most segments of a module.
MOST_SEGMENTS = 16
Knob = Literal["keep", "recompute", "offload"]
#: Knob of each chunk, by module and chunk.
Knobs = tuple[tuple[Knob, ...], ...]


@dataclass(frozen=True)
class Module:
    """One module: a chain of layers that are distributed over all ranks."""

    name: str
    layers: tuple[float, ...]  # time of each layer relative to the curves; 1.0 for layers that are all alike
    sizes: np.ndarray  # (points,): sub-micro-batch sizes (items) of the curves, growing
    # (points,): seconds of a layer of relative time 1 at those sizes
    forward_s: np.ndarray
    backward_s: np.ndarray
    after: tuple[int, ...] = ()  # indices of the modules whose output it takes
    activation_bytes: float = 0.0  # bytes that a layer keeps for an item between forward and backward pass
    boundary_bytes: float = 0.0  # bytes kept for an item at the input of a chunk of layers that recomputes the rest
    weight_bytes: float = 0.0  # bytes of a layer's weights, gradients and optimizer states
    # number of segments (passes over all ranks, from any of them on); None: in proportion to its latency
    segments: int | None = None
    # sizes, and the seconds of sending a layer's output to another rank (and its gradient back); None: no time
    transfer: tuple[np.ndarray, np.ndarray] | None = None

    @cached_property
    def work(self) -> float:
        """Sum of the layers' relative times."""
        return float(sum(self.layers))

    @cached_property
    def _before(self) -> list[float]:
        return [0.0, *np.cumsum(self.layers).tolist()]

    def weight(self, first: int, layers: int) -> float:
        """Sum of the relative times of ``layers`` layers from ``first`` on."""
        return self._before[first + layers] - self._before[first]

    @cached_property
    def _layer_cache(self) -> dict[int, tuple[float, float]]:
        return {}

    def layer_s(self, items: int) -> tuple[float, float]:
        """Forward and backward seconds of a layer of relative time 1."""
        if items not in self._layer_cache:
            self._layer_cache[items] = (
                float(interpolate(self.sizes, self.forward_s, items)),
                float(interpolate(self.sizes, self.backward_s, items)),
            )
        return self._layer_cache[items]

    def transfer_s(self, items: int) -> float:
        """Seconds of sending a layer's output to another rank, and of its gradient back."""
        return 0.0 if self.transfer is None else float(interpolate(*self.transfer, items))

    def units_s(self, units: Iterable[int]) -> float:
        """Seconds of sub-micro-batches of these sizes in a layer of relative time 1, forward and backward."""
        return sum(sum(self.layer_s(n)) for n in units)

    def most_segments(self, ranks: int) -> int:
        """Most segments: those that the request gives, or as many as it takes to give each layer a part."""
        return min(MOST_SEGMENTS, -(-len(self.layers) // ranks)) if self.segments is None else self.segments

    @cached_property
    def items_per_s(self) -> np.ndarray:
        """Items per second of a layer at each of ``sizes``."""
        rates: np.ndarray = self.sizes / (self.forward_s + self.backward_s)
        return rates

    def efficiency(self, items: int) -> float:
        """Items per second at this size, as a share of the best size's."""
        return float(items / sum(self.layer_s(items)) / self.items_per_s.max())

    def efficient_size(self, efficiency: float) -> int:
        """Smallest size with this share of the peak items per second (PipeWeaver's rule, which uses 0.95)."""
        rates = self.items_per_s
        # A share of 1 must find the peak itself, despite rounding.
        return int(self.sizes[np.flatnonzero(rates >= efficiency * rates.max() * (1 - 1e-12))[0]])


def split_evenly(items: int, parts: int) -> tuple[int, ...]:
    """Divide ``items`` into ``parts`` that differ by at most one, larger ones first."""
    size, over = divmod(items, parts)
    return (size + 1,) * over + (size,) * (parts - over)


def topological_order(modules: Sequence[Module]) -> list[int]:
    """Indices of the modules, each after those whose output it takes.

    Raises FieldError: the modules form a cycle.
    """
    return order_modules([module.name for module in modules], [module.after for module in modules])


def chained(modules: Sequence[Module]) -> list[Module]:
    """The modules one behind the other: a stage of torch sends its output to the next stage only."""
    order = topological_order(modules)
    before = dict(zip(order[1:], order, strict=False))
    return [replace(m, after=(before[i],) if i in before else ()) for i, m in enumerate(modules)]


def order_modules(names: Sequence[str], after: Sequence[Sequence[int]]) -> list[int]:
    """Indices in topological order; ``after``: for each name the indices that come before it.

    Raises FieldError: there is a cycle.
    """
    order, cycle = sort_topologically(after)
    if cycle:
        remaining = sorted({*range(len(names))} - {*order})
        cycle_names = ", ".join(names[i] for i in remaining)
        raise FieldError.at(f"modules.{remaining[0]}.after", f"modules wait for each other: {cycle_names}")
    return order


@dataclass(frozen=True)
class ItemLink:
    """Data transfer between items of two modules.

    Each item of ``single`` belongs to one item of ``other``: item j of n to item floor(j·N/n) of N.
    """

    # indices of the modules
    single: int
    other: int
    forward: bool  # in the forward pass data goes from ``single`` to ``other``; otherwise from ``other`` to ``single``


@lru_cache(maxsize=4096)
def shared_units(single: tuple[int, ...], other: tuple[int, ...]) -> np.ndarray:
    """Pairs of sub-micro-batches of two linked modules that share items; cached because a search repeats its calls.

    ``single``, ``other``: items of each sub-micro-batch of :attr:`ItemLink.single` and of :attr:`ItemLink.other`.
    Returns sub-micro-batches of ``single`` and of ``other``, growing (shape (pairs, 2)).
    """
    other_items = np.arange(sum(single)) * sum(other) // max(1, sum(single))
    single_units = np.repeat(np.arange(len(single)), single)
    other_units = np.searchsorted(np.cumsum(other), other_items, side="right")
    pairs = np.unique(np.stack([single_units, other_units], axis=1), axis=0)
    pairs.flags.writeable = False
    return pairs


@dataclass(frozen=True)
class ItemLinks:
    """Links between the items of a step."""

    samples: int  # module whose items are the samples of the step; each item of another module belongs to one of them
    all: tuple[ItemLink, ...]  # links on the path to the samples come first

    def sample_of(self, module: int, batch: Sequence[int]) -> np.ndarray:
        """Sample of each item of a module; ndarray of int64, shape (items,), growing."""
        items, at = np.arange(batch[module]), module
        while at != self.samples:
            link = next((link for link in self.all if link.single == at), None)
            if link is None:  # no data goes between it and the samples
                return items * batch[self.samples] // max(1, batch[module])
            items = items * batch[link.other] // max(1, batch[at])
            at = link.other
        return items


def link_items(modules: Sequence[Module], batch: Sequence[int], samples: int | None = None) -> ItemLinks:
    """Derive the links between the items of a step.

    ``batch``: items of each module. Data passes through a module without items to the next. ``samples``: module whose
    items are the samples. Default (also where it has no items): the module that exchanges data with most others, the
    last of these in topological order. An image belongs to one sequence; a sequence may have no image.
    """
    sources: list[set[int]] = [set() for _ in modules]
    order = topological_order(modules)
    for i in order:
        for j in modules[i].after:
            sources[i] |= {j} if batch[j] else sources[j]
    neighbours: list[set[int]] = [set() for _ in modules]
    for i in order:
        if batch[i]:
            for j in sources[i]:
                neighbours[i].add(j)
                neighbours[j].add(i)
    if samples is None or not batch[samples]:
        samples = max((i for i in order if batch[i]), key=lambda i: (len(neighbours[i]), order.index(i)))
    distance = {samples: 0}
    queue = [samples]
    for i in queue:
        for j in sorted(neighbours[i]):
            if j not in distance:
                distance[j] = distance[i] + 1
                queue.append(j)
    links = []
    for i in order:
        for j in sorted(sources[i]) if batch[i] else ():
            towards_samples = distance.get(j, 0) >= distance.get(i, 0)
            links.append(ItemLink(j, i, True) if towards_samples else ItemLink(i, j, False))
    links.sort(key=lambda link: distance.get(link.other, 0))
    return ItemLinks(samples, tuple(links))


@dataclass(frozen=True)
class MemoryOptions:
    """Memory limit, and what may be done to keep it."""

    limit_bytes: float = float("inf")  # memory of each rank; infinite without a limit
    knobs: tuple[Knob, ...] = ("keep",)  # what may be done with activations
    host_bytes_per_s: float = float("inf")  # bandwidth of a rank's link to the host, in each direction; for "offload"


class ChunkCost(NamedTuple):
    """Time and memory of a sub-micro-batch in a chunk of layers."""

    forward_s: float
    backward_s: float
    kept_bytes: float  # held from the start of the forward pass to the end of the backward pass
    # held in addition while the pass runs
    extra_forward_bytes: float
    extra_backward_bytes: float


def chunk_cost(module: Module, layers: tuple[int, int], items: int, knob: Knob, memory: MemoryOptions) -> ChunkCost:
    """Time and memory of ``items`` in a chunk of layers.

    Recomputation repeats the forward pass before the backward pass and keeps only the chunk's input between them.
    Offloading moves all activations to the host during the forward pass and back during the backward pass; a pass
    takes as long as the longer of its arithmetic and its transfer.

    ``layers``: first layer and number of layers.
    """
    first, count = layers
    forward_s, backward_s = (module.weight(first, count) * layer_s for layer_s in module.layer_s(items))
    full = count * module.activation_bytes * items
    if knob == "recompute" and count:
        boundary = min(module.boundary_bytes * items, full)
        return ChunkCost(forward_s, backward_s + forward_s, boundary, 0.0, full - boundary)
    if knob == "offload" and count:
        transfer_s = full / memory.host_bytes_per_s
        return ChunkCost(max(forward_s, transfer_s), max(backward_s, transfer_s), 0.0, full, full)
    return ChunkCost(forward_s, backward_s, full, 0.0, 0.0)
