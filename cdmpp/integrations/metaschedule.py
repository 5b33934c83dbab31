"""cdmpp as the cost model of TVM's MetaSchedule.

>>> model = CdmppCostModel(update="fine-tune")                                         # doctest: +SKIP
>>> ms.tune_tir(module, target, "work", 64, cost_model=model)                          # doctest: +SKIP

The model has seen other programs before, so that its first round is no guess. ``CdmppCostModel(URL)`` asks a
server in its place, with nothing of the network in the tuning process.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np

from cdmpp.devices.loading import from_mapping
from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import ArtifactError, DataError
from cdmpp.features.bulk import TIR, FeaturePart, FeatureQueries
from cdmpp.features.encode import EncodedPrograms
from cdmpp.integrations.candidates import CandidateEncoder
from cdmpp.integrations.needed import derived_object, ms
from cdmpp.integrations.online import OnlineResiduals, read_state, write_state
from cdmpp.integrations.sources import BulkPredictor, host_of, predictor_of
from cdmpp.programs.query_options import DEFAULT_PROTOCOL, Protocol

logger = logging.getLogger(__name__)

Array = np.ndarray[Any, np.dtype[Any]]
Update = Literal["frozen", "fine-tune"]


@derived_object
class CdmppCostModel(ms.cost_model.PyCostModel):  # type: ignore[misc]
    """Scores candidates by the latency that cdmpp predicts.

    Parameters
    ----------
    model : LatencyPredictor, path, URL, or anything with ``predict_features``; optional
        Who predicts: a loaded model, a model folder, an ``http://`` or ``https://`` address of ``cdmpp
        serve``. Default: the model that ships with the package.
    device : DeviceSpec, mapping of its fields, or name; optional
        What runs the programs. Default: this machine's CPU as the search's target uses it.
    protocol : {"kernel", "graph", "eager"}
    update : {"frozen", "fine-tune"}
        What run results are good for: nothing, or a correction of what is predicted for the same task
        (:mod:`cdmpp.integrations.online`), in closed form and without touching the network.
    api_key : str, optional
        For a server that wants one.

    Attributes
    ----------
    unencoded : int
        Distinct candidates that could not be encoded; they got the lowest score.

    Raises
    ------
    DataError
        ``update`` is neither.
    ArtifactError
        The model's folder is missing, damaged, or of another format.
    """

    def __init__(
        self,
        model: Any = None,
        *,
        device: DeviceSpec | Mapping[str, Any] | str | None = None,
        protocol: Protocol = DEFAULT_PROTOCOL,
        update: Update = "frozen",
        api_key: str | None = None,
    ) -> None:
        super().__init__()
        if update not in get_args(Update):
            raise DataError(f"update {update!r} is not known", hint="one of: " + ", ".join(get_args(Update)))
        self._predictor: BulkPredictor = predictor_of(model, api_key)
        self._owned = self._predictor is not model and hasattr(self._predictor, "close")
        self._device = from_mapping(dict(device)) if isinstance(device, Mapping) else device
        self._protocol, self._update = protocol, update
        self._encoder = CandidateEncoder()
        self._online: dict[str, OnlineResiduals] = {}
        self._reference: dict[str, float] = {}
        self._hosts: dict[str, DeviceSpec | str] = {}

    @property
    def unencoded(self) -> int:
        """Distinct candidates that could not be encoded."""
        return self._encoder.failed

    @property
    def model_id(self) -> str:
        """Identity of the model that predicts."""
        return self._predictor.model_id

    def predict(self, context: Any, candidates: Sequence[Any]) -> Array:
        """Scores of candidates: the higher, the faster.

        Parameters
        ----------
        context : TuneContext
        candidates : sequence of MeasureCandidate, length n

        Returns
        -------
        ndarray of float64, (n,)
            Best predicted seconds of the task's first batch over the candidate's: about 1 for the best, above
            1 for one that is better than all of that batch, 0 for one that cannot be encoded.
        """
        scores = np.zeros(len(candidates))
        encoded = self._encoder.encode([c.sch.mod for c in candidates])
        able = [i for i, e in enumerate(encoded) if e is not None]
        if not able:
            return scores
        task = task_key(context)
        log_s = self._log_seconds(context, task, [e for e in encoded if e is not None])
        # MetaSchedule draws parents in proportion to the score: one unit for all batches of a task.
        best = self._reference.setdefault(task, float(log_s.min()))
        scores[able] = np.exp(np.clip(best - log_s, -50.0, 50.0))
        return scores

    def update(self, context: Any, candidates: Sequence[Any], results: Sequence[Any]) -> None:
        """Learn from run results, unless frozen; failed runs are learned as slow.

        Parameters
        ----------
        context : TuneContext
        candidates : sequence of MeasureCandidate
        results : sequence of RunnerResult, of the same length
        """
        if self._update == "frozen":
            return
        pairs = [
            (e, _seconds(result))
            for e, result in zip(self._encoder.encode([c.sch.mod for c in candidates]), results, strict=True)
            if e is not None
        ]
        if not pairs:
            return
        task, encoded = task_key(context), [e for e, _ in pairs]
        online = self._online.setdefault(task, OnlineResiduals())
        online.learn(encoded, self._log_base(context, encoded), [s for _, s in pairs])

    def save(self, path: str) -> None:
        """Write what was learned online to a file (safetensors)."""
        write_state(path, self._online, self._reference, self.model_id)

    def load(self, path: str) -> None:
        """Go on with what :meth:`save` wrote.

        Raises
        ------
        ArtifactError
            The file is damaged, or was learned on top of another model.
        """
        online, reference, model_id = read_state(path)
        if model_id != self.model_id:
            raise ArtifactError(
                f"{path} was learned on top of model {model_id}, this is {self.model_id}",
                hint="load that model, or begin anew without the file",
            )
        self._online, self._reference = online, reference

    def close(self) -> None:
        """End the connections to a server that was named by its URL; for any other model nothing."""
        if self._owned:
            self._predictor.close()  # type: ignore[attr-defined]

    # -- inside -----------------------------------------------------------------------------------------
    def _log_seconds(self, context: Any, task: str, encoded: Sequence[EncodedPrograms]) -> Array:
        base = self._log_base(context, encoded)
        online = self._online.get(task)
        return base if online is None else base + online.correction(encoded, base)

    def _log_base(self, context: Any, encoded: Sequence[EncodedPrograms]) -> Array:
        device = self._device_of(context)
        parts = [FeaturePart(e, TIR, device, "tvm", self._protocol) for e in encoded]
        return np.log(self._predictor.predict_features(FeatureQueries.of(parts)).latency_s)

    def _device_of(self, context: Any) -> DeviceSpec | str:
        if self._device is not None:
            return self._device
        target = str(context.target)
        if target not in self._hosts:
            self._hosts[target] = host_of(target)
            logger.info("candidates are taken to run on %s", self._hosts[target])
        return self._hosts[target]


def task_key(context: Any) -> str:
    """What tells the tasks of a search apart: the structural hash of the untuned module, and its target."""
    return f"{ms.utils.shash2hex(context.mod)} {context.target}"


def _seconds(result: Any) -> float | None:
    """Median seconds of a run; None when it failed."""
    if result.error_msg is not None or not result.run_secs:
        return None
    return float(np.median([float(s) for s in result.run_secs]))
