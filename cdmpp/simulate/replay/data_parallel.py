"""Data-parallel training as a graph to replay: computation, and exchanges of gradients in buckets.

Every rank has the same network, so one stands for all: an exchange starts when its own gradients are
ready. A bucket is a contiguous group of gradients in the order in which the backward pass makes them. Buckets of a
size are those of PyTorch's ``DistributedDataParallel`` (Li et al., PyTorch Distributed, VLDB 2020, sections 3.2.2 and
3.2.3). One exchange follows the other on a stream of its own, and a bucket may be compressed before, on the GPU or on
the CPU (ByteComp, arXiv 2205.14465). The optimizer runs when all have ended.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from cdmpp.errors import FieldError
from cdmpp.simulate.replay.engine import Timeline, replay
from cdmpp.simulate.replay.graph import Graph, Node
from cdmpp.simulate.replay.links import Algorithm, Link, collective_s, collective_steps

#: What PyTorch does unless told otherwise: a small first bucket, so that the first all-reduce starts early.
PYTORCH_BUCKET_BYTES, PYTORCH_FIRST_BUCKET_BYTES = 25 * 2**20, 2**20
RANK, COMM = "rank", "network"
#: Processor that compresses and decompresses.
Place = Literal["none", "gpu", "cpu"]


@dataclass(frozen=True)
class Option:
    """One way to exchange a bucket: seconds of compression, exchange and decompression."""

    compressor: str | None
    place: Place
    network_s: float
    compress_s: float = 0.0
    decompress_s: float = 0.0


@dataclass(frozen=True)
class ComputePass:
    """A computation on the GPU, and the exchange that waits for it; None: there is none."""

    seconds: float
    option: Option | None = None


def pass_graph(passes: Sequence[ComputePass], update_s: float | None = None) -> Graph:
    """Ids sort by pass, then by stage: computation, compression, exchange, decompression.

    Compression on the GPU delays the passes that follow. ``update_s``: the optimizer, which waits for all.
    """
    nodes: list[Node] = []
    before: tuple[str, ...] = ()
    for i, item in enumerate(passes):
        name, option = f"{i:05d}", item.option
        nodes.append(Node(f"{name}.0", RANK, item.seconds, before, "gpu"))
        before = ready = (f"{name}.0",)
        if option is not None and option.compressor is not None:
            nodes.append(Node(f"{name}.1", RANK, option.compress_s, ready, option.place))
            ready = (f"{name}.1",)
            before = ready if option.place == "gpu" else before
        if option is not None:
            nodes.append(Node(f"{name}.2", RANK, option.network_s, ready, COMM, "comm"))
        if option is not None and option.compressor is not None:
            nodes.append(Node(f"{name}.3", RANK, option.decompress_s, (f"{name}.2",), option.place))
    if update_s is not None:
        nodes.append(Node(f"{len(passes):05d}.0", RANK, update_s, tuple(node.id for node in nodes), "gpu"))
    return Graph(nodes)


@dataclass(frozen=True)
class GradientLayer:
    """A part of the network whose gradients are computed together."""

    name: str
    # Seconds, 0 or more. What the backward pass does between the next layer and this one is part of it.
    forward_s: float
    backward_s: float
    # Bytes of each parameter in the order of the module; empty for a layer without parameters.
    gradient_bytes: tuple[float, ...] = ()


@dataclass(frozen=True)
class Setup:
    """Settings of the all-reduces."""

    ranks: int
    link: Link  # between neighbours; with ``algorithm="measured"`` its figures are of a whole all-reduce
    algorithm: Algorithm = "ring"
    # How many times as long computation takes while a transfer runs, and a transfer while something computes; 1 where
    # they share nothing. Transfers by threads of the same cores do.
    compute_slowdown: float = 1.0
    comm_slowdown: float = 1.0

    def transfer_s(self, size: float) -> float:
        """Seconds of an all-reduce of so many bytes while nothing else runs."""
        return collective_s("all_reduce", self.ranks, size, self.link, self.algorithm)


@dataclass(frozen=True)
class Bucket:
    """Gradients of one all-reduce."""

    bytes: float
    parameters: tuple[tuple[int, int], ...]  # positions, in the order in which they become ready

    @property
    def ready(self) -> int:
        """The layer whose backward pass computes its last gradient."""
        return self.parameters[-1][0]


@dataclass(frozen=True)
class Iteration:
    """One training iteration."""

    timeline: Timeline
    buckets: tuple[Bucket, ...]
    options: tuple[Option, ...]  # of each bucket

    @property
    def iteration_s(self) -> float:
        """From the beginning of the forward pass to the end of the update."""
        return self.timeline.makespan_s

    @property
    def exposed_comm_s(self) -> float:
        """Time of all-reduces while nothing computes."""
        return self.timeline.exposed_comm_s

    @property
    def comm_s(self) -> float:
        """Time of all-reduces."""
        return math.fsum(option.network_s for option in self.options)


def gradients(layers: Sequence[GradientLayer]) -> list[tuple[int, int, float]]:
    """Layer, parameter and bytes of each gradient in the order of the backward pass."""
    return [
        (layer, parameter, layers[layer].gradient_bytes[parameter])
        for layer in reversed(range(len(layers)))
        for parameter in reversed(range(len(layers[layer].gradient_bytes)))
    ]


def fill_buckets(
    layers: Sequence[GradientLayer], bucket_bytes: float, first_bytes: float | None = None
) -> tuple[Bucket, ...]:
    """Divide the gradients into buckets, as ``torch.distributed._compute_bucket_assignment_by_size`` does.

    ``layers``: in the order of the forward pass. A bucket is closed when it holds ``bucket_bytes`` or more; 0 gives
    each gradient a bucket. ``first_bytes``: the same of the first bucket; default: like the others.
    """
    order, cuts, size = gradients(layers), list[int](), 0.0
    for i, (_, _, own) in enumerate(order, 1):
        size += own
        if i == len(order) or size >= (bucket_bytes if cuts or first_bytes is None else first_bytes):
            cuts.append(i)
            size = 0.0
    return cut_buckets(layers, cuts)


def cut_buckets(layers: Sequence[GradientLayer], cuts: Sequence[int]) -> tuple[Bucket, ...]:
    """Buckets from their ends (exclusive) in :func:`gradients`."""
    order = gradients(layers)
    groups = (order[start:end] for start, end in zip([0, *cuts], cuts, strict=False))
    return tuple(Bucket(sum(own for _, _, own in g), tuple((layer, i) for layer, i, _ in g)) for g in groups)


def free_buckets(layers: Sequence[GradientLayer], setup: Setup) -> tuple[Bucket, ...]:
    """The buckets of the shortest iteration, without slowdowns.

    Exact: an exchange ends later where the one before does, so the earliest end of j gradients follows from fewer.
    """
    order = gradients(layers)
    ready_s = np.cumsum([layer.backward_s for layer in reversed(layers)]) + sum(layer.forward_s for layer in layers)
    before, end_s = np.cumsum([0.0, *(size for _, _, size in order)]), np.zeros(len(order) + 1)
    first = np.zeros(len(end_s), np.int64)
    steps, share = collective_steps("all_reduce", setup.ranks, 1.0, setup.algorithm)
    for j, (layer, _, _) in enumerate(order, 1):
        ends = np.maximum(ready_s[-1 - layer], end_s[:j]) + steps * setup.link.seconds_of(
            share * (before[j] - before[:j])
        )
        first[j] = ends.argmin()
        end_s[j] = ends[first[j]]
    cuts = [len(order)] if order else []
    while cuts and first[cuts[-1]] > 0:
        cuts.append(int(first[cuts[-1]]))
    return cut_buckets(layers, cuts[::-1])


def iteration_of(
    layers: Sequence[GradientLayer],
    buckets: Sequence[Bucket],
    setup: Setup,
    update_s: float = 0.0,
    options: Sequence[Option] | None = None,
) -> Iteration:
    """Replay an iteration with some buckets. ``options``: how each is exchanged; default: not compressed.

    Raises FieldError: a slowdown below 1, or fewer than one rank.
    """
    _check(setup)
    # Backward runs from the last layer to the first.
    compute_s = [layer.forward_s for layer in layers] + [layer.backward_s for layer in reversed(layers)]
    awaited = [2 * len(layers) - 1 - bucket.ready for bucket in buckets]
    if options is None:
        transfers_s = [setup.transfer_s(bucket.bytes) for bucket in buckets]
        compute_s, transfers_s = _contended(compute_s, transfers_s, awaited, setup)
        options = [Option(None, "none", seconds) for seconds in transfers_s]
    sent: dict[int, list[Option | None]] = {}
    for position, option in zip(awaited, options, strict=True):
        sent.setdefault(position, []).append(option)
    passes: list[ComputePass] = []
    for position, seconds in enumerate(compute_s):
        first, *others = sent.get(position, [None])
        passes += [ComputePass(seconds, first), *(ComputePass(0.0, option) for option in others)]
    return Iteration(replay(pass_graph(passes, update_s)), tuple(buckets), tuple(options))


def simulate(
    layers: Sequence[GradientLayer],
    setup: Setup,
    bucket_bytes: float = PYTORCH_BUCKET_BYTES,
    first_bytes: float | None = None,
    update_s: float = 0.0,
) -> Iteration:
    """Replay one iteration of data-parallel training; ``layers`` are in the order of the forward pass.

    ``bucket_bytes`` and ``first_bytes`` are those of :func:`fill_buckets`. PyTorch has by default 25 MiB, and 1 MiB for
    the first bucket; with a given ``bucket_cap_mb`` all buckets have that size.

    Examples
    --------
    >>> from cdmpp.simulate.replay import Link
    >>> layers = [GradientLayer("a", 1.0, 2.0, (4.0,)), GradientLayer("b", 1.0, 2.0, (4.0,))]
    >>> setup = Setup(2, Link(beta_s_per_byte=0.5), "measured")
    >>> [simulate(layers, setup, bucket_bytes=size).iteration_s for size in (1, 8)]
    [8.0, 10.0]
    """
    return iteration_of(layers, fill_buckets(layers, bucket_bytes, first_bytes), setup, update_s)


def _check(setup: Setup) -> None:
    if setup.ranks < 1:
        raise FieldError("there is at least one rank", path="ranks")
    for name in ("compute_slowdown", "comm_slowdown"):
        if not getattr(setup, name) >= 1:
            raise FieldError(f"{name} is below 1", path=name, hint="1: nothing is shared")


def _contended(
    compute_s: Sequence[float], transfers_s: Sequence[float], awaited: Sequence[int], setup: Setup
) -> tuple[list[float], list[float]]:
    """Durations where computation and transfers slow each other down while both run.

    Both queues run in order; ``awaited``: position of the computation that each transfer waits for.
    """
    if setup.compute_slowdown == setup.comm_slowdown == 1.0:
        return list(compute_s), list(transfers_s)
    took_c, took_t = [0.0] * len(compute_s), [0.0] * len(transfers_s)
    i = j = 0
    # Shares of the running computation and transfer that are done.
    done_c = done_t = 0.0
    while i < len(compute_s) or j < len(transfers_s):
        computing = i < len(compute_s)
        sending = j < len(transfers_s) and awaited[j] < i
        whole_c = compute_s[i] * (setup.compute_slowdown if sending else 1.0) if computing else math.inf
        whole_t = transfers_s[j] * (setup.comm_slowdown if computing else 1.0) if sending else math.inf
        left_c = (1 - done_c) * whole_c if computing else math.inf
        left_t = (1 - done_t) * whole_t if sending else math.inf
        step = min(left_c, left_t)
        if computing:
            took_c[i] += step
            done_c += step / whole_c if whole_c else 1.0
        if sending:
            took_t[j] += step
            done_t += step / whole_t if whole_t else 1.0
        if computing and left_c <= step:
            i, done_c = i + 1, 0.0
        if sending and left_t <= step:
            j, done_t = j + 1, 0.0
    return took_c, took_t
