"""Plot of an allocation: remaining time of each job, with its smallest count and with its workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cdmpp.plan.cluster.schema import ClusterPlan, ClusterRequest
from cdmpp.predict.requests.plot import BLUE, PALE_GREY, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_HOUR_S = 3600.0


def draw(request: ClusterRequest, plan: ClusterPlan) -> Figure:
    """Two bars for each job; the label has its number of workers."""
    figure = new_figure(7, 1.2 + 0.3 * len(plan.jobs))
    axes = figure.subplots()
    names = [f"{job.name} ({job.workers})" for job in plan.jobs]
    least = [job.least_remaining_s / _HOUR_S for job in plan.jobs]
    allocated = [(job.remaining_s or 0.0) / _HOUR_S for job in plan.jobs]
    axes.barh(names, least, color=PALE_GREY, label="smallest number of workers")
    axes.barh(names, allocated, height=0.45, color=BLUE, label="allocated workers")
    axes.invert_yaxis()
    axes.set_xlabel("remaining time (h)")
    axes.set_title(f"{plan.workers} workers; {100 * plan.gap:.2f} % above the lower bound")
    axes.legend(frameon=False)
    return figure
