"""Predict the latency of tensor programs on devices you do not have.

The public names load on first use, so that ``import cdmpp`` is fast and imports neither torch nor TVM. Names that
are not in ``__all__`` may change without notice.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cdmpp import llm as llm
    from cdmpp.client import AsyncPredictorClient as AsyncPredictorClient
    from cdmpp.client import PredictorClient as PredictorClient
    from cdmpp.devices import DeviceSpec as DeviceSpec
    from cdmpp.errors import ArtifactError as ArtifactError
    from cdmpp.errors import CdmppError as CdmppError
    from cdmpp.errors import DataError as DataError
    from cdmpp.errors import DeadlineExceededError as DeadlineExceededError
    from cdmpp.errors import FieldError as FieldError
    from cdmpp.errors import InfeasibleError as InfeasibleError
    from cdmpp.errors import InvalidDeviceError as InvalidDeviceError
    from cdmpp.errors import InvalidProgramError as InvalidProgramError
    from cdmpp.errors import MeasurementError as MeasurementError
    from cdmpp.errors import MissingDependencyError as MissingDependencyError
    from cdmpp.errors import OverloadedError as OverloadedError
    from cdmpp.errors import ServiceError as ServiceError
    from cdmpp.errors import UnknownDeviceError as UnknownDeviceError
    from cdmpp.errors import UnsupportedOperatorError as UnsupportedOperatorError
    from cdmpp.plan.registry import make_plan as make_plan
    from cdmpp.predict.curves import predict_curve as predict_curve
    from cdmpp.predict.interface import Predictor as Predictor
    from cdmpp.predict.prediction import Predictions as Predictions
    from cdmpp.predict.predictor import LatencyPredictor as LatencyPredictor
    from cdmpp.predict.predictor import Prediction as Prediction
    from cdmpp.predict.predictor import Query as Query
    from cdmpp.programs.frontends.load import load_programs as load_programs
    from cdmpp.programs.operators import OperatorSpec as OperatorSpec
    from cdmpp.programs.program import TensorProgram as TensorProgram

__version__ = "0.1.0"

_HOMES = {
    "LatencyPredictor": "cdmpp.predict.predictor",
    "Prediction": "cdmpp.predict.prediction",
    "Predictions": "cdmpp.predict.prediction",
    "Predictor": "cdmpp.predict.interface",
    "Query": "cdmpp.predict.prediction",
    "predict_curve": "cdmpp.predict.curves",
    "load_programs": "cdmpp.programs.frontends.load",
    "make_plan": "cdmpp.plan.registry",
    "PredictorClient": "cdmpp.client",
    "AsyncPredictorClient": "cdmpp.client",
    "DeviceSpec": "cdmpp.devices",
    "OperatorSpec": "cdmpp.programs.operators",
    "TensorProgram": "cdmpp.programs.program",
    "ArtifactError": "cdmpp.errors",
    "CdmppError": "cdmpp.errors",
    "DataError": "cdmpp.errors",
    "DeadlineExceededError": "cdmpp.errors",
    "FieldError": "cdmpp.errors",
    "InfeasibleError": "cdmpp.errors",
    "InvalidDeviceError": "cdmpp.errors",
    "InvalidProgramError": "cdmpp.errors",
    "MeasurementError": "cdmpp.errors",
    "MissingDependencyError": "cdmpp.errors",
    "OverloadedError": "cdmpp.errors",
    "ServiceError": "cdmpp.errors",
    "UnknownDeviceError": "cdmpp.errors",
    "UnsupportedOperatorError": "cdmpp.errors",
}

__all__ = ["__version__", *sorted(_HOMES)]


#: Public packages that are used by their name: ``cdmpp.llm.estimate``.
_PACKAGES = ("llm",)


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"cdmpp.{name}")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'cdmpp' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value  # the next access skips this function
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_HOMES))
