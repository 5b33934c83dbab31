"""Solving a data-parallel request: buckets of each size and of any partition, baselines, a lower bound, reasons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cdmpp.errors import FieldError
from cdmpp.plan.compress.solver import CLOSE, JOIN, Exchanges, GradientTensor, search
from cdmpp.plan.data_parallel.schema import Choice, DataParallelPlan, DataParallelRequest, Transfer
from cdmpp.predict.requests.budget import SearchControl
from cdmpp.predict.requests.plot import (
    BLUE,
    GREY,
    PALE_GREY,
    YELLOW,
    Bar,
    draw_legend,
    draw_timeline,
    new_figure,
    time_unit,
)
from cdmpp.predict.requests.pricing import Cost, cost_of
from cdmpp.predict.requests.request import Interval
from cdmpp.simulate.replay.data_parallel import (
    COMM,
    PYTORCH_BUCKET_BYTES,
    PYTORCH_FIRST_BUCKET_BYTES,
    Bucket,
    GradientLayer,
    Iteration,
    Setup,
    cut_buckets,
    fill_buckets,
    free_buckets,
    gradients,
    iteration_of,
)
from cdmpp.utils.units import format_latency, format_si

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Most gradients of which all partitions are compared; partitions from which compression starts; replays of its search.
MAX_FREE, MAX_STARTS, MIN_STEPS, MAX_ROWS = 4096, 3, 1000, 200_000


def solve(request: DataParallelRequest, control: SearchControl) -> DataParallelPlan:
    """Replay the iteration at each bucket size, and with any partition of the gradients.

    Raises FieldError: the link is wrong.
    """
    try:
        return _solve(request)
    except FieldError as error:
        raise FieldError(error.message, path=error.path or "link", hint=error.hint) from None


@dataclass(frozen=True)
class Costs:
    """Layers and exchanges of an iteration, at one figure of all predictions."""

    layers: Sequence[GradientLayer]
    exchanges: Exchanges
    update_s: float = 0.0
    compute_slowdown: float = 1.0
    comm_slowdown: float = 1.0

    @classmethod
    def of(cls, request: DataParallelRequest, figure: str) -> Costs:
        """Those of a request."""
        layers = [
            GradientLayer(
                form.name,
                getattr(cost_of(form.forward), figure),
                getattr(cost_of(form.backward), figure),
                tuple(form.gradient_bytes),
            )
            for form in request.layers
        ]
        more = {"compressors": request.compressors, "free_bytes": request.free_bytes}
        exchanges = Exchanges.of(request.link, request.ranks, request.algorithm, figure, **more)
        slowdowns = request.compute_slowdown, request.comm_slowdown
        return cls(layers, exchanges, getattr(cost_of(request.update), figure), *slowdowns)

    @property
    def setup(self) -> Setup:
        """Settings of exchanges without compression."""
        e = self.exchanges
        return Setup(e.ranks, e.link("all_reduce"), e.algorithm, self.compute_slowdown, self.comm_slowdown)

    @property
    def compute_s(self) -> float:
        """Forward, backward and update."""
        return sum(layer.forward_s + layer.backward_s for layer in self.layers) + self.update_s

    def iteration(self, buckets: Sequence[Bucket], options: Sequence[int] | None = None) -> Iteration:
        """An iteration; ``options``: of each bucket, in :meth:`Exchanges.options`."""
        chosen = None
        if options is not None:
            chosen = [self.exchanges.options(b.bytes)[k] for b, k in zip(buckets, options, strict=True)]
        return iteration_of(self.layers, buckets, self.setup, self.update_s, chosen)

    def lower_bound_s(self) -> float:
        """Computation; or, from each gradient on, the fastest way to send it and all later ones."""
        ready_s = sum(layer.forward_s for layer in self.layers)
        remaining = sum(sum(layer.gradient_bytes) for layer in self.layers)
        bound_s = 0.0
        for layer in reversed(self.layers):
            ready_s += layer.backward_s
            if layer.gradient_bytes:
                bound_s = max(bound_s, ready_s + (self.exchanges.least_s(remaining) if remaining > 0 else 0.0))
                remaining -= sum(layer.gradient_bytes)
        return self.update_s + max(bound_s, ready_s)


Strategy = tuple[tuple[Bucket, ...], tuple[int, ...] | None]


def best_buckets(costs: Costs, iterations: Sequence[Iteration]) -> tuple[Strategy, bool]:
    """The buckets with the shortest iteration, and whether no others are shorter.

    ``iterations``: those of other partitions, without compression. Without compressors and slowdowns the result is
    exact. With compressors, options and partition are searched together, from the best partitions without compression.
    """
    count = len(gradients(costs.layers))
    exact = 0 < count <= MAX_FREE and costs.compute_slowdown == costs.comm_slowdown == 1.0
    tried = [*iterations, *([costs.iteration(free_buckets(costs.layers, costs.setup))] if count <= MAX_FREE else [])]
    tried.sort(key=lambda iteration: iteration.iteration_s)
    if not costs.exchanges.compressors or not count:
        return (tried[0].buckets, None), exact
    tensors: list[GradientTensor] = []
    for layer in reversed(costs.layers):
        if not layer.gradient_bytes:
            tensors.append(GradientTensor(layer.name, layer.backward_s, ()))
        for i, size in enumerate(reversed(layer.gradient_bytes)):
            options, backward_s = costs.exchanges.options(size), 0.0 if i else layer.backward_s
            tensors.append(GradientTensor(layer.name, backward_s, options, size, costs.exchanges))
    groups = []
    for iteration in tried[:MAX_STARTS]:
        ends = {bucket.parameters[-1] for bucket in iteration.buckets}
        sent = iter([0 if (layer, i) in ends else JOIN for layer, i, _ in gradients(costs.layers)])
        groups.append(tuple(next(sent) if tensor.options else 0 for tensor in tensors))
    steps = iter(range(max(MIN_STEPS, MAX_ROWS // len(tensors))))
    bound_s = costs.lower_bound_s() - costs.update_s - sum(layer.forward_s for layer in costs.layers)
    found = search(tensors, lambda: next(steps, None) is not None, groups=groups, group_bound_s=bound_s)
    chosen = [k for tensor, k in zip(tensors, found.choice, strict=True) if tensor.options]
    cuts = [i for i, k in enumerate(chosen, 1) if k != JOIN]
    return (cut_buckets(costs.layers, cuts), tuple(k for k in chosen if k != JOIN)), found.proven


def _solve(request: DataParallelRequest) -> DataParallelPlan:
    costs = Costs.of(request, "latency_s")
    named = {
        "one_bucket": (sum(sum(layer.gradient_bytes) for layer in costs.layers), None),
        "bucket_per_gradient": (0.0, None),
        "pytorch_default": (PYTORCH_BUCKET_BYTES, PYTORCH_FIRST_BUCKET_BYTES),
    }
    tried = [(size, request.first_bucket_bytes) for size in request.tried_bytes]
    distinct = list(dict.fromkeys([*tried, *named.values()]))
    sizes: list[tuple[float | None, float | None]] = [*distinct]
    strategies: list[Strategy] = [(fill_buckets(costs.layers, *size), None) for size in distinct]
    iterations = [costs.iteration(*strategy) for strategy in strategies]
    number = min(range(len(sizes)), key=lambda i: (iterations[i].iteration_s, i))
    baselines = {name: iterations[sizes.index(size)].iteration_s for name, size in named.items()}
    free, optimal = best_buckets(costs, iterations)
    iteration = costs.iteration(*free)
    if iteration.iteration_s < iterations[number].iteration_s * (1 - CLOSE):
        baselines["best_bucket_size"] = iterations[number].iteration_s
        number = len(sizes)
        sizes, strategies, iterations = [*sizes, (None, None)], [*strategies, free], [*iterations, iteration]
    best = iterations[number]
    sent_s = sum(costs.setup.transfer_s(bucket.bytes) for bucket in best.buckets)
    interval = None
    if any(cost.parts for cost in _costs(request)) or request.link.collective is not None:
        ends = [Costs.of(request, bound) for bound in ("lower_s", "upper_s")]
        lower_s, upper_s = (costs.iteration(*strategies[number]).iteration_s for costs in ends)
        interval = Interval(lower_s=lower_s, upper_s=upper_s)
    return DataParallelPlan(
        iteration_s=best.iteration_s,
        interval=interval,
        bucket_bytes=sizes[number][0],
        first_bucket_bytes=sizes[number][1],
        compute_s=costs.compute_s,
        exposed_comm_s=best.exposed_comm_s,
        choices=[
            Choice(
                bucket_bytes=size,
                first_bucket_bytes=first,
                buckets=len(iteration.buckets),
                iteration_s=iteration.iteration_s,
                comm_s=iteration.comm_s,
                exposed_comm_s=iteration.exposed_comm_s,
            )
            for (size, first), iteration in zip(sizes, iterations, strict=True)
        ],
        transfers=transfers(costs.layers, best),
        lower_bound_s=costs.lower_bound_s(),
        baselines={"no_overlap": costs.compute_s + sent_s, **baselines},
        explanation=_explain(request, best, costs.compute_s, optimal),
    )


def _costs(request: DataParallelRequest) -> list[Cost]:
    fields = [field for layer in request.layers for field in (layer.forward, layer.backward)]
    return [cost_of(field) for field in (*fields, request.update)]


def transfers(layers: Sequence[GradientLayer], iteration: Iteration) -> list[Transfer]:
    """The exchanges of an iteration. A compressed bucket is ready when it is compressed."""
    timeline, out = iteration.timeline, []
    ends = {node.id: end_s for node, end_s in zip(timeline.graph.nodes, timeline.end_s.tolist(), strict=True)}
    sent = [i for i, node in enumerate(timeline.graph.nodes) if node.stream == COMM]
    for bucket, option, i in zip(iteration.buckets, iteration.options, sent, strict=True):
        out.append(
            Transfer(
                bytes=bucket.bytes,
                gradients=len(bucket.parameters),
                first_layer=layers[bucket.parameters[0][0]].name,
                last_layer=layers[bucket.ready].name,
                ready_s=ends[timeline.graph.nodes[i].deps[0]],
                start_s=float(timeline.start_s[i]),
                end_s=float(timeline.end_s[i]),
                compressor=option.compressor,
                place=option.place,
            )
        )
    return out


def _explain(request: DataParallelRequest, best: Iteration, compute_s: float, optimal: bool) -> list[str]:
    iteration_s = best.iteration_s or 1.0
    lines = [
        f"{100 * compute_s / iteration_s:.0f} % of the iteration is computation ({format_latency(compute_s)}); "
        f"all-reduces take {format_latency(best.comm_s)}, of which {format_latency(best.exposed_comm_s)} are exposed"
    ]
    if best.buckets and best.exposed_comm_s > 0:
        last = best.buckets[-1]
        lines.append(
            f"the last of {len(best.buckets)} all-reduces has {format_si(last.bytes, 'B')} and waits for "
            f"the gradients of {request.layers[last.ready].name}"
        )
    if optimal:
        lines.append("no partition of the gradients into consecutive buckets is shorter")
    costs = [(layer.name, cost_of(layer.forward), cost_of(layer.backward)) for layer in request.layers]
    for name, forward, backward in sorted(costs, key=lambda row: -(row[1].latency_s + row[2].latency_s))[:3]:
        both_s = forward.latency_s + backward.latency_s
        if both_s <= 0:
            break
        longest = max((forward, backward), key=lambda cost: cost.latency_s)
        programs = f": {longest.largest()}" if longest.parts else ""
        lines.append(f"layer {name} takes {format_latency(both_s)}, {100 * both_s / iteration_s:.0f} %{programs}")
    return lines


def draw(request: DataParallelRequest, plan: DataParallelPlan) -> Figure:
    """Left the iteration by bucket size with its exposed communication, right the all-reduces over time."""
    figure = new_figure(10, 4)
    left, right = figure.subplots(1, 2)
    _draw_choices(left, plan)
    left.set_title(f"{request.ranks} ranks")
    bars = [
        bar
        for row, sent in enumerate(plan.transfers)
        for bar in (Bar(row, sent.ready_s, sent.start_s, PALE_GREY), Bar(row, sent.start_s, sent.end_s, YELLOW))
    ]
    marks = {"end of computation": plan.compute_s, "end of the iteration": plan.iteration_s}
    rows = [str(row) for row in range(len(plan.transfers))]
    draw_timeline(right, bars, rows, plan.iteration_s, marks=marks, xlabel="time since the start")
    right.set_ylabel("all-reduce")
    draw_legend(figure, {"computation": BLUE, "all-reduce": YELLOW, "all-reduce waits": PALE_GREY})
    return figure


def _draw_choices(axes: Axes, plan: DataParallelPlan) -> None:
    factor, unit = time_unit(max(choice.iteration_s for choice in plan.choices))
    names = [str(choice).replace(", ", "\n").replace(" p", "\np") for choice in plan.choices]
    exposed = [factor * choice.exposed_comm_s for choice in plan.choices]
    rest = [factor * choice.iteration_s - e for choice, e in zip(plan.choices, exposed, strict=True)]
    axes.bar(names, rest, color=BLUE)
    axes.bar(names, exposed, bottom=rest, color=YELLOW)
    axes.axhline(factor * plan.lower_bound_s, color="0.3", linestyle="--", label="lower bound")
    axes.axhline(factor * plan.baselines["no_overlap"], color=GREY, linestyle=":", label="no overlap")
    axes.set_xlabel("bucket size; yellow: exposed")
    axes.tick_params(axis="x", labelsize=7)
    axes.set_ylabel(f"iteration ({unit})")
