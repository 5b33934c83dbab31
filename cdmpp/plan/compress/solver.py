"""Compression of each gradient in the timeline of a backward pass (ByteComp, arXiv 2205.14465): options, search, plan.

A backward pass computes its gradients one after the other. Each is exchanged over the network and may be
compressed before: on the GPU, which delays the backward passes that follow, or on the CPU of the host. Replay
gives the time of a strategy. ByteComp leaves out tensors whose exchange is hidden anyway, compresses the most
exposed ones first, and moves compression to the CPU until that becomes the bottleneck. A local search, and branch and
bound with a lower bound, improve its strategy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import TYPE_CHECKING, cast, get_args

import numpy as np

from cdmpp.errors import FieldError
from cdmpp.plan.base.solve import check_unique
from cdmpp.plan.compress.schema import CompressPlan, CompressRequest, Place, Span, Stage, Stream, TensorPlan
from cdmpp.predict.requests.budget import SearchControl
from cdmpp.predict.requests.plot import BLUE, GREEN, GREY, YELLOW, Bar, draw_legend, draw_timeline, new_figure
from cdmpp.predict.requests.pricing import cost_of
from cdmpp.simulate.replay import Graph, Node, Timeline, replay
from cdmpp.simulate.replay.build import read_link
from cdmpp.simulate.replay.engine import walk
from cdmpp.simulate.replay.graph import Floats
from cdmpp.simulate.replay.links import Algorithm, Collective, Link, collective_s
from cdmpp.utils.jit import jit
from cdmpp.utils.units import format_latency

if TYPE_CHECKING:
    from matplotlib.figure import Figure


#: Smaller relative changes of an iteration are ignored.
CLOSE = 1e-9


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
class GradientTensor:
    """A gradient; ``options[0]`` does not compress it. Tensors are in the order of the backward pass."""

    name: str
    backward_s: float
    options: tuple[Option, ...]


Choice = tuple[int, ...]


def graph(tensors: Sequence[GradientTensor], choice: Choice) -> Graph:
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


def timeline(tensors: Sequence[GradientTensor], choice: Choice) -> Timeline:
    """Replay the backward pass with a choice of options."""
    return replay(graph(tensors, choice))


def iteration_s(tensors: Sequence[GradientTensor], choice: Choice) -> float:
    """Makespan of :func:`timeline`, without its nodes."""
    return float(_iteration(_rows(tensors, choice)))


def _rows(tensors: Sequence[GradientTensor], choice: Choice) -> Floats:
    """Backward pass, place (0 none, 1 GPU, 2 CPU), exchange, compression and decompression; shape (tensors, 5)."""
    options = [tensor.options[k] for tensor, k in zip(tensors, choice, strict=True)]
    places = {"none": 0.0, "gpu": 1.0, "cpu": 2.0}
    return np.array(
        [
            (tensor.backward_s, places[o.place], o.network_s, o.compress_s, o.decompress_s)
            for tensor, o in zip(tensors, options, strict=True)
        ]
    )


@jit
def _iteration(rows: Floats) -> float:
    """Replay of :func:`graph` from its figures: nodes in the same order, on streams 0 (GPU), 1 (network), 2 (CPU)."""
    nodes = 0
    for i in range(len(rows)):
        nodes += 2 if rows[i, 1] == 0.0 else 4
    duration, gap = np.zeros(nodes), np.zeros(nodes)
    waits, stream = np.zeros(nodes, np.int64), np.zeros(nodes, np.int64)
    start, following = np.zeros(nodes + 1, np.int64), np.zeros(2 * nodes, np.int64)
    at = edges = 0
    for i in range(len(rows)):
        compressed, later = rows[i, 1] > 0.0, i + 1 < len(rows)
        size = 4 if compressed else 2
        place = 0 if rows[i, 1] == 1.0 else 2
        for k in range(size):
            kind = k if compressed else 2 * k
            duration[at + k] = rows[i, 0 if kind == 0 else (3 if kind == 1 else (2 if kind == 2 else 4))]
            stream[at + k] = 0 if kind == 0 else (1 if kind == 2 else place)
            if k + 1 < size:
                following[edges] = at + k + 1
                waits[at + k + 1] += 1
                edges += 1
            # The next backward pass follows in the queue of the GPU.
            if later and k == (1 if compressed and place == 0 else 0):
                following[edges] = at + size
                waits[at + size] += 1
                edges += 1
            start[at + k + 1] = edges
        at += size
    begin, end, cause = np.zeros(nodes), np.full(nodes, -1.0), np.full(nodes, -1, np.int64)
    return walk(duration, gap, waits, start, following, np.arange(nodes + 1), stream, 3, begin, end, cause)


def hidden(tensors: Sequence[GradientTensor], choice: Choice) -> list[int]:
    """Tensors whose exchange is hidden: if it took no time, the iteration would be as long."""
    rows = _rows(tensors, choice)
    whole = _iteration(rows)
    out: list[int] = []
    for i in range(len(rows)):
        free = rows.copy()
        free[i, 1:] = 0.0
        if _iteration(free) >= whole * (1 - CLOSE):
            out.append(i)
    return out


def bytecomp(tensors: Sequence[GradientTensor], may_continue: Callable[[], bool]) -> Choice:
    """ByteComp: compress exposed tensors on the GPU, largest exchange first; then on the CPU instead."""
    choice: Choice = (0,) * len(tensors)
    best_s = iteration_s(tensors, choice)

    def take(i: int, place: str) -> bool:
        """Give a tensor its best option at a place, if the iteration becomes shorter."""
        nonlocal choice, best_s
        best = best_s * (1 - CLOSE), choice
        for k, option in enumerate(tensors[i].options):
            if option.place == place:
                other = (*choice[:i], k, *choice[i + 1 :])
                best = min(best, (iteration_s(tensors, other), other))
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


_MIXES = 12
_SHAKEN = (2, 6)


class Bound:
    """Lower bound of the iteration.

    GPU, CPU and network each need the time of their work. CPU and network cannot start with the tensors from k
    on before the backward passes up to k are done. Any weighted mean of the three times is a bound, and in a mean
    each tensor can take its best option independently. The bound is the largest over k and over a grid of weights.
    """

    def __init__(self, tensors: Sequence[GradientTensor]) -> None:
        backward = np.cumsum([tensor.backward_s for tensor in tensors])
        max_options = max(len(tensor.options) for tensor in tensors)
        spent = np.array([[t.options[min(k, len(t.options) - 1)].spent_s for k in range(max_options)] for t in tensors])
        mixes = [(a, b, _MIXES - a - b) for a in range(_MIXES + 1) for b in range(_MIXES + 1 - a)]
        weights = np.array(mixes).T / _MIXES
        #: (tensors, options, mixes), and the least of it over the options.
        self._mixed = spent @ weights
        self._least = self._mixed.min(axis=1)
        self._before = weights[0] * backward[-1] + (1 - weights[0]) * backward[:, None]

    def value(self, fixed: Choice = ()) -> float:
        """The bound with fixed options of the first tensors."""
        least = self._least
        if fixed:
            least = least.copy()
            least[: len(fixed)] = self._mixed[np.arange(len(fixed)), list(fixed)]
        later = np.cumsum(least[::-1], axis=0)[::-1]
        return float((self._before + later).max())


@dataclass
class Incumbent:
    """The best strategy so far, the strategy of ByteComp, the bound, and whether the best one is optimal."""

    choice: Choice
    iteration_s: float
    heuristic: Choice
    bound_s: float
    proven: bool = False


def search(
    tensors: Sequence[GradientTensor],
    may_continue: Callable[[], bool],
    seed: int = 0,
    report: Callable[[Incumbent], None] = lambda incumbent: None,
) -> Incumbent:
    """The shortest iteration.

    Improves the strategies of ByteComp and of :func:`everywhere`, then proves the best one by branch and bound
    where there are few tensors, then improves random changes of it until the search has to stop.
    """
    bound = Bound(tensors)
    first = bytecomp(tensors, may_continue)
    starts = list(dict.fromkeys([first, *everywhere(tensors).values()]))
    best = min(starts, key=lambda choice: iteration_s(tensors, choice))
    incumbent = Incumbent(best, iteration_s(tensors, best), first, bound.value())

    def offer(choice: Choice) -> None:
        seconds = iteration_s(tensors, choice)
        if seconds < incumbent.iteration_s * (1 - CLOSE):
            incumbent.choice, incumbent.iteration_s = choice, seconds
            report(incumbent)

    def close() -> bool:
        return incumbent.iteration_s <= incumbent.bound_s * (1 + CLOSE)

    report(incumbent)
    for start in starts:
        if not close() and may_continue():
            offer(improve(tensors, start, may_continue))
    if not close() and _branch_and_bound(tensors, bound, incumbent, offer, may_continue):
        incumbent.bound_s = incumbent.iteration_s
    chance = np.random.default_rng(seed)
    while not close() and may_continue():
        offer(improve(tensors, _shaken(tensors, incumbent.choice, chance), may_continue))
    incumbent.proven = close()
    return incumbent


def improve(tensors: Sequence[GradientTensor], start: Choice, may_continue: Callable[[], bool]) -> Choice:
    """Change single tensors, then two at once, while the iteration becomes shorter."""
    choice, best_s = start, iteration_s(tensors, start)

    def others() -> Iterator[tuple[tuple[int, int], ...]]:
        single = [(i, k) for i, t in enumerate(tensors) for k in range(len(t.options)) if k != choice[i]]
        yield from ((change,) for change in single)
        yield from ((a, b) for a, b in combinations(single, 2) if a[0] != b[0])

    moved = True
    while moved:
        moved = False
        for changes in others():
            if not may_continue():
                return choice
            other = list(choice)
            for i, k in changes:
                other[i] = k
            seconds = iteration_s(tensors, tuple(other))
            if seconds < best_s * (1 - CLOSE):
                choice, best_s, moved = tuple(other), seconds, True
                break
    return choice


def everywhere(tensors: Sequence[GradientTensor]) -> dict[str, Choice]:
    """The strategies with one option for all tensors, by name: "none", "top1% on gpu", ..."""
    out: dict[str, Choice] = {}
    for k, option in enumerate(tensors[0].options):
        name = "none" if option.compressor is None else f"{option.compressor} on {option.place}"
        out[name] = (k,) * len(tensors)
    return out


#: Most tensors for which a proof is tried.
_PROVE = 16


def _branch_and_bound(
    tensors: Sequence[GradientTensor],
    bound: Bound,
    incumbent: Incumbent,
    offer: Callable[[Choice], None],
    may_continue: Callable[[], bool],
) -> bool:
    """Try every strategy that may be shorter; return whether that was finished."""
    if len(tensors) > _PROVE:
        return False
    stack: list[Choice] = [()]
    while stack:
        if not may_continue():
            return False
        fixed = stack.pop()
        if bound.value(fixed) >= incumbent.iteration_s * (1 - CLOSE):
            continue
        if len(fixed) == len(tensors):
            offer(fixed)
            continue
        stack += [(*fixed, k) for k in reversed(range(len(tensors[len(fixed)].options)))]
    return True


def _shaken(tensors: Sequence[GradientTensor], choice: Choice, chance: np.random.Generator) -> Choice:
    """The strategy with random options for a few tensors."""
    other = list(choice)
    size = min(len(tensors), int(chance.integers(*_SHAKEN)))
    for i in chance.choice(len(tensors), size=size, replace=False):
        other[i] = int(chance.integers(0, len(tensors[i].options)))
    return tuple(other)


_STAGES: tuple[Stage, ...] = get_args(Stage)


def solve(request: CompressRequest, control: SearchControl) -> CompressPlan:
    """The strategy with the shortest iteration within the budget. Raises FieldError: as :func:`tensors_of`."""
    tensors = tensors_of(request)
    describe = partial(_plan, tensors, _longest_passes(request))
    may_continue = _limit(request.max_steps, control, tensors)

    def report(incumbent: Incumbent) -> None:
        so_far = replace(incumbent)
        control.report(best=so_far.iteration_s, bound=so_far.bound_s, answer=lambda: describe(so_far))

    return describe(search(tensors, may_continue, request.seed, report))


def figure_of(request: CompressRequest, plan: CompressPlan) -> float:
    """Seconds of an iteration with the strategy of a plan and the costs of this request."""
    tensors = tensors_of(request)
    choice = [
        next(k for k, o in enumerate(tensor.options) if (o.compressor, o.place) == (chosen.compressor, chosen.place))
        for tensor, chosen in zip(tensors, plan.tensors, strict=True)
    ]
    return iteration_s(tensors, tuple(choice))


def _limit(max_steps: int | None, control: SearchControl, tensors: Sequence[GradientTensor]) -> Callable[[], bool]:
    """A function that returns whether the search may take another step."""
    # The replay engine is loaded or compiled here, once; the budget does not include that time.
    timeline(tensors[:1], (0,))
    iteration_s(tensors[:1], (0,))
    control.restart()
    steps = 0

    def may_continue() -> bool:
        nonlocal steps
        steps += 1
        return not control.expired and (max_steps is None or steps <= max_steps)

    return may_continue


def tensors_of(request: CompressRequest) -> list[GradientTensor]:
    """The tensors of a resolved request, with their options.

    Raises FieldError: two compressors or tensors with one name, or a link without figures.
    """
    predicted = request.link.collective
    links: dict[str, Link] = {}
    algorithm: Algorithm = "ring" if predicted is None else "measured"
    if predicted is not None and predicted.ranks != request.workers:
        raise FieldError.at(
            "link.collective.ranks",
            f"{predicted.ranks} ranks, and the request has {request.workers} workers",
            hint="give the same number",
        )

    def exchange_s(op: Collective, size: float) -> float:
        link = links[op] if op in links else links.setdefault(op, read_link(request.link, "link", op))
        try:
            return collective_s(op, request.workers, size, link, algorithm)
        except FieldError as error:
            raise FieldError.at("link.table", error.message, hint=error.hint) from None

    check_unique([compressor.name for compressor in request.compressors], "compressors")
    check_unique([tensor.name for tensor in request.tensors], "tensors")
    tensors = []
    for form in request.tensors:
        options = [Option(None, "none", exchange_s("all_reduce", form.bytes))]
        for compressor in request.compressors:
            # The buffer of an all-gather has the tensors of all workers, and each worker decompresses all of it.
            copies = request.workers if compressor.collective == "all_gather" else 1
            network_s = exchange_s(compressor.collective, form.bytes * compressor.ratio * copies)
            places: list[Place] = ["gpu", "cpu"]
            for place, work in zip(places, (compressor.gpu, compressor.cpu), strict=True):
                if work is not None:
                    compress_s = work.overhead_s + work.compress_s_per_byte * form.bytes
                    decompress_s = work.overhead_s + work.decompress_s_per_byte * form.bytes * copies
                    options.append(Option(compressor.name, place, network_s, compress_s, decompress_s))
        tensors.append(GradientTensor(form.name, cost_of(form.backward).latency_s, tuple(options)))
    return tensors


def _longest_passes(request: CompressRequest) -> list[str]:
    """The programs of the two longest backward passes."""
    costs = [(tensor.name, cost_of(tensor.backward)) for tensor in request.tensors]
    longest = sorted(costs, key=lambda pair: (-pair[1].latency_s, pair[0]))[:2]
    return [f"backward pass of {name}: {cost.largest()}" for name, cost in longest if cost.parts]


def _plan(tensors: Sequence[GradientTensor], longest_passes: Sequence[str], incumbent: Incumbent) -> CompressPlan:
    choice = incumbent.choice
    replayed = timeline(tensors, choice)
    uncompressed = timeline(tensors, (0,) * len(tensors))
    baselines = {name: iteration_s(tensors, other) for name, other in everywhere(tensors).items()}
    baselines["bytecomp"] = iteration_s(tensors, incumbent.heuristic)
    covered = set(hidden(tensors, choice))
    options = [tensor.options[k] for tensor, k in zip(tensors, choice, strict=True)]
    busy: dict[Stream, float] = {"gpu": 0.0, "cpu": 0.0, "network": 0.0}
    busy |= {cast(Stream, use.stream): use.busy_s for use in replayed.streams}
    busiest = max(busy, key=lambda stream: busy[stream])
    compressed = sum(option.compressor is not None for option in options)
    on_cpu = sum(option.place == "cpu" for option in options)
    return CompressPlan(
        iteration_s=replayed.makespan_s,
        lower_bound_s=min(incumbent.bound_s, replayed.makespan_s),
        proven=incumbent.proven,
        exposed_comm_s=replayed.exposed_comm_s,
        tensors=[
            TensorPlan(
                name=tensor.name,
                compressor=option.compressor,
                place=option.place,
                network_s=option.network_s,
                hidden=i in covered,
            )
            for i, (tensor, option) in enumerate(zip(tensors, options, strict=True))
        ],
        busy_s=busy,
        timeline=[
            Span(
                tensor=tensors[int(node.id[:4])].name,
                stage=_STAGES[int(node.id[5])],
                stream=cast(Stream, node.stream),
                start_s=start_s,
                end_s=end_s,
            )
            for node, start_s, end_s in zip(
                replayed.graph.nodes, replayed.start_s.tolist(), replayed.end_s.tolist(), strict=True
            )
        ],
        baselines=baselines,
        explanation=[
            f"{compressed} of {len(tensors)} tensors are compressed, {on_cpu} of them on the CPU; "
            f"{len(covered)} exchanges are hidden",
            f"exposed exchanges fall from {format_latency(uncompressed.exposed_comm_s)} to "
            f"{format_latency(replayed.exposed_comm_s)}",
            f"the {busiest} is busiest: {format_latency(busy[busiest])} of {format_latency(replayed.makespan_s)}",
            *longest_passes,
        ],
    )


_COLOURS = {"backward": GREY, "compress": YELLOW, "exchange": BLUE, "decompress": GREEN}
_ROWS = ("gpu", "cpu", "network")


def draw(request: CompressRequest, plan: CompressPlan) -> Figure:
    """One row for each processor; baselines as vertical lines."""
    figure = new_figure(9, 2.8)
    bars = [
        Bar(_ROWS.index(span.stream), span.start_s, span.end_s, _COLOURS[span.stage], span.tensor)
        for span in plan.timeline
    ]
    marks = {"no compression": plan.baselines["none"], "ByteComp": plan.baselines["bytecomp"]}
    xlabel = "time from the start of the backward pass"
    draw_timeline(figure.subplots(), bars, _ROWS, plan.iteration_s, marks=marks, xlabel=xlabel)
    draw_legend(figure, _COLOURS)
    return figure
