"""Training steps of language models."""

from __future__ import annotations

from cdmpp.predict.llm.training.layout import TrainingLayout
from cdmpp.predict.llm.training.step import TrainingPlan, TrainingStep, training_step

__all__ = ["TrainingLayout", "TrainingPlan", "TrainingStep", "training_step"]
