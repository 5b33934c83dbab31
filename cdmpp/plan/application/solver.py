"""Solving an application request: engines from curves, the search, reasons from a replay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from cdmpp.plan.application.schema import ApplicationPlan, ApplicationRequest, BatchPlan, Member, PrimitiveForm
from cdmpp.plan.application.search import (
    Application,
    BatchingEngine,
    BestRuns,
    PolicySearch,
    Primitive,
    PrimitiveBatch,
    Run,
    Tried,
    least_bound_s,
    replay_graph,
)
from cdmpp.predict.requests.budget import SearchControl
from cdmpp.predict.requests.plot import PALETTE, Bar, draw_timeline, new_figure
from cdmpp.predict.requests.pricing import Cost
from cdmpp.simulate.replay import replay
from cdmpp.utils.units import format_latency

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def solve(request: ApplicationRequest, control: SearchControl) -> ApplicationPlan:
    """The policy with the least mean latency within the budget. Raises FieldError: a curve contradicts itself."""
    engines, costs = _engines(request)
    whole, split = _applications(request, engines)
    bound_s = least_bound_s((whole, split), request.arrivals_s)

    def describe(best: BestRuns) -> ApplicationPlan:
        chosen = best.known if request.knows_arrivals else best.online
        run, app = chosen.run, chosen.app
        return ApplicationPlan(
            mean_latency_s=run.mean_s,
            makespan_s=run.makespan_s,
            latency_s=run.latency_s,
            policy=chosen.name,
            online_s=best.online.run.mean_s,
            known_s=best.known.run.mean_s,
            batches=[
                BatchPlan(
                    engine=engines[batch.engine].name,
                    start_s=batch.start_s,
                    end_s=batch.end_s,
                    members=[Member(request=r, primitive=app.primitives[p].id) for r, p in batch.members],
                )
                for batch in run.batches
            ],
            busy=_busy(engines, run),
            baselines={name: baseline.mean_s for name, baseline in best.baselines.items()},
            lower_bound_s=bound_s,
            steps=best.steps,
            explanation=[_arrivals(request, best), *_explain(engines, costs, chosen, request.arrivals_s)],
        )

    seed, max_steps = request.seed, request.max_steps
    learns = not request.knows_arrivals
    return describe(PolicySearch(whole, split, request.arrivals_s, control, seed, max_steps, describe, learns).run())


def figure_of(request: ApplicationRequest, plan: ApplicationPlan) -> float:
    """Mean latency with the batches of a plan, in their order, and the costs of this request."""
    engines, _ = _engines(request)
    ids = {member.primitive for batch in plan.batches for member in batch.members}
    app = next(app for app in _applications(request, engines) if ids <= {p.id for p in app.primitives})
    number = {primitive.id: i for i, primitive in enumerate(app.primitives)}
    names = [engine.name for engine in engines]
    batches = [
        PrimitiveBatch(
            names.index(batch.engine),
            batch.start_s,
            batch.end_s,
            tuple((member.request, number[member.primitive]) for member in batch.members),
        )
        for batch in plan.batches
    ]
    arrivals_s = request.arrivals_s
    end_s = replay(replay_graph(app, Run(batches, plan.latency_s), arrivals_s)).end_s[len(arrivals_s) :]
    last_s = [0.0] * len(arrivals_s)
    for batch, at in zip(batches, end_s.tolist(), strict=True):
        for r, _ in batch.members:
            last_s[r] = max(last_s[r], at)
    return float(np.mean(np.subtract(last_s, arrivals_s)))


def _engines(request: ApplicationRequest) -> tuple[list[BatchingEngine], list[list[Cost]]]:
    """The engines, and the costs at the batch sizes of their curves."""
    engines, costs = [], []
    for i, form in enumerate(request.engines):
        form.curve.check(f"engines.{i}.curve")
        sizes, points = form.curve.points()
        seconds = np.array([cost.latency_s for cost in points])
        engines.append(BatchingEngine(form.name, form.device or form.name, sizes, seconds, form.largest_batch))
        costs.append(points)
    return engines, costs


def _applications(request: ApplicationRequest, engines: Sequence[BatchingEngine]) -> tuple[Application, Application]:
    """The application with whole primitives and with their parts; the same one twice where there are none."""
    primitives = request.sorted_primitives()
    whole, split = (_application(engines, primitives, split=parts) for parts in (False, True))
    same = [p.id for p in split.primitives] == [p.id for p in whole.primitives]
    return whole, whole if same else split


def _application(engines: Sequence[BatchingEngine], forms: Sequence[PrimitiveForm], *, split: bool) -> Application:
    """The graph of primitives, or with ``split`` of their parts."""
    number = {engine.name: i for i, engine in enumerate(engines)}
    last: dict[str, int] = {}  # the last part of each primitive
    primitives: list[Primitive] = []
    for form in forms:
        if split and form.parts is not None:
            parts = [(f"{form.id}#{k}", part.items, {*form.after, *part.after}) for k, part in enumerate(form.parts)]
        else:
            parts = [(form.id, form.items, form.predecessors)]
        for k, (name, items, after) in enumerate(parts):
            before = {last[predecessor] for predecessor in after} | ({len(primitives) - 1} if k else set())
            primitives.append(Primitive(name, number[form.engine], items, tuple(sorted(before))))
        last[form.id] = len(primitives) - 1
    return Application(tuple(engines), tuple(primitives))


def _busy(engines: Sequence[BatchingEngine], run: Run) -> dict[str, float]:
    """Share of the makespan that each device works."""
    busy = {engine.device: 0.0 for engine in engines}
    for batch in run.batches:
        busy[engines[batch.engine].device] += batch.end_s - batch.start_s
    return {device: seconds / (run.makespan_s or 1.0) for device, seconds in busy.items()}


def _arrivals(request: ApplicationRequest, best: BestRuns) -> str:
    """What the engines know of the arrivals, and what that costs."""
    online_s, known_s = best.online.run.mean_s, best.known.run.mean_s
    gap = f"{100 * (online_s / known_s - 1):.1f} %"
    if request.knows_arrivals:
        text = f"the best policy that learns them as they come takes {format_latency(online_s)}, {gap} longer"
        return f"assumed: all arrivals are known in advance; {text} ({best.online.name})"
    text = f"with all of them known in advance the search found {format_latency(known_s)}"
    return f"the engines learn arrivals as they come; {text}: {gap} is the price of not knowing them"


def _explain(
    engines: Sequence[BatchingEngine], costs: Sequence[Sequence[Cost]], chosen: Tried, arrivals_s: Sequence[float]
) -> list[str]:
    """Share of each engine in the critical path of the replayed batches."""
    timeline = replay(replay_graph(chosen.app, chosen.run, arrivals_s))
    seconds = [0.0] * len(engines)
    for i in timeline.critical_path:
        if i >= len(arrivals_s):
            seconds[chosen.run.batches[i - len(arrivals_s)].engine] += float(timeline.duration_s[i])
    lines = []
    for share, e in sorted(((share, e) for e, share in enumerate(seconds) if share), reverse=True):
        largest = costs[e][-1].largest()
        lines.append(
            f"{engines[e].name}: {100 * share / timeline.makespan_s:.0f} % of the time until the last request ends"
            + (f": {largest}" if largest else "")
        )
    return lines


def draw(request: ApplicationRequest, plan: ApplicationPlan) -> Figure:
    """Bars of batches, with the number of primitives in each."""
    names = [engine.name for engine in request.engines]
    figure = new_figure(9, 1.2 + 0.45 * len(names))
    axes = figure.subplots()
    bars = [
        Bar(row, batch.start_s, batch.end_s, PALETTE[row % len(PALETTE)], str(len(batch.members)))
        for batch in plan.batches
        for row in [names.index(batch.engine)]
    ]
    draw_timeline(axes, bars, names, plan.makespan_s)
    axes.set_title(f"{plan.policy}: mean latency {format_latency(plan.mean_latency_s)}; numbers: primitives in a batch")
    return figure
