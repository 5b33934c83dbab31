"""Plot of an AFD plan: the time of each stage against the goal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cdmpp.plan.afd.schema import AfdPlan, AfdRequest
from cdmpp.plan.afd.size import IN_FLIGHT

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(request: AfdRequest, plan: AfdPlan) -> Figure:
    """Bars of the stages, with the share of the goal that each may take."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 2.4), layout="constrained")
    axes = figure.subplots()
    milliseconds = [1e3 * seconds for seconds in plan.stage_s.values()]
    axes.barh(list(plan.stage_s), milliseconds, color=["#4269d0", "#efb118", "#9498a0"])
    axes.axvline(1e3 * request.tpot_s / IN_FLIGHT, color="#ff725c", label="goal: a third of the time per token")
    axes.set_xlabel("time of one micro-batch in all layers (ms)")
    axes.set_title(
        f"{plan.attention_instances} attention + {plan.ffn_instances} FFN instances, micro-batch {plan.micro_batch}"
    )
    axes.legend(frameon=False)
    return figure
