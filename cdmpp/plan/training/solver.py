"""Solving a training request: every layout is priced, and the gradients of the fastest are divided into buckets.

A step is that of :func:`cdmpp.llm.training_step`, which was compared with measured ones. Its exchange of gradients is
one message behind the last backward pass. The timeline of buckets says how much more, or less, other buckets expose
than those of the engine; the exposed part of the step changes by this ratio.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from cdmpp.llm.forms import LayoutRow, MemoryRow
from cdmpp.llm.training.gradients import GradientPlan
from cdmpp.llm.training.memory import RECOMMENDED
from cdmpp.llm.training.result import TrainingStep, binding
from cdmpp.plan.compress.solver import Exchanges
from cdmpp.plan.data_parallel.schema import Transfer
from cdmpp.plan.data_parallel.solver import Costs, best_buckets, transfers
from cdmpp.plan.training.schema import Alternative, TrainingRequest, TrainingStepPlan
from cdmpp.predict.requests.budget import SearchControl
from cdmpp.predict.requests.plot import colours_of, draw_legend, new_figure, time_unit
from cdmpp.predict.requests.request import Interval
from cdmpp.simulate.replay.data_parallel import (
    PYTORCH_BUCKET_BYTES,
    PYTORCH_FIRST_BUCKET_BYTES,
    GradientLayer,
    fill_buckets,
)
from cdmpp.simulate.replay.links import Link
from cdmpp.utils.units import format_latency

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Layouts whose buckets are searched, and other layouts in the plan.
MAX_SEARCHED, MAX_SHOWN = 20, 5
#: Parameters of a bucket of Megatron-LM: at least the first, and the second for each copy.
_MEGATRON_PARAMETERS, _MEGATRON_PARAMETERS_PER_COPY = 40e6, 1e6


@dataclass(frozen=True)
class Bucketed:
    """A priced layout. ``saved_s``: what its buckets save of the step, and what PyTorch's default buckets save."""

    plan: GradientPlan
    step: TrainingStep
    buckets: Sequence[Transfer] = ()
    saved_s: float = 0.0
    pytorch_saved_s: float | None = None

    @property
    def step_s(self) -> float:
        """Seconds of the step with its buckets."""
        return self.step.step_s - self.saved_s

    @property
    def bound_s(self) -> float:
        """The step if no exchange of gradients were exposed."""
        return self.step.step_s - (self.plan.exposed_dp_s[True] if self.plan.has_buckets else 0.0)

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of its parts."""
        parts = self.step.parts
        return {name: s - self.saved_s * (name == "dp communication") for name, s in parts.items()}

    def with_buckets(self, request: TrainingRequest) -> Bucketed:
        """The layout with its best buckets."""
        plan, memory = self.plan, self.plan.memory
        layers = [GradientLayer(name, 0.0, s, (size,) if size else ()) for name, s, size in plan.backward_layers()]
        link = cache(lambda op: Link(table=plan.exchange_table(plan.reduction if op == "all_reduce" else op)))
        compressors = request.compressors if plan.layout.sharding == "none" else []
        free_bytes = float("inf") if memory.device is None else memory.device - memory.total
        ranks = plan.layout.dp * plan.layout.cp
        costs = Costs(layers, Exchanges(compressors, ranks, link, "measured", free_bytes))
        parameters = max(_MEGATRON_PARAMETERS, _MEGATRON_PARAMETERS_PER_COPY * ranks)
        pytorch = fill_buckets(layers, PYTORCH_BUCKET_BYTES, PYTORCH_FIRST_BUCKET_BYTES)
        megatron = fill_buckets(layers, parameters * plan.loop.gradient_bytes)
        engine = megatron if plan.engine.name.startswith("megatron") else pytorch
        sizes = [engine, pytorch, *(fill_buckets(layers, size) for size in request.bucket_bytes or ())]
        iterations = [costs.iteration(buckets) for buckets in sizes]
        if request.bucket_bytes is None:
            best = costs.iteration(*best_buckets(costs, iterations)[0])
        else:
            best = min(iterations, key=lambda iteration: iteration.iteration_s)
        own_s, pytorch_s = iterations[0].iteration_s, iterations[1].iteration_s
        share = plan.exposed_dp_s[True] / max(own_s - costs.compute_s, plan.exposed_dp_s[True])
        saved_s = share * (own_s - best.iteration_s)
        return Bucketed(plan, self.step, transfers(layers, best), saved_s, share * (own_s - pytorch_s))


def solve(request: TrainingRequest, control: SearchControl) -> TrainingStepPlan:
    """Price all layouts, and search the buckets of those that may be the fastest."""
    rows = [Bucketed(plan, step) for plan, step in request.steps()]
    order = sorted(range(len(rows)), key=lambda i: rows[i].step_s)
    best = order[0]
    for i in order[:MAX_SEARCHED]:
        expired = control.expired and i != order[0]
        if rows[i].plan.has_buckets and rows[i].bound_s < rows[best].step_s and not expired:
            rows[i] = rows[i].with_buckets(request)
            best = min(best, i, key=lambda k: rows[k].step_s)
    return _plan(request, rows, best)


def _plan(request: TrainingRequest, rows: Sequence[Bucketed], best: int) -> TrainingStepPlan:
    row, layouts = rows[best], request.layouts
    step, ratio = row.step, row.step_s / row.step.step_s
    baselines = {name: rows[i].step_s for name, i in layouts.baselines.items()}
    if row.pytorch_saved_s is not None:
        baselines["buckets_of_the_engine"] = step.step_s
        baselines["buckets_of_pytorch"] = step.step_s - row.pytorch_saved_s
    fastest: dict[tuple[Any, ...], Bucketed] = {}
    for other in (row, *sorted(rows, key=lambda other: other.step_s)):
        fastest.setdefault(attrgetter("tp", "pp", "cp", "ep", "sharding")(other.plan.layout), other)
    others = list(fastest.values())[1 : 1 + MAX_SHOWN]
    parts, peak = row.parts, step.model_flops_utilization
    exposed_s = sum(seconds for name, seconds in parts.items() if name.endswith(" communication"))
    bound_s = min(other.bound_s for other in rows)
    return TrainingStepPlan(
        step_s=row.step_s,
        interval=Interval(lower_s=ratio * step.lower_s, upper_s=ratio * step.upper_s),
        step_domain=step.domain,
        domain_reason=step.domain_reason,
        layout=LayoutRow.of(step),
        tokens_per_s_per_gpu=step.tokens_per_s_per_gpu / ratio,
        model_flops_utilization=None if peak is None else peak / ratio,
        memory=MemoryRow.of(step.memory),
        breakdown=parts,
        buckets=list(row.buckets),
        exposed_comm_s=exposed_s,
        fitting=layouts.plans.fitting,
        priced=len(rows),
        alternatives=[
            Alternative(
                layout=LayoutRow.of(other.step),
                step_s=other.step_s,
                memory=MemoryRow.of(other.step.memory),
                breakdown=other.parts,
                binds=binding(other.step),
            )
            for other in others
        ],
        lower_bound_s=min(bound_s, row.step_s),
        baselines=baselines,
        explanation=_explain(row, layouts.plans.fitting, len(rows), exposed_s),
        remarks=[*step.remarks, _remark(row), *(f"baseline {name}: no layout fits" for name in layouts.missing)],
    )


def _explain(row: Bucketed, fitting: int, priced: int, exposed_s: float) -> list[str]:
    lines = [
        f"{fitting:,} layouts fit the memory, {priced:,} were priced; largest part beside computation: "
        f"{binding(row.step).replace('computation', 'below 5 %')}",
        f"{100 * exposed_s / row.step_s:.0f} % of the step is communication that nothing hides",
    ]
    if row.saved_s > 0:
        lines.append(f"its buckets of gradients are {format_latency(row.saved_s)} faster than the engine's own")
    return [*lines, f"domain {row.step.domain}: {row.step.domain_reason}"]


def _remark(row: Bucketed) -> str:
    """What the price of the exchange of gradients leaves out."""
    if row.buckets:
        return "buckets have the gradients of whole layers, of the stage with most parameters"
    layout = row.plan.layout
    why = "there is one copy" if layout.dp * layout.cp == 1 else "overlap is none"
    return f"buckets were not searched: {'fsdp exchanges each layer' if layout.sharding == 'fsdp' else why}"


_COLOURS = ("computation", "recomputation", "communication", "bubble", "optimizer", "host")


def draw(request: TrainingRequest, plan: TrainingStepPlan) -> Figure:
    """Left the parts of the step of each layout, right the memory of its fullest rank; the plan is at the top."""
    rows = [plan, *plan.alternatives]
    figure = new_figure(11, 1.2 + 0.5 * len(rows))
    left, right = figure.subplots(1, 2, sharey=True)
    factor, unit = time_unit(max(row.step_s for row in rows))
    kept = ("weights", "gradients", "optimizer", "activations")
    colours = colours_of([*_COLOURS, *(f"{name} (memory)" for name in kept)])
    for y, row in enumerate(rows):
        seconds = dict.fromkeys(_COLOURS, 0.0)
        for name, part_s in row.breakdown.items():
            kind = "communication" if name.endswith(" communication") else name
            seconds[kind if kind in seconds else "computation"] += factor * part_s
        for axes, parts in ((left, seconds), (right, {n: getattr(row.memory, n) / 1e9 for n in kept})):
            start = 0.0
            for name, length in parts.items():
                colour = colours[name if axes is left else f"{name} (memory)"]
                axes.barh(y, length, left=start, color=colour)
                start += length
    left.set_yticks(range(len(rows)), [str(row.layout).replace(", micro", "\nmicro") for row in rows], fontsize=7)
    left.invert_yaxis()
    left.set_xlabel(f"step ({unit})")
    right.set_xlabel("memory of the fullest rank (GB)")
    if plan.memory.limit is not None:
        right.axvline(RECOMMENDED * plan.memory.limit / 1e9, color="0.2", linestyle="--", label="limit")
    draw_legend(figure, colours)
    return figure
