"""Text and plots of both forms of a pipeline plan: several models, or the modules of one model."""

from __future__ import annotations

from typing import Any

from cdmpp.planning.multimodal.schema import MultimodalRequest


def show(request: Any, answer: dict[str, Any]) -> None:
    """Print a plan."""
    from cdmpp.planning.multimodal.render import show

    show(request, answer)


def draw(request: Any, plan: Any) -> Any:
    """Plot a plan as a matplotlib figure."""
    if isinstance(request, MultimodalRequest):
        from cdmpp.planning.multimodal.plot import draw as draw_multimodal

        return draw_multimodal(request, plan)
    from cdmpp.planning.fused.view import draw as draw_fused

    return draw_fused(request, plan)
