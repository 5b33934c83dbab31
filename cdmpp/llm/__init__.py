"""Latency and memory of whole language models, from the configuration files of Hugging Face."""

from __future__ import annotations

from cdmpp.llm.config import LLMConfig
from cdmpp.llm.layout import Layout
from cdmpp.llm.operators import Decode, Prefill, step_operators
from cdmpp.llm.parts import StepPart
from cdmpp.llm.read import read_config

__all__ = ["Decode", "LLMConfig", "Layout", "Prefill", "StepPart", "read_config", "step_operators"]
