"""Plot of an application's plan: its batches over time, one row for each engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cdmpp.plan.application.schema import ApplicationPlan, ApplicationRequest
from cdmpp.predict.requests.plot import PALETTE, Bar, draw_timeline, new_figure
from cdmpp.utils.units import format_latency

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(request: ApplicationRequest, plan: ApplicationPlan) -> Figure:
    """Bars of batches, with the number of primitives in each."""
    names = [engine.name for engine in request.engines]
    rows = {name: i for i, name in enumerate(names)}
    figure = new_figure(9, 1.2 + 0.45 * len(names))
    axes = figure.subplots()
    bars = [
        Bar(row, batch.start_s, batch.end_s, PALETTE[row % len(PALETTE)], str(len(batch.members)))
        for batch in plan.batches
        for row in [rows[batch.engine]]
    ]
    draw_timeline(axes, bars, names, plan.makespan_s)
    axes.set_title(f"{plan.policy}: mean latency {format_latency(plan.mean_latency_s)}; numbers: primitives in a batch")
    return figure
