"""Compression of each gradient in the timeline of a backward pass (ByteComp, arXiv 2205.14465).

A backward pass computes its gradients one after the other. Each is exchanged over the network and may be
compressed before: on the GPU, which delays the backward passes that follow, or on the CPU of the host. Replay
gives the time of a strategy. ByteComp leaves out tensors whose exchange is hidden anyway, compresses the most
exposed ones first, and moves compression to the CPU until that becomes the bottleneck.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from cdmpp.simulate.replay import Graph, Node, Timeline, replay

#: Smaller relative changes of an iteration are ignored.
CLOSE = 1e-9
#: Processor that compresses and decompresses.
Place = Literal["none", "gpu", "cpu"]


@dataclass(frozen=True)
class Option:
    """One way to exchange a tensor: seconds on the GPU, on the CPU and on the network."""

    compressor: str | None
    place: Place
    network_s: float
    compress_s: float = 0.0
    decompress_s: float = 0.0

    @property
    def spent_s(self) -> tuple[float, float, float]:
        """Seconds of the GPU, the CPU and the network."""
        work = self.compress_s + self.decompress_s
        return (work if self.place == "gpu" else 0.0, work if self.place == "cpu" else 0.0, self.network_s)


@dataclass(frozen=True)
class Tensor:
    """A gradient; ``options[0]`` does not compress it. Tensors are in the order of the backward pass."""

    name: str
    backward_s: float
    options: tuple[Option, ...]


Choice = tuple[int, ...]


def graph(tensors: Sequence[Tensor], choice: Choice) -> Graph:
    """The backward pass with a chosen option for each tensor; ids sort by tensor, then by stage."""
    nodes: list[Node] = []
    before: tuple[str, ...] = ()
    for i, (tensor, k) in enumerate(zip(tensors, choice, strict=True)):
        option = tensor.options[k]
        name = f"{i:04d}"
        nodes.append(Node(f"{name}.0", "worker", tensor.backward_s, before, "gpu"))
        before = ready = (f"{name}.0",)
        if option.compressor is not None:
            nodes.append(Node(f"{name}.1", "worker", option.compress_s, ready, option.place))
            ready = (f"{name}.1",)
            if option.place == "gpu":
                # It runs in the queue of the GPU, after the backward pass of this tensor.
                before = ready
        nodes.append(Node(f"{name}.2", "worker", option.network_s, ready, "network", "comm"))
        if option.compressor is not None:
            nodes.append(Node(f"{name}.3", "worker", option.decompress_s, (f"{name}.2",), option.place))
    return Graph(nodes)


def timeline(tensors: Sequence[Tensor], choice: Choice) -> Timeline:
    """Replay the backward pass with a choice of options."""
    return replay(graph(tensors, choice))


def hidden(tensors: Sequence[Tensor], choice: Choice) -> list[int]:
    """Tensors whose exchange is hidden: if it took no time, the iteration would be as long."""
    whole = timeline(tensors, choice).makespan_s
    out: list[int] = []
    for i, tensor in enumerate(tensors):
        free = Tensor(tensor.name, tensor.backward_s, (Option(None, "none", 0.0),))
        others = [*tensors[:i], free, *tensors[i + 1 :]]
        if timeline(others, (*choice[:i], 0, *choice[i + 1 :])).makespan_s >= whole * (1 - CLOSE):
            out.append(i)
    return out


def bytecomp(tensors: Sequence[Tensor], may_continue: Callable[[], bool]) -> Choice:
    """ByteComp: compress exposed tensors on the GPU, largest exchange first; then on the CPU instead."""
    choice: Choice = (0,) * len(tensors)
    best_s = timeline(tensors, choice).makespan_s

    def take(i: int, place: str) -> bool:
        """Give a tensor its best option at a place, if the iteration becomes shorter."""
        nonlocal choice, best_s
        best = best_s * (1 - CLOSE), choice
        for k, option in enumerate(tensors[i].options):
            if option.place == place:
                other = (*choice[:i], k, *choice[i + 1 :])
                best = min(best, (timeline(tensors, other).makespan_s, other))
        if best[1] == choice:
            return False
        best_s, choice = best
        return True

    for place in ("gpu", "cpu"):
        again = True
        while again and may_continue():
            again = False
            covered = set(hidden(tensors, choice))
            # The CPU takes over tensors that are compressed already; the GPU takes others.
            wanted = [i for i in range(len(tensors)) if i not in covered or (place == "cpu" and choice[i])]
            for i in sorted(wanted, key=lambda i: (-tensors[i].options[0].network_s, i)):
                at = tensors[i].options[choice[i]].place
                if at != place and may_continue():
                    again = take(i, place) or again
    return choice
