"""cdmpp as the cost model of TVM's MetaSchedule.

>>> model = CdmppCostModel(update="fine-tune")                                         # doctest: +SKIP
>>> ms.tune_tir(module, target, "work", 64, cost_model=model)                          # doctest: +SKIP

The model is trained on other programs, so it ranks candidates from the first round on. ``CdmppCostModel(URL)``
uses a server instead, so that the tuning process does not load the network.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np

from cdmpp.devices.loading import described_device
from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import ArtifactError, DataError
from cdmpp.features.encode import TIR
from cdmpp.integrations.candidates import BulkPredictor, Candidate, CandidateEncoder, host_of, predictor_of
from cdmpp.integrations.needed import derived_object, ms
from cdmpp.integrations.online import OnlineResiduals, ResidualSpread, optimistic, read_state, write_state
from cdmpp.predict.bulk import FeaturePart, FeatureQueries
from cdmpp.programs.query_options import DEFAULT_PROTOCOL, Protocol

logger = logging.getLogger(__name__)

Array = np.ndarray[Any, np.dtype[Any]]
Update = Literal["frozen", "fine-tune"]
_REPORT_EVERY_S = 10.0


def print_line(text: str) -> None:
    """Print a line on stderr at once."""
    print(text, file=sys.stderr, flush=True)


@derived_object
class CdmppCostModel(ms.cost_model.PyCostModel):  # type: ignore[misc]
    """Scores candidates by the latency that cdmpp predicts.

    Parameters
    ----------
    model : LatencyPredictor, path, URL, or anything with ``predict_features``; optional
        Loaded model, model folder, or ``http://`` or ``https://`` address of ``cdmpp serve``. Default: the
        model in the package.
    device : DeviceSpec, mapping of its fields, or name; optional
        Device that runs the programs. Default: this machine's CPU with the search's target.
    protocol : {"kernel", "graph", "eager"}
    update : {"frozen", "fine-tune"}
        "frozen" ignores run results. "fine-tune" corrects the predictions of the same task in closed form,
        without changing the network (:mod:`cdmpp.integrations.online`).
    explore : float
        Standard deviations of the correction that are subtracted from the predictions before ranking
        (:mod:`cdmpp.integrations.online`): candidates unlike the measured ones and unlike each other gain. 0: off.
    api_key : str, optional
        API key of the server.
    report : callable, optional
        Called with a line of text at the start of each task, and then at most every 10 s: candidates ranked, and runs
        learned from. A search takes minutes in which MetaSchedule itself prints nothing. Default: print to stderr;
        None: silent.

    Attributes
    ----------
    unencoded : int
        Number of distinct candidates that could not be encoded; they have the lowest score.

    Raises
    ------
    DataError
        ``update`` or ``explore`` is invalid.
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
        explore: float = 0.0,
        api_key: str | None = None,
        report: Callable[[str], None] | None = print_line,
    ) -> None:
        super().__init__()
        if update not in get_args(Update):
            raise DataError(f"unknown update {update!r}", hint="one of: " + ", ".join(get_args(Update)))
        if not (math.isfinite(explore) and explore >= 0):
            raise DataError(f"explore is {explore!r}", hint="a number of standard deviations, 0 or more")
        if explore and update == "frozen":
            raise DataError(f"explore={explore!r} needs measurements to learn from", hint='add update="fine-tune"')
        self._predictor: BulkPredictor = predictor_of(model, api_key)
        self._owned = self._predictor is not model and hasattr(self._predictor, "close")
        self._device = described_device(dict(device)) if isinstance(device, Mapping) else device
        self._protocol, self._update, self._explore = protocol, update, explore
        self._encoder = CandidateEncoder()
        self._online: dict[str, OnlineResiduals] = {}
        self._reference: dict[str, float] = {}
        #: Summaries of the candidates that were picked since the last results, by task.
        self._picked: dict[str, list[Array]] = {}
        self._hosts: dict[str, DeviceSpec | str] = {}
        self._report, self._reported_s = report, -math.inf
        self._ranked = self._learned = 0

    @property
    def unencoded(self) -> int:
        """Number of distinct candidates that could not be encoded."""
        return self._encoder.failed

    @property
    def model_id(self) -> str:
        """Id of the model."""
        return self._predictor.model_id

    def predict(self, context: Any, candidates: Sequence[Any]) -> Array:
        """Return scores of candidates: higher is faster.

        Returns (n,): best predicted seconds of the task's first batch, divided by the candidate's: about 1 for the
        best, above 1 for a candidate that is faster than that batch, 0 if it cannot be encoded.
        """
        scores = np.zeros(len(candidates))
        encoded = self._encode(context, candidates)
        encodable = [i for i, e in enumerate(encoded) if e is not None]
        if not encodable:
            return scores
        task = task_key(context)
        if task not in self._reference:
            device = self._device_of(context)
            name = device if isinstance(device, str) else device.name
            self._say(f"model {self.model_id} ranks the candidates of a new task for {name}", at_once=True)
        log_s = self._log_seconds(context, task, [e for e in encoded if e is not None])
        # MetaSchedule samples parents in proportion to the score, so all batches of a task share one reference.
        best = self._reference.setdefault(task, float(log_s.min()))
        scores[encodable] = np.exp(np.clip(best - log_s, -50.0, 50.0))
        self._ranked += len(encodable)
        self._say_counts()
        return scores

    def update(self, context: Any, candidates: Sequence[Any], results: Sequence[Any]) -> None:
        """Learn from run results, unless frozen; failed runs are learned as slow."""
        if self._update == "frozen":
            return
        pairs = [
            (e, _seconds(result))
            for e, result in zip(self._encode(context, candidates), results, strict=True)
            if e is not None
        ]
        if not pairs:
            return
        task, encoded = task_key(context), [e for e, _ in pairs]
        online = self._online.setdefault(task, OnlineResiduals())
        online.learn(_summaries(encoded), self._log_base(context, encoded), [s for _, s in pairs])
        self._picked.pop(task, None)
        self._learned += len(pairs)
        self._say_counts()

    def save(self, path: str) -> None:
        """Write the online corrections to a file (safetensors)."""
        write_state(path, self._online, self._reference, self.model_id)

    def load(self, path: str) -> None:
        """Read a file of :meth:`save`. Raises ArtifactError: the file is damaged, or belongs to another model."""
        online, reference, model_id = read_state(path)
        if model_id != self.model_id:
            raise ArtifactError(
                f"{path} belongs to model {model_id}, this is {self.model_id}",
                hint="load that model, or start again without the file",
            )
        self._online, self._reference = online, reference

    def close(self) -> None:
        """Close the connections to a server given by its URL; no effect for other models."""
        if self._owned:
            self._predictor.close()  # type: ignore[attr-defined]

    # -- private -----------------------------------------------------------------------------------------
    def _say_counts(self) -> None:
        self._say(f"{self._ranked:,} candidates ranked, {self._learned:,} measured runs learned from")

    def _say(self, text: str, *, at_once: bool = False) -> None:
        """Report a line, unless one was reported in the last seconds."""
        now_s = time.monotonic()
        if self._report is not None and (at_once or now_s >= self._reported_s + _REPORT_EVERY_S):
            self._reported_s = now_s
            self._report(f"cdmpp: {text}")

    def _encode(self, context: Any, candidates: Sequence[Any]) -> list[Candidate | None]:
        return self._encoder.encode([c.sch.mod for c in candidates], str(context.target))

    def _log_seconds(self, context: Any, task: str, candidates: Sequence[Candidate]) -> Array:
        """Log seconds that candidates are ranked by, (n,)."""
        log_s, online = self._log_base(context, candidates), self._online.get(task)
        if online is None and not self._explore:
            return log_s
        rows, online = _summaries(candidates), online or OnlineResiduals()
        log_s = log_s + online.correction(rows, log_s)
        if not self._explore:
            return log_s
        picked = self._picked.setdefault(task, [])
        observed = [part for part in (online.learned.features, *picked) if len(part)]
        spread = ResidualSpread(rows, np.concatenate(observed) if observed else rows[:0], online.scales)
        log_s, picks = optimistic(log_s, spread, self._explore)
        picked.append(rows[picks])
        return log_s

    def _log_base(self, context: Any, candidates: Sequence[Candidate]) -> Array:
        """Log seconds that the network predicts, (n,); each distinct candidate is predicted once."""
        new = list({id(c): c for c in candidates if math.isnan(c.log_s)}.values())
        if new:
            device = self._device_of(context)
            parts = [FeaturePart(c.features, TIR, device, "tvm", self._protocol) for c in new]
            answers = self._predictor.predict_features(FeatureQueries.of(parts))
            for candidate, latency_s in zip(new, answers.latency_s.tolist(), strict=True):
                candidate.log_s = math.log(latency_s)
        return np.array([c.log_s for c in candidates])

    def _device_of(self, context: Any) -> DeviceSpec | str:
        if self._device is not None:
            return self._device
        target = str(context.target)
        if target not in self._hosts:
            self._hosts[target] = host_of(target)
            logger.info("candidates are assumed to run on %s", self._hosts[target])
        return self._hosts[target]


def task_key(context: Any) -> str:
    """Return the key of a search's task: structural hash of the untuned module, and target."""
    return f"{ms.utils.shash2hex(context.mod)} {context.target}"


def _summaries(candidates: Sequence[Candidate]) -> Array:
    """Summaries of candidates, (n, columns)."""
    return np.stack([candidate.summary for candidate in candidates])


def _seconds(result: Any) -> float | None:
    """Return the median seconds of a run; None if it failed."""
    if result.error_msg is not None or not result.run_secs:
        return None
    return float(np.median([float(s) for s in result.run_secs]))
