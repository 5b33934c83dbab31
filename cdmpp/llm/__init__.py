"""Latency and memory of whole language models, from the configuration files of Hugging Face."""

from __future__ import annotations

from cdmpp.llm.config import LLMConfig
from cdmpp.llm.estimate import estimate
from cdmpp.llm.layout import Layout
from cdmpp.llm.operators import Decode, Prefill, step_operators
from cdmpp.llm.parts import StepPart
from cdmpp.llm.plan import EstimatePlan
from cdmpp.llm.read import read_config
from cdmpp.llm.result import LLMEstimate

__all__ = [
    "Decode",
    "EstimatePlan",
    "LLMConfig",
    "LLMEstimate",
    "Layout",
    "Prefill",
    "StepPart",
    "estimate",
    "read_config",
    "step_operators",
]
