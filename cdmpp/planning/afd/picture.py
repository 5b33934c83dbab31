"""AFD sizing as a picture: the three stages beside the goal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cdmpp.planning.afd.size import IN_FLIGHT
from cdmpp.planning.afd.wire import AfdRequest

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(request: AfdRequest, answer: dict[str, Any]) -> Figure:
    """Bars of the stages, with the share of the goal that each may take."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 2.4), layout="constrained")
    axes = figure.subplots()
    stages = answer["stage_s"]
    axes.barh(list(stages), [1e3 * s for s in stages.values()], color=["#4269d0", "#efb118", "#9498a0"])
    axes.axvline(1e3 * request.tpot_s / IN_FLIGHT, color="#ff725c", label="goal: a third of the time a token")
    axes.set_xlabel("time of one micro-batch in all layers (ms)")
    axes.set_title(
        f"{answer['attention_instances']} attention + {answer['ffn_instances']} FFN instances, "
        f"micro-batch {answer['micro_batch']}"
    )
    axes.legend(frameon=False)
    return figure
