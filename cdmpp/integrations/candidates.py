"""Predictor, device and candidates of a search: features and predictions are computed once per distinct program."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any, Protocol, cast

import numpy as np

from cdmpp.data.measure.targets import configurations
from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import DataError, InvalidDeviceError, InvalidProgramError
from cdmpp.features.ast import CompactAST
from cdmpp.features.encode import EncodedPrograms, encode_many
from cdmpp.integrations.needed import tvm, tvm_ffi
from cdmpp.integrations.object_walk import build_asts
from cdmpp.integrations.online import summary
from cdmpp.predict.bulk import FeatureAnswers, FeatureQueries
from cdmpp.predict.predictor import LatencyPredictor
from cdmpp.simulate.replay.records import paused_collector

logger = logging.getLogger(__name__)

#: Maximum number of cached programs, some ten kilobytes each; a round of TVM's default search has 2,560.
KEPT = 6_000


@dataclass(slots=True)
class Candidate:
    """A distinct program of a search."""

    features: EncodedPrograms  # with the schedule's columns
    summary: np.ndarray[Any, np.dtype[np.float64]]  # (columns,): of :func:`cdmpp.integrations.online.summary`
    log_s: float = float("nan")  # log of the seconds that the network predicts; NaN before the first prediction


class CandidateEncoder:
    """Candidates of scheduled modules, cached by target and TVM's structural hash; ``failed`` distinct programs could
    not be encoded."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._cache: OrderedDict[tuple[str, int], Candidate | None] = OrderedDict()
        self.failed = 0

    def encode(self, modules: Sequence[Any], target: str = "") -> list[Candidate | None]:
        """Return the candidate of each module; None if it cannot be encoded.

        ``target``: target of the programs; predictions of one program for several targets differ.
        """
        keys: list[tuple[str, int] | None] = []
        missing: dict[tuple[str, int], Any] = {}
        with paused_collector():
            for module in modules:
                try:
                    function = prim_func(module)
                except InvalidProgramError as error:
                    self._refuse(error)
                    keys.append(None)
                    continue
                keys.append(key := (target, int(tvm_ffi.structural_hash(function))))
                if key in self._cache:
                    self._cache.move_to_end(key)
                else:
                    missing[key] = function
            asts = dict(zip(missing, build_asts(list(missing.values())), strict=True))
            sound = {key: ast for key, ast in asts.items() if isinstance(ast, CompactAST)}
            encoded = dict(zip(sound, encode_many(list(sound.values()), schedule=True), strict=True))
            for key, ast in asts.items():
                self._cache[key] = self._candidate(ast if isinstance(ast, InvalidProgramError) else encoded[key])
        candidates = [None if key is None else self._cache[key] for key in keys]
        while len(self._cache) > self._kept:
            self._cache.popitem(last=False)
        return candidates

    def _candidate(self, features: EncodedPrograms | InvalidProgramError) -> Candidate | None:
        if isinstance(features, InvalidProgramError):
            self._refuse(features)
            return None
        return Candidate(features, summary([features])[0])

    def _refuse(self, error: InvalidProgramError) -> None:
        self.failed += 1
        logger.warning("a candidate cannot be encoded and is ranked last: %s", error.message)


def prim_func(module: Any) -> Any:
    """Return the only PrimFunc of a candidate's module.

    Raises InvalidProgramError: the module has several PrimFuncs, or none.
    """
    functions = [f for _, f in module.functions_items() if isinstance(f, tvm.tirx.PrimFunc)]
    if len(functions) != 1:
        raise InvalidProgramError(
            f"a candidate's module has {len(functions)} PrimFuncs", hint="tune one function at a time"
        )
    return functions[0]


class BulkPredictor(Protocol):
    """Interface of a predictor for a search."""

    @property
    def model_id(self) -> str:
        """Identity of the model."""

    def predict_features(self, queries: FeatureQueries) -> FeatureAnswers:
        """Predict encoded queries; the order is kept."""


def predictor_of(model: Any, api_key: str | None = None) -> BulkPredictor:
    """Return the predictor of ``model``: None (the model in the package), a folder, a URL, or a predictor.

    Raises ArtifactError: the folder has no model.
    Raises DataError: ``model`` is none of these.
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
        f"a {type(model).__name__} has no method predict_features",
        hint="pass a LatencyPredictor, a model folder or the URL of a server",
    )


def host_of(target: str) -> DeviceSpec:
    """Return this machine's CPU with the threads and the instruction set of a search's target.

    ``target``: TVM target as JSON; ``num-cores`` gives the threads.
    Raises InvalidDeviceError: the target is not this machine's CPU: name the device.
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
