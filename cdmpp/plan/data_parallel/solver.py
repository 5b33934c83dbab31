"""Solving a data-parallel request: the iteration at each bucket size, baselines, a lower bound, reasons."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cdmpp.errors import FieldError
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
from cdmpp.simulate.replay.build import read_link
from cdmpp.simulate.replay.data_parallel import (
    COMM,
    PYTORCH_BUCKET_BYTES,
    PYTORCH_FIRST_BUCKET_BYTES,
    GradientLayer,
    Iteration,
    Setup,
    simulate,
)
from cdmpp.utils.units import format_latency, format_si

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def solve(request: DataParallelRequest, control: SearchControl) -> DataParallelPlan:
    """Replay the iteration at each bucket size.

    Raises
    ------
    FieldError
        The link is wrong.
    """
    try:
        return _solve(request)
    except FieldError as error:
        raise FieldError(error.message, path=error.path or "link", hint=error.hint) from None


def _solve(request: DataParallelRequest) -> DataParallelPlan:
    layers, update_s = _layers(request, "latency_s"), cost_of(request.update).latency_s
    setup = _setup(request, "latency_s")
    named = {
        "one_bucket": (sum(sum(layer.gradient_bytes) for layer in layers), None),
        "bucket_per_gradient": (0.0, None),
        "pytorch_default": (PYTORCH_BUCKET_BYTES, PYTORCH_FIRST_BUCKET_BYTES),
    }
    tried = [(size, request.first_bucket_bytes) for size in request.tried_bytes]
    sizes = list(dict.fromkeys([*tried, *named.values()]))
    iterations = [simulate(layers, setup, *size, update_s) for size in sizes]
    number = min(range(len(sizes)), key=lambda i: (iterations[i].iteration_s, i))
    best, compute_s = iterations[number], sum(layer.forward_s + layer.backward_s for layer in layers) + update_s
    baselines = {
        "no_overlap": compute_s + sum(setup.transfer_s(bucket.bytes) for bucket in best.buckets),
        **{name: iterations[sizes.index(size)].iteration_s for name, size in named.items()},
    }
    interval = None
    if any(cost.parts for cost in _costs(request)) or request.link.collective is not None:
        lower_s, upper_s = (
            simulate(
                _layers(request, bound), _setup(request, bound), *sizes[number], getattr(cost_of(request.update), bound)
            ).iteration_s
            for bound in ("lower_s", "upper_s")
        )
        interval = Interval(lower_s=lower_s, upper_s=upper_s)
    return DataParallelPlan(
        iteration_s=best.iteration_s,
        interval=interval,
        bucket_bytes=sizes[number][0],
        first_bucket_bytes=sizes[number][1],
        compute_s=compute_s,
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
        transfers=_transfers(layers, best),
        lower_bound_s=_lower_bound_s(layers, setup, update_s),
        baselines=baselines,
        explanation=_explain(request, best, compute_s),
    )


def _setup(request: DataParallelRequest, figure: str) -> Setup:
    """Ranks, link and slowdowns; ``figure`` of a predicted link: "latency_s", "lower_s" or "upper_s"."""
    collective = request.link.collective
    if collective is not None and collective.ranks != request.ranks:
        raise FieldError.at(
            "link.collective.ranks",
            f"{collective.ranks} ranks, and the request has {request.ranks}",
            hint="give the same number",
        )
    return Setup(
        request.ranks,
        read_link(request.link, "link", "all_reduce", figure),
        request.algorithm if collective is None else "measured",
        request.compute_slowdown,
        request.comm_slowdown,
    )


def _costs(request: DataParallelRequest) -> list[Cost]:
    fields = [field for layer in request.layers for field in (layer.forward, layer.backward)]
    return [cost_of(field) for field in (*fields, request.update)]


def _layers(request: DataParallelRequest, figure: str) -> list[GradientLayer]:
    """The layers with one figure of their costs: "latency_s", "lower_s" or "upper_s"."""
    return [
        GradientLayer(
            form.name,
            getattr(cost_of(form.forward), figure),
            getattr(cost_of(form.backward), figure),
            tuple(form.gradient_bytes),
        )
        for form in request.layers
    ]


def _lower_bound_s(layers: Sequence[GradientLayer], setup: Setup, update_s: float) -> float:
    """Computation; or, from each gradient on, the fastest way to send it and all later ones."""
    ready_s = sum(layer.forward_s for layer in layers)
    remaining = sum(sum(layer.gradient_bytes) for layer in layers)
    bound_s = 0.0
    for layer in reversed(layers):
        ready_s += layer.backward_s
        if layer.gradient_bytes:
            bound_s = max(bound_s, ready_s + _least_s(setup, remaining))
            remaining -= sum(layer.gradient_bytes)
    return update_s + max(bound_s, ready_s)


def _least_s(setup: Setup, size: float) -> float:
    """Least time of any messages with ``size`` bytes together: messages of the size with the highest rate.

    Between two rows of a table the rate is monotone, so that the best size is a row of the table or the whole.
    """
    if size <= 0:
        return 0.0
    parts = 1 if setup.algorithm != "ring" else setup.ranks  # messages of a ring are shares of the buffer
    rows = [row[0] * parts for row in setup.link.table]
    return min(size / message * setup.transfer_s(message) for message in (*(r for r in rows if r < size), size))


def _transfers(layers: Sequence[GradientLayer], best: Iteration) -> list[Transfer]:
    timeline = best.timeline
    ends = timeline.end_s.tolist()
    sent = [i for i, node in enumerate(timeline.graph.nodes) if node.stream == COMM]
    return [
        Transfer(
            bytes=bucket.bytes,
            gradients=len(bucket.parameters),
            first_layer=layers[bucket.parameters[0][0]].name,
            last_layer=layers[bucket.ready].name,
            ready_s=ends[2 * len(layers) - 1 - bucket.ready],
            start_s=float(timeline.start_s[i]),
            end_s=ends[i],
        )
        for bucket, i in zip(best.buckets, sent, strict=True)
    ]


def _explain(request: DataParallelRequest, best: Iteration, compute_s: float) -> list[str]:
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
    names = [str(choice).replace(",", "\n") for choice in plan.choices]
    exposed = [factor * choice.exposed_comm_s for choice in plan.choices]
    rest = [factor * choice.iteration_s - e for choice, e in zip(plan.choices, exposed, strict=True)]
    axes.bar(names, rest, color=BLUE)
    axes.bar(names, exposed, bottom=rest, color=YELLOW)
    axes.axhline(factor * plan.lower_bound_s, color="0.3", linestyle="--", label="lower bound")
    axes.axhline(factor * plan.baselines["no_overlap"], color=GREY, linestyle=":", label="no overlap")
    axes.set_xlabel("bucket size; yellow: exposed")
    axes.set_ylabel(f"iteration ({unit})")
