"""Data-parallel training as a graph to replay: forward, backward, and all-reduces of gradient buckets.

Every rank has the same network, so one stands for all: an all-reduce starts when its own gradients are
ready. Buckets are those of PyTorch's ``DistributedDataParallel`` (Li et al., PyTorch Distributed, VLDB 2020,
sections 3.2.2 and 3.2.3): gradients fill them in the order in which the backward pass makes them, and one
all-reduce follows the other on a stream of its own. The optimizer runs when all have ended.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cdmpp.errors import FieldError
from cdmpp.simulate.replay.engine import Timeline, replay
from cdmpp.simulate.replay.graph import Graph, Node
from cdmpp.simulate.replay.links import Algorithm, Link, collective_s

#: What PyTorch does unless told otherwise: a small first bucket, so that the first all-reduce starts early.
PYTORCH_BUCKET_BYTES, PYTORCH_FIRST_BUCKET_BYTES = 25 * 2**20, 2**20
RANK = "rank"
COMM = "comm"


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
    """One training iteration.

    Attributes
    ----------
    exposed_comm_s : float
        Time of all-reduces while nothing computes.
    """

    timeline: Timeline
    buckets: tuple[Bucket, ...]

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
        pairs = zip(self.timeline.graph.nodes, self.timeline.duration_s.tolist(), strict=True)
        return math.fsum(seconds for node, seconds in pairs if node.kind == "comm")


def fill_buckets(
    layers: Sequence[GradientLayer], bucket_bytes: float, first_bytes: float | None = None
) -> tuple[Bucket, ...]:
    """Divide the gradients into buckets, as ``torch.distributed._compute_bucket_assignment_by_size`` does.

    ``layers``: in the order of the forward pass. A bucket is closed when it holds ``bucket_bytes`` or more; 0 gives
    each gradient a bucket. ``first_bytes``: the same of the first bucket; default: like the others.
    """
    closed: list[Bucket] = []
    parameters: list[tuple[int, int]] = []
    size = 0.0
    for layer in reversed(range(len(layers))):
        for parameter in reversed(range(len(layers[layer].gradient_bytes))):
            parameters.append((layer, parameter))
            size += layers[layer].gradient_bytes[parameter]
            limit = bucket_bytes if closed or first_bytes is None else first_bytes
            if size >= limit:
                closed.append(Bucket(size, tuple(parameters)))
                parameters, size = [], 0.0
    if parameters:
        closed.append(Bucket(size, tuple(parameters)))
    return tuple(closed)


def data_parallel_graph(
    layers: Sequence[GradientLayer], buckets: Sequence[Bucket], setup: Setup, update_s: float = 0.0
) -> Graph:
    """The graph of one iteration on one rank.

    Streams are "0" (forward, backward, update) and "comm". With slowdowns the durations are those under
    contention: to replay with others, make another graph.

    Raises FieldError: a slowdown below 1, or fewer than one rank.
    """
    _check(setup)
    n = len(layers)
    compute_s = [layer.forward_s for layer in layers] + [layer.backward_s for layer in reversed(layers)]
    transfers_s = [setup.transfer_s(bucket.bytes) for bucket in buckets]
    # Position of the computation that a bucket waits for: backward runs from the last layer to the first.
    awaited = [2 * n - 1 - bucket.ready for bucket in buckets]
    compute_s, transfers_s = _contended(compute_s, transfers_s, awaited, setup)
    nodes: list[Node] = []
    for position, seconds in enumerate(compute_s):
        back = position >= n
        layer = layers[2 * n - 1 - position if back else position]
        name = f"{position:05d} {'backward' if back else 'forward'} {layer.name}"
        nodes.append(Node(name, RANK, seconds, (nodes[-1].id,) if nodes else ()))
    computed = nodes[-1:]
    reduced: list[Node] = []
    for index, (seconds, position) in enumerate(zip(transfers_s, awaited, strict=True)):
        before = (reduced[-1].id,) if reduced else ()
        name = f"{2 * n + index:05d} all-reduce {index}"
        reduced.append(Node(name, RANK, seconds, (nodes[position].id, *before), COMM, "comm"))
    ends = tuple(node.id for node in (*computed, *reduced[-1:]))
    update = Node(f"{2 * n + len(reduced):05d} update", RANK, update_s, ends)
    return Graph([*nodes, *reduced, update], order="listed")


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
    buckets = fill_buckets(layers, bucket_bytes, first_bytes)
    return Iteration(replay(data_parallel_graph(layers, buckets, setup, update_s)), buckets)


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
