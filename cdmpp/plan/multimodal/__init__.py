"""Pipelines of multimodal models (PipeWeaver): different modules, and a mix of modalities that changes by step.

The search chooses cuts of the layers, segments, the number of sub-micro-batches of each module, and the order. A plan
is never longer than 1F1B on the same costs. Its lower bound holds for every plan that the request allows.
"""

from cdmpp.plan.multimodal.modules import Module
from cdmpp.plan.multimodal.planner import StepSolution, plan_steps

__all__ = ["Module", "StepSolution", "plan_steps"]
