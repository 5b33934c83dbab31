"""The interface of predictors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack
from typing import Protocol as Interface

from cdmpp.predict.prediction import DEFAULT_QUANTILES, Device, Predictions, Query
from cdmpp.programs.operators import OperatorSpec
from cdmpp.programs.program import TensorProgram
from cdmpp.programs.query_options import DEFAULT_PROTOCOL, Protocol

if TYPE_CHECKING:
    from cdmpp.predict.modules.prediction import ModulePrediction, ModulePredictions
    from cdmpp.predict.modules.predictor import ModuleOptions


class Predictor(Interface):
    """Interface of predictors: a model in this process, or a client of a service.

    Both return the same predictions to the last digit, so callers can use either.
    """

    @property
    def model_id(self) -> str:
        """Identity of the model."""

    def predict(
        self,
        programs: Sequence[TensorProgram | OperatorSpec | str | Mapping[str, Any]],
        device: Device | Sequence[Device],
        *,
        protocol: Protocol = DEFAULT_PROTOCOL,
        framework: str | None = None,
        quantiles: Sequence[float] = DEFAULT_QUANTILES,
        implementation: str | None = None,
    ) -> Predictions:
        """Predict programs on one device, or on each of several; see :meth:`LatencyPredictor.predict`.

        A program that cannot be read gives a prediction with an error.
        """

    def predict_queries(self, queries: Sequence[Query], quantiles: Sequence[float] = DEFAULT_QUANTILES) -> Predictions:
        """Predict queries with different programs, devices and settings, in order; errors are per query."""

    def predict_module(
        self, module: Any, example_inputs: Any, device: Device | Sequence[Device], **options: Unpack[ModuleOptions]
    ) -> ModulePrediction | ModulePredictions:
        """Predict one run of a torch module on one device, or on each of several."""
