"""Training steps of language models: duration, memory, calibration and search of layouts."""

from __future__ import annotations

from cdmpp.predict.llm.training.calibrate import calibrate_training, fit_training
from cdmpp.predict.llm.training.layout import TrainingLayout
from cdmpp.predict.llm.training.result import SearchResult, TrainingStep
from cdmpp.predict.llm.training.search import search_layouts
from cdmpp.predict.llm.training.step import TrainingPlan, training_step

__all__ = [
    "SearchResult",
    "TrainingLayout",
    "TrainingPlan",
    "TrainingStep",
    "calibrate_training",
    "fit_training",
    "search_layouts",
    "training_step",
]
