"""Latency and memory of whole language models, from the configuration files of Hugging Face."""

from __future__ import annotations

from cdmpp.predict.engines import EngineProfile
from cdmpp.predict.llm.calibrate import calibrate
from cdmpp.predict.llm.config import LLMConfig
from cdmpp.predict.llm.estimate import EstimatePlan, estimate
from cdmpp.predict.llm.estimate_result import LLMEstimate
from cdmpp.predict.llm.layout import Layout
from cdmpp.predict.llm.load import Goodput, goodput, load_curve
from cdmpp.predict.llm.operators import Decode, Prefill, StepPart, step_operators
from cdmpp.predict.llm.read import read_config
from cdmpp.predict.llm.serving import ServingResult, simulate
from cdmpp.predict.llm.training import (
    SearchResult,
    TrainingLayout,
    TrainingPlan,
    TrainingStep,
    calibrate_training,
    search_layouts,
    training_step,
)

__all__ = [
    "Decode",
    "EngineProfile",
    "EstimatePlan",
    "Goodput",
    "LLMConfig",
    "LLMEstimate",
    "Layout",
    "Prefill",
    "SearchResult",
    "ServingResult",
    "StepPart",
    "TrainingLayout",
    "TrainingPlan",
    "TrainingStep",
    "calibrate",
    "calibrate_training",
    "estimate",
    "goodput",
    "load_curve",
    "read_config",
    "search_layouts",
    "simulate",
    "step_operators",
    "training_step",
]
