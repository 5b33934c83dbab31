"""Text and plots of multimodal pipelines; removed when they have typed plans."""

from cdmpp.planning.multimodal.plot import draw
from cdmpp.planning.multimodal.render import show

__all__ = ["draw", "show"]
