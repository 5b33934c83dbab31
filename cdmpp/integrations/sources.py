"""Who predicts for a search, and for which device."""

from __future__ import annotations

from os import PathLike, fspath
from typing import Any, Protocol, cast

from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import DataError, InvalidDeviceError
from cdmpp.features.bulk import FeatureAnswers, FeatureQueries
from cdmpp.measure.targets import configurations
from cdmpp.predictor import LatencyPredictor


class BulkPredictor(Protocol):
    """What a search needs of a predictor."""

    @property
    def model_id(self) -> str:
        """Identity of the model."""

    def predict_features(self, queries: FeatureQueries) -> FeatureAnswers:
        """Answers to encoded queries, in their order."""


def predictor_of(model: Any, api_key: str | None = None) -> BulkPredictor:
    """The predictor that ``model`` stands for: None (the shipped one), a folder, a URL, or itself.

    Raises
    ------
    ArtifactError
        The folder holds no model.
    DataError
        ``model`` is none of these.
    """
    if model is None:
        return LatencyPredictor.load()
    if isinstance(model, str) and model.startswith(("http://", "https://")):
        from cdmpp.client import PredictorClient

        return cast(BulkPredictor, PredictorClient(model, api_key=api_key))
    if isinstance(model, str | PathLike):
        return LatencyPredictor.load(fspath(model))
    if hasattr(model, "predict_features") and hasattr(model, "model_id"):
        return cast(BulkPredictor, model)
    raise DataError(
        f"a {type(model).__name__} predicts no features",
        hint="pass a LatencyPredictor, a model folder or the URL of a server",
    )


def host_of(target: str) -> DeviceSpec:
    """This machine's CPU with the threads and the instruction set of a search's target.

    Parameters
    ----------
    target : str
        TVM target as JSON; ``num-cores`` gives the threads.

    Raises
    ------
    InvalidDeviceError
        The target is not one of this machine's CPU: the device must be named.
    """
    try:
        return configurations((target,))[0].device
    except InvalidDeviceError as error:
        # TVM passes the message on, not the hint, which is the command line's.
        raise InvalidDeviceError(
            f"{error.message} Give CdmppCostModel a device=, or the target the instruction set of this"
            ' machine ("mcpu": "x86-64-v3")',
            hint="pass device=, a name or a specification",
        ) from None
