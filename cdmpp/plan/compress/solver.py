"""Solving a compression request: options of each tensor, the search within its budget, baselines, reasons."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, cast, get_args

from cdmpp.errors import FieldError
from cdmpp.plan.base.solve import check_unique
from cdmpp.plan.compress.schema import CompressPlan, CompressRequest, Span, Stage, Stream, TensorPlan
from cdmpp.plan.compress.strategy import (
    GradientTensor,
    Incumbent,
    Option,
    Place,
    everywhere,
    hidden,
    iteration_s,
    search,
    timeline,
)
from cdmpp.predict.requests.budget import SearchControl
from cdmpp.predict.requests.plot import BLUE, GREEN, GREY, YELLOW, Bar, draw_legend, draw_timeline, new_figure
from cdmpp.predict.requests.pricing import cost_of
from cdmpp.simulate.replay.build import read_link
from cdmpp.simulate.replay.links import Algorithm, Collective, Link, collective_s
from cdmpp.utils.units import format_latency

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_STAGES: tuple[Stage, ...] = get_args(Stage)


def solve(request: CompressRequest, control: SearchControl) -> CompressPlan:
    """The strategy with the shortest iteration within the budget.

    Raises
    ------
    FieldError
        As :func:`tensors_of`.
    """
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

    Raises
    ------
    FieldError
        Two compressors or tensors with one name, or a link without figures.
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
