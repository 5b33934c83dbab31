"""Pipelines of multimodal models (PipeWeaver): different modules, and a mix of modalities that changes by step.

Each module's layers are placed on all ranks in segments, each modality has sub-micro-batches of its own size, and a
tree search orders the segments. A plan is never longer than 1F1B on the same costs.
"""

from cdmpp.planning.multimodal.modules import Module
from cdmpp.planning.multimodal.steps import StepSolution, plan_step, plan_steps

__all__ = ["Module", "StepSolution", "plan_step", "plan_steps"]
