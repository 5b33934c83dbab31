"""What people see of a pipeline search, whichever form its request has: several models, or modules of one."""

from __future__ import annotations

from typing import Any

from cdmpp.planning.multimodal.schema import MultimodalRequest


def show(request: Any, answer: dict[str, Any]) -> None:
    """Print the answer."""
    if isinstance(request, MultimodalRequest):
        from cdmpp.planning.multimodal.render import show as say
    else:
        from cdmpp.planning.fused.render import show as say
    say(request, answer)


def draw(request: Any, answer: dict[str, Any]) -> Any:
    """Draw the answer; returns a matplotlib figure."""
    if isinstance(request, MultimodalRequest):
        from cdmpp.planning.multimodal.plot import draw as paint
    else:
        from cdmpp.planning.fused.plot import draw as paint
    return paint(request, answer)
