"""Training steps of language models: duration, memory, calibration and search of layouts."""

from __future__ import annotations

from cdmpp.llm.training.calibrate import calibrate_training, fit_training
from cdmpp.llm.training.layout import TrainingLayout
from cdmpp.llm.training.result import LayoutSearch, TrainingStep
from cdmpp.llm.training.search import search_layouts
from cdmpp.llm.training.step import TrainingPlan, training_step

__all__ = [
    "LayoutSearch",
    "TrainingLayout",
    "TrainingPlan",
    "TrainingStep",
    "calibrate_training",
    "fit_training",
    "search_layouts",
    "training_step",
]
