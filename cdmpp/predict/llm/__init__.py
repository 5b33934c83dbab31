"""Latency and memory of whole language models, from the configuration files of Hugging Face."""

from __future__ import annotations

from cdmpp.predict.engines import EngineProfile
from cdmpp.predict.llm.calibrate import calibrate
from cdmpp.predict.llm.config import LLMConfig
from cdmpp.predict.llm.estimate import EstimatePlan, LLMEstimate, estimate
from cdmpp.predict.llm.layout import Layout
from cdmpp.predict.llm.load import Goodput, goodput, load_curve
from cdmpp.predict.llm.operators import Decode, Prefill, StepPart, step_operators
from cdmpp.predict.llm.read import read_config
from cdmpp.predict.llm.serving import ServingResult, simulate

__all__ = [
    "Decode",
    "EngineProfile",
    "EstimatePlan",
    "Goodput",
    "LLMConfig",
    "LLMEstimate",
    "Layout",
    "Prefill",
    "ServingResult",
    "StepPart",
    "calibrate",
    "estimate",
    "goodput",
    "load_curve",
    "read_config",
    "simulate",
    "step_operators",
]
