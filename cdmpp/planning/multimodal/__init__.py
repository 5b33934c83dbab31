"""Pipelines of multimodal models (PipeWeaver): unlike modules, a mix of modalities that changes by step.

Each module's layers are spread over all ranks in segments, each modality has sub-micro-batches of its own
size, and a tree search orders the segments; never worse than 1F1B on the same costs.
"""

from cdmpp.planning.multimodal.modules import Module
from cdmpp.planning.multimodal.plan import Plan, plan_step, plan_steps

__all__ = ["Module", "Plan", "plan_step", "plan_steps"]
