"""Predictor and device of a search."""

from __future__ import annotations

from os import PathLike, fspath
from typing import Any, Protocol, cast

from cdmpp.data.measure.targets import configurations
from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import DataError, InvalidDeviceError
from cdmpp.predict.bulk import FeatureAnswers, FeatureQueries
from cdmpp.predict.predictor import LatencyPredictor


class BulkPredictor(Protocol):
    """Interface of a predictor for a search."""

    @property
    def model_id(self) -> str:
        """Identity of the model."""

    def predict_features(self, queries: FeatureQueries) -> FeatureAnswers:
        """Predict encoded queries; the order is kept."""


def predictor_of(model: Any, api_key: str | None = None) -> BulkPredictor:
    """Return the predictor of ``model``: None (the model in the package), a folder, a URL, or a predictor.

    Raises
    ------
    ArtifactError
        The folder has no model.
    DataError
        ``model`` is none of these.
    """
    if model is None:
        return LatencyPredictor.load()
    if isinstance(model, str) and model.startswith(("http://", "https://")):
        from cdmpp.predict.client import PredictorClient

        return cast(BulkPredictor, PredictorClient(model, api_key=api_key))
    if isinstance(model, str | PathLike):
        return LatencyPredictor.load(fspath(model))
    if hasattr(model, "predict_features") and hasattr(model, "model_id"):
        return cast(BulkPredictor, model)
    raise DataError(
        f"a {type(model).__name__} has no method predict_features",
        hint="pass a LatencyPredictor, a model folder or the URL of a server",
    )


def host_of(target: str) -> DeviceSpec:
    """Return this machine's CPU with the threads and the instruction set of a search's target.

    Parameters
    ----------
    target : str
        TVM target as JSON; ``num-cores`` gives the threads.

    Raises
    ------
    InvalidDeviceError
        The target is not this machine's CPU: name the device.
    """
    try:
        return configurations((target,))[0].device
    except InvalidDeviceError as error:
        # TVM passes on the message only; the hint is for the command line.
        raise InvalidDeviceError(
            f"{error.message} Give CdmppCostModel a device=, or the target the instruction set of this"
            ' machine ("mcpu": "x86-64-v3")',
            hint="pass device=, a name or a specification",
        ) from None
