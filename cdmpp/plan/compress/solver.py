"""Compression of each gradient in the timeline of a backward pass (ByteComp, arXiv 2205.14465): options, search, plan.

A backward pass computes its gradients one after the other. Each is exchanged over the network and may be
compressed before: on the GPU, which delays the backward passes that follow, or on the CPU of the host. Replay
gives the time of a strategy. ByteComp leaves out tensors whose exchange is hidden anyway, compresses the most
exposed ones first, and moves compression to the CPU until that becomes the bottleneck. A local search, and branch and
bound with a lower bound, improve its strategy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import combinations, product
from typing import TYPE_CHECKING, Any, cast, get_args

import numpy as np

from cdmpp.errors import FieldError
from cdmpp.plan.base.solve import check_unique
from cdmpp.plan.compress.schema import CompressorForm, CompressPlan, CompressRequest, Span, Stage, Stream, TensorPlan
from cdmpp.predict.requests.budget import SearchControl
from cdmpp.predict.requests.plot import BLUE, GREEN, GREY, YELLOW, Bar, draw_legend, draw_timeline, new_figure
from cdmpp.predict.requests.pricing import cost_of
from cdmpp.simulate.replay import Timeline, replay
from cdmpp.simulate.replay.build import read_link
from cdmpp.simulate.replay.data_parallel import ComputePass, Option, Place, pass_graph
from cdmpp.simulate.replay.engine import walk
from cdmpp.simulate.replay.forms import LinkForm
from cdmpp.simulate.replay.graph import Floats
from cdmpp.simulate.replay.links import Algorithm, Collective, Link, collective_s
from cdmpp.utils.jit import jit
from cdmpp.utils.units import format_latency

if TYPE_CHECKING:
    from matplotlib.figure import Figure


#: Smaller relative changes of an iteration are ignored.
CLOSE = 1e-9


#: Choice of a gradient that is exchanged with the next one.
JOIN = -1
_PLACES: dict[Place, float] = {"none": 0.0, "gpu": 1.0, "cpu": 2.0}


@dataclass(frozen=True)
class Exchanges:
    """Ways to exchange a bucket of any size; an option whose buffer exceeds ``free_bytes`` does not compress."""

    compressors: Sequence[CompressorForm]
    ranks: int
    link: Callable[[Collective], Link]
    algorithm: Algorithm = "ring"
    free_bytes: float = math.inf
    _known: dict[float, tuple[Option, ...]] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, form: LinkForm, ranks: int, algorithm: Algorithm, figure: str = "latency_s", **more: Any) -> Exchanges:
        """From a link; ``figure`` of a predicted one: "latency_s", "lower_s" or "upper_s".

        Raises FieldError: it is predicted for another number of ranks.
        """
        if form.collective is not None and form.collective.ranks != ranks:
            raise FieldError.at(
                "link.collective.ranks",
                f"{form.collective.ranks} ranks, and the request has {ranks}",
                hint="give the same number",
            )
        link = cache(lambda op: read_link(form, "link", op, figure))
        return cls(ranks=ranks, link=link, algorithm=algorithm if form.collective is None else "measured", **more)

    def exchange_s(self, op: Collective, size: float) -> float:
        """Seconds of a collective."""
        link = self.link(op)
        try:
            return collective_s(op, self.ranks, size, link, self.algorithm)
        except FieldError as error:
            raise FieldError.at("link.table", error.message, hint=error.hint) from None

    def least_s(self, size: float) -> float:
        """Least time of the network for any buckets with ``size`` bytes together, compressed or not.

        Between two rows of a table the rate is monotone, so that the best message is a row of the table or the whole.
        """
        sent: list[tuple[Collective, float]] = [("all_reduce", size)]
        sent += [(c.collective, self.buffer_bytes(c, size)) for c in self.compressors]
        # Messages of a ring are shares of the buffer.
        parts = self.ranks if self.algorithm == "ring" else 1
        return min(
            whole / message * self.exchange_s(op, message)
            for op, whole in sent
            for message in (*(row[0] * parts for row in self.link(op).table if row[0] * parts < whole), whole)
        )

    def buffer_bytes(self, compressor: CompressorForm, size: float) -> float:
        """Bytes of a compressed bucket; the buffer of an all-gather has those of all ranks."""
        return size * compressor.ratio * (self.ranks if compressor.collective == "all_gather" else 1)

    def options(self, size: float) -> tuple[Option, ...]:
        """Options of a bucket of so many bytes; the first one does not compress."""
        if size in self._known:
            return self._known[size]
        plain = Option(None, "none", self.exchange_s("all_reduce", size))
        options = [plain]
        for compressor in self.compressors:
            buffer = self.buffer_bytes(compressor, size)
            network_s = self.exchange_s(compressor.collective, buffer)
            places: list[Place] = ["gpu", "cpu"]
            for place, work in zip(places, (compressor.gpu, compressor.cpu), strict=True):
                if work is not None:
                    compress_s = work.overhead_s + work.compress_s_per_byte * size
                    # Each rank decompresses all of the buffer.
                    decompress_s = work.overhead_s + work.decompress_s_per_byte * (buffer / compressor.ratio)
                    option = Option(compressor.name, place, network_s, compress_s, decompress_s)
                    options.append(option if buffer <= self.free_bytes else plain)
        return self._known.setdefault(size, tuple(options))


@dataclass(frozen=True)
class GradientTensor:
    """A gradient; ``options[0]`` does not compress it. Tensors are in the order of the backward pass.

    Without options it is computation alone. With ``exchanges``, it may be exchanged with the next ones.
    """

    name: str
    backward_s: float
    options: tuple[Option, ...]
    bytes: float = 0.0
    exchanges: Exchanges | None = None


Choice = tuple[int, ...]


def passes(tensors: Sequence[GradientTensor], choice: Choice) -> list[ComputePass]:
    """The backward pass with a chosen option for each tensor, or for each group of joined ones."""
    out: list[ComputePass] = []
    size, joined = 0.0, False
    for tensor, k in zip(tensors, choice, strict=True):
        size += tensor.bytes
        if k == JOIN or not tensor.options:
            out.append(ComputePass(tensor.backward_s))
            joined = joined or k == JOIN
        else:
            options = tensor.exchanges.options(size) if joined and tensor.exchanges is not None else tensor.options
            out.append(ComputePass(tensor.backward_s, options[k]))
            size, joined = 0.0, False
    return out


def choices(tensors: Sequence[GradientTensor]) -> list[range]:
    """Choices of each tensor."""
    last = max(i for i, tensor in enumerate(tensors) if tensor.options)
    joins = [tensor.exchanges is not None and bool(tensor.options) for tensor in tensors[:last]]
    joins += [False] * (len(tensors) - last)
    return [range(JOIN if j else 0, max(len(t.options), 1)) for t, j in zip(tensors, joins, strict=True)]


def timeline(tensors: Sequence[GradientTensor], choice: Choice) -> Timeline:
    """Replay the backward pass with a choice of options."""
    return replay(pass_graph(passes(tensors, choice)))


def iteration_s(tensors: Sequence[GradientTensor], choice: Choice) -> float:
    """Makespan of :func:`timeline`, without its nodes."""
    return float(_makespan_s(_rows(passes(tensors, choice))))


def _rows(passes: Sequence[ComputePass]) -> Floats:
    """Seconds, place (-1 no exchange, 0 not compressed, 1 GPU, 2 CPU), exchange, compression, decompression; (n, 5)."""
    rows = [
        (p.seconds, _PLACES[o.place], o.network_s, o.compress_s, o.decompress_s)
        if (o := p.option)
        else (p.seconds, -1.0, 0.0, 0.0, 0.0)
        for p in passes
    ]
    return np.array(rows)


@jit
def _makespan_s(rows: Floats) -> float:
    """Makespan of :func:`pass_graph` from :func:`_rows`: the same nodes, on streams 0 (GPU), 1 (network), 2 (CPU)."""
    nodes = 0
    for i in range(len(rows)):
        nodes += 1 if rows[i, 1] < 0.0 else (2 if rows[i, 1] == 0.0 else 4)
    duration, gap = np.zeros(nodes), np.zeros(nodes)
    waits, stream = np.zeros(nodes, np.int64), np.zeros(nodes, np.int64)
    start, following = np.zeros(nodes + 1, np.int64), np.zeros(2 * nodes, np.int64)
    at = edges = 0
    for i in range(len(rows)):
        compressed, later = rows[i, 1] > 0.0, i + 1 < len(rows)
        size = 1 if rows[i, 1] < 0.0 else (4 if compressed else 2)
        place = 0 if rows[i, 1] == 1.0 else 2
        for k in range(size):
            kind = k if compressed else 2 * k
            duration[at + k] = rows[i, 0 if kind == 0 else (3 if kind == 1 else (2 if kind == 2 else 4))]
            stream[at + k] = 0 if kind == 0 else (1 if kind == 2 else place)
            if k + 1 < size:
                following[edges] = at + k + 1
                waits[at + k + 1] += 1
                edges += 1
            # The next pass follows in the queue of the GPU.
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
    rows = _rows(passes(tensors, choice))
    whole = _makespan_s(rows)
    out: list[int] = []
    for i in range(len(rows)):
        free = rows.copy()
        free[i, 1:] = 0.0
        if rows[i, 1] >= 0.0 and _makespan_s(free) >= whole * (1 - CLOSE):
            out.append(i)
    return out


def bytecomp(
    tensors: Sequence[GradientTensor], may_continue: Callable[[], bool], start: Choice | None = None
) -> Choice:
    """ByteComp: compress exposed tensors on the GPU, largest exchange first; then on the CPU instead."""
    choice: Choice = (0,) * len(tensors) if start is None else start
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
            sent = [i for i, tensor in enumerate(tensors) if choice[i] != JOIN and tensor.options]
            wanted = [i for i in sent if i not in covered or (place == "cpu" and choice[i])]
            for i in sorted(wanted, key=lambda i: (-tensors[i].options[0].network_s, i)):
                at = tensors[i].options[choice[i]].place
                if at != place and may_continue():
                    again = take(i, place) or again
    return choice


def _spent_s(option: Option) -> tuple[float, float, float]:
    """Seconds of the GPU, the CPU and the network."""
    work = option.compress_s + option.decompress_s
    return (work if option.place == "gpu" else 0.0, work if option.place == "cpu" else 0.0, option.network_s)


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
        spent = np.array(
            [[_spent_s(t.options[min(k, len(t.options) - 1)]) for k in range(max_options)] for t in tensors]
        )
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
    groups: Sequence[Choice] = (),
    group_bound_s: float = 0.0,
) -> Incumbent:
    """The shortest iteration.

    Improves the strategies of ByteComp and of :func:`everywhere`, then proves the best one by branch and bound
    where there are few tensors, then improves random changes of it until the search has to stop.

    ``groups``: partitions that it starts from, best first, where tensors may be exchanged together. Then all
    strategies are tried where there are few. ``group_bound_s``: a lower bound for them.
    """
    bound = None if groups else Bound(tensors)
    first = bytecomp(tensors, may_continue, groups[0] if groups else None)
    starts = list(dict.fromkeys([first, *(groups or everywhere(tensors).values())]))
    best = min(starts, key=lambda choice: iteration_s(tensors, choice))
    incumbent = Incumbent(best, iteration_s(tensors, best), first, group_bound_s if bound is None else bound.value())

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
        single = [(i, k) for i, allowed in enumerate(choices(tensors)) for k in allowed if k != choice[i]]
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


#: Most tensors for which a proof is tried, and most strategies with groups that are all tried.
_PROVE, _TRIED = 16, 20_000


def _branch_and_bound(
    tensors: Sequence[GradientTensor],
    bound: Bound | None,
    incumbent: Incumbent,
    offer: Callable[[Choice], None],
    may_continue: Callable[[], bool],
) -> bool:
    """Try every strategy that may be shorter; return whether that was finished."""
    if bound is None:
        every = product(*choices(tensors)) if math.prod(map(len, choices(tensors))) <= _TRIED else ()
        for choice in every:
            if not may_continue():
                return False
            offer(choice)
        return every != ()
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
    other, allowed = list(choice), choices(tensors)
    size = min(len(tensors), int(chance.integers(*_SHAKEN)))
    for i in chance.choice(len(tensors), size=size, replace=False):
        other[i] = int(chance.integers(allowed[i].start, allowed[i].stop))
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
    check_unique([compressor.name for compressor in request.compressors], "compressors")
    check_unique([tensor.name for tensor in request.tensors], "tensors")
    exchanges = Exchanges.of(request.link, request.workers, "ring", compressors=request.compressors)
    return [
        GradientTensor(form.name, cost_of(form.backward).latency_s, exchanges.options(form.bytes))
        for form in request.tensors
    ]


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
                tensor=tensors[int(node.id[:5])].name,
                stage=_STAGES[int(node.id[6])],
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
