"""Language models: latency and memory of batches, serving and training steps, from the config.json of Hugging Face.

It builds the operators of a model's steps and adds what engines do around their kernels. What predicts the kernels
belongs in :mod:`cdmpp.predict`, what chooses layouts and clusters in :mod:`cdmpp.plan`. The public names load on first
use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cdmpp.llm.config import LLMConfig as LLMConfig
    from cdmpp.llm.engines.profile import EngineProfile as EngineProfile
    from cdmpp.llm.estimate_plan import EstimatePlan as EstimatePlan
    from cdmpp.llm.estimate_plan import estimate as estimate
    from cdmpp.llm.estimate_result import LLMEstimate as LLMEstimate
    from cdmpp.llm.layout import Layout as Layout
    from cdmpp.llm.operators import Decode as Decode
    from cdmpp.llm.operators import Prefill as Prefill
    from cdmpp.llm.operators import StepPart as StepPart
    from cdmpp.llm.operators import step_operators as step_operators
    from cdmpp.llm.read import read_config as read_config
    from cdmpp.llm.serving.calibrate import calibrate as calibrate
    from cdmpp.llm.serving.load import Goodput as Goodput
    from cdmpp.llm.serving.load import goodput as goodput
    from cdmpp.llm.serving.load import load_curve as load_curve
    from cdmpp.llm.serving.simulate import ServingResult as ServingResult
    from cdmpp.llm.serving.simulate import simulate as simulate
    from cdmpp.llm.training.calibrate import calibrate_training as calibrate_training
    from cdmpp.llm.training.layout import TrainingLayout as TrainingLayout
    from cdmpp.llm.training.result import LayoutSearch as LayoutSearch
    from cdmpp.llm.training.result import TrainingStep as TrainingStep
    from cdmpp.llm.training.search import search_layouts as search_layouts
    from cdmpp.llm.training.step import TrainingPlan as TrainingPlan
    from cdmpp.llm.training.step import training_step as training_step

_NAMES = {
    "config": ("LLMConfig",),
    "engines.profile": ("EngineProfile",),
    "estimate_plan": ("EstimatePlan", "estimate"),
    "estimate_result": ("LLMEstimate",),
    "layout": ("Layout",),
    "operators": ("Decode", "Prefill", "StepPart", "step_operators"),
    "read": ("read_config",),
    "serving.calibrate": ("calibrate",),
    "serving.load": ("Goodput", "goodput", "load_curve"),
    "serving.simulate": ("ServingResult", "simulate"),
    "training.calibrate": ("calibrate_training",),
    "training.layout": ("TrainingLayout",),
    "training.result": ("LayoutSearch", "TrainingStep"),
    "training.search": ("search_layouts",),
    "training.step": ("TrainingPlan", "training_step"),
}
_HOMES = {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
