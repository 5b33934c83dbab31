"""An allocation as a picture: the time of each job with the fewest workers, and with those it gets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cdmpp.planning.cluster.schema import ClusterRequest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_HOUR_S = 3600.0


def draw(request: ClusterRequest, answer: dict[str, Any]) -> Figure:
    """Bars by job; the label says its workers."""
    from matplotlib.figure import Figure

    jobs = answer["jobs"]
    figure = Figure(figsize=(7, 1.2 + 0.3 * len(jobs)), layout="constrained")
    axes = figure.subplots()
    names = [f"{job['name']} ({job['workers']})" for job in jobs]
    axes.barh(names, [job["least_remaining_s"] / _HOUR_S for job in jobs], color="#d7dce3", label="fewest workers")
    axes.barh(
        names, [(job["remaining_s"] or 0.0) / _HOUR_S for job in jobs], height=0.45, color="#4269d0", label="allocated"
    )
    axes.invert_yaxis()
    axes.set_xlabel("remaining time (h)")
    axes.set_title(f"{answer['workers']} workers; {100 * answer['gap']:.2f} % above the bound")
    axes.legend(frameon=False)
    return figure
