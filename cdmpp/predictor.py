"""LatencyPredictor: load a model, ask it. The HTTP service and the command line go through here.

One question is one row: a program, a device, a backend, a protocol, a framework. Rows are computed in
chunks of a fixed shape that depends on the program alone, so an answer does not depend on what else was
asked at the same time, in which order, or through which door.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np

from cdmpp.devices.loading import from_mapping
from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import CdmppError, DataError, InvalidDeviceError, InvalidProgramError
from cdmpp.features.bulk import FeatureAnswers, FeatureQuestions
from cdmpp.features.encode import EncodedPrograms, encode_operator, encode_tvm_json
from cdmpp.features.encoded import TIR, EncodedProgram, operator_name
from cdmpp.frontends.request import program_from_request
from cdmpp.nn.adapter_files import save_adapted
from cdmpp.nn.answers import Answerer, Asked, Questions
from cdmpp.nn.artifact import Artifact, default_model, load_artifact
from cdmpp.nn.bulk import answer_features
from cdmpp.nn.calibration import read_quantiles
from cdmpp.nn.domain import label
from cdmpp.nn.engine import CHUNK_ROWS
from cdmpp.nn.inputs import roofline_s, stack_devices
from cdmpp.nn.levels import LEVELS
from cdmpp.nn.store import ProgramStore
from cdmpp.prediction import (
    DEFAULT_QUANTILES,
    ErrorInfo,
    Prediction,
    Question,
    check_quantiles,
    check_settings,
)
from cdmpp.programs.operators import OperatorSpec, operator_types
from cdmpp.programs.program import TensorProgram
from cdmpp.programs.question import BACKENDS, DEFAULT_PROTOCOL, FRAMEWORKS, PROTOCOLS, Protocol

if TYPE_CHECKING:
    from cdmpp.adaptation.records import Records

Array = np.ndarray[Any, np.dtype[Any]]

__all__ = [
    "CHUNK_ROWS", "DEFAULT_QUANTILES", "ErrorInfo", "LatencyPredictor", "Prediction", "Question",
    "check_quantiles", "default_model",
]  # fmt: skip


@dataclass(frozen=True)
class _Answer:
    """What the network says of a row, before quantiles are asked for."""

    log_point: float
    log_levels: Array
    factor: float
    score: float
    coverage: float
    roofline: float


class _Lru:
    """A bounded dictionary that forgets the least recently used; safe between threads."""

    def __init__(self, size: int) -> None:
        self._size, self._items, self._lock = size, OrderedDict[Any, Any](), threading.Lock()

    def get(self, key: Any) -> Any:
        with self._lock:
            if key in self._items:
                self._items.move_to_end(key)
                return self._items[key]
            return None

    def put(self, key: Any, value: Any) -> None:
        with self._lock:
            self._items[key] = value
            self._items.move_to_end(key)
            while len(self._items) > self._size:
                self._items.popitem(last=False)


class LatencyPredictor:
    """Predicts latencies with one loaded model. Safe to share between threads.

    Examples
    --------
    >>> predictor = LatencyPredictor.load()                                 # doctest: +SKIP
    >>> predictor.predict(["linear:m=512,n=4096,k=1024,dtype=float16"], "t4")[0].latency_s  # doctest: +SKIP
    """

    def __init__(self, artifact: Artifact, *, cache_rows: int = 200_000) -> None:
        self.artifact = artifact
        self._answerer = Answerer(artifact, one_by_one=True)
        self._encoded = _Lru(20_000)
        self._answers = _Lru(cache_rows)
        self._report: dict[str, Any] | None = None

    @classmethod
    def load(cls, path: str | PathLike[str] | None = None) -> LatencyPredictor:
        """Load a model folder; without a path, the one that ships with the package.

        Raises
        ------
        ArtifactError
            The folder is missing, damaged, or of another format or feature schema.
        """
        return cls(load_artifact(path if path is not None else default_model()))

    @property
    def model_id(self) -> str:
        """Identity of the loaded model."""
        return self.artifact.model_id

    @property
    def adaptation(self) -> dict[str, Any] | None:
        """How the model was adapted (:class:`cdmpp.adaptation.adapt.Adaptation`); None for a base model."""
        if self._report is not None:
            return self._report
        return self.artifact.adapter.report if self.artifact.adapter is not None else None

    def adapt(
        self,
        records: Records,
        device: DeviceSpec | Mapping[str, Any] | str | None = None,
        *,
        k: int | None = None,
        sampler: str = "kmeans",
        seed: int = 0,
        protocol: Protocol = DEFAULT_PROTOCOL,
        framework: str | None = None,
    ) -> LatencyPredictor:
        """A predictor adapted to one device by measurements of it; this one stays as it is.

        Parameters
        ----------
        records : path, MeasurementTable, or sequence of (program, latency_s)
            A table as ``cdmpp eval`` reads it, a CSV with the columns ``program`` and ``latency_us``, or
            programs as :meth:`predict` takes them with their seconds.
        device : DeviceSpec, mapping of its fields, or name, optional
            Default: the one device that the records name.
        k : int, optional
            Choose so many records, without their latencies, and report the error on the others. Default: use
            all.
        sampler : {"kmeans", "random", "variance"}
        seed : int
            Of the choice.
        protocol, framework
            How (program, latency_s) pairs were measured.

        Returns
        -------
        LatencyPredictor
            :attr:`adaptation` says what was gained, with named warnings; :meth:`save` writes it.

        Raises
        ------
        DataError
            The records name several devices or none, contradict the specification, or are fewer than ``k``.
        UnknownDeviceError, InvalidDeviceError
            ``device`` is not known, or none.
        ArtifactError
            This predictor is adapted already.
        """
        from cdmpp.adaptation.adapt import adapt
        from cdmpp.adaptation.records import device_records

        chosen = None if device is None else device if isinstance(device, str) else self._as_device(device)
        rows = device_records(records, chosen, self.artifact, protocol=protocol, framework=framework)
        made = adapt(self.artifact, rows, k=k, sampler=sampler, seed=seed)
        adapted = LatencyPredictor(made.artifact)
        adapted._report = made.report
        return adapted

    def save(self, folder: str | PathLike[str]) -> None:
        """Write an adapted model's folder, which :meth:`load` opens as long as its base is there.

        Raises
        ------
        ArtifactError
            The model is not adapted, or the folder holds something else.
        """
        save_adapted(folder, self.artifact)

    def predict(
        self,
        programs: Sequence[TensorProgram | OperatorSpec | str | Mapping[str, Any]],
        device: DeviceSpec | Mapping[str, Any] | str,
        *,
        protocol: Protocol = DEFAULT_PROTOCOL,
        framework: str | None = None,
        quantiles: Sequence[float] = DEFAULT_QUANTILES,
    ) -> list[Prediction]:
        """Predict the run time of tensor programs on one device.

        Parameters
        ----------
        programs : sequence of TensorProgram, OperatorSpec, operator text or operator object, length n
            Order is kept; n = 0 gives an empty list.
        device : DeviceSpec, mapping of its fields, or str
            Target hardware, or the name of a known one; need not have been seen in training.
        protocol : {"kernel", "graph", "eager"}
            Which latency is meant (see :class:`Question`).
        framework : str, optional
        quantiles : sequence of float
            Levels of the interval, between 0.02 and 0.98.

        Returns
        -------
        list of Prediction, length n
            A program that cannot be encoded gives one with ``error`` set; the others are unaffected.

        Raises
        ------
        UnknownDeviceError, InvalidDeviceError
            ``device`` is a name that is not known (the message lists the nearest names), or no device.
        DataError
            ``programs`` is a bare text; a quantile, the protocol or the framework is not one that the
            model knows.
        """
        if isinstance(programs, str):
            raise DataError("programs is one text, not a sequence of programs", hint="pass a list: [program]")
        spec = self._as_device(device)
        check_settings(protocol, framework)
        items: list[Question | tuple[str, CdmppError]] = []
        for program in programs:
            try:
                ready = program if isinstance(program, TensorProgram) else _as_program(program)
                items.append(Question(ready, spec, protocol, framework))
            except CdmppError as error:
                items.append((str(program)[:200], error))
        asked = iter(self.predict_questions([q for q in items if isinstance(q, Question)], quantiles))
        return [
            next(asked) if isinstance(item, Question)
            else Prediction(item[0], None, spec.name, "library", protocol, framework, self.model_id,
                            error=ErrorInfo.of(item[1]))
            for item in items
        ]  # fmt: skip

    def _as_device(self, device: DeviceSpec | Mapping[str, Any] | str) -> DeviceSpec:
        if isinstance(device, str):
            return self.artifact.device(device)
        if isinstance(device, DeviceSpec):
            return device
        if isinstance(device, Mapping):
            return from_mapping(dict(device))
        raise InvalidDeviceError(
            f"{device!r} is not a device", hint="pass a name, a DeviceSpec or its fields"
        )

    def predict_questions(
        self, questions: Sequence[Question], quantiles: Sequence[float] = DEFAULT_QUANTILES
    ) -> list[Prediction]:
        """Predict rows of different programs, devices, protocols and frameworks; order is kept.

        Unlike :meth:`predict`, an unknown device, protocol or framework is an error of its row.
        """
        levels = check_quantiles(quantiles)
        results: list[Prediction | None] = [None] * len(questions)
        keys: list[tuple[Any, ...] | None] = [None] * len(questions)
        answers: dict[tuple[Any, ...], _Answer] = {}
        missing: OrderedDict[tuple[Any, ...], tuple[Question, DeviceSpec]] = OrderedDict()
        specs: dict[str, DeviceSpec] = {}
        for i, question in enumerate(questions):
            program = question.program
            try:
                spec = question.device
                if isinstance(spec, str):
                    spec = specs.get(spec) or specs.setdefault(spec, self.artifact.device(spec))
                check_settings(question.protocol, question.framework)
                key = (
                    program.hash, program.backend, spec.digest(), spec.name,
                    question.protocol, question.framework,
                )  # fmt: skip
                keys[i] = key
                cached = self._answers.get(key)
                if cached is not None:
                    answers[key] = cached
                elif key not in missing:
                    self.encode(program)
                    missing[key] = (question, spec)
            except CdmppError as error:
                keys[i] = None
                results[i] = self._failed(question, error)
        for key, answer in zip(missing, self._compute(list(missing.values())), strict=True):
            answers[key] = answer
            self._answers.put(key, answer)
        for i, maybe in enumerate(keys):
            if maybe is not None:
                results[i] = self._prediction(questions[i], maybe, answers[maybe], levels)
        return [r for r in results if r is not None]

    def predict_features(self, questions: FeatureQuestions) -> FeatureAnswers:
        """Predict programs that are encoded already, as arrays; order is kept.

        The same rows get the same figures as from :meth:`predict_questions`; nothing is remembered.

        Raises
        ------
        DataError, InvalidProgramError
            A level is out of range, or features are not what this model reads.
        UnknownDeviceError
            A device's name is not known.
        """
        return answer_features(self._answerer, questions)

    def encode(self, program: TensorProgram | EncodedProgram) -> EncodedPrograms:
        """Features of a program, remembered by its hash; of one that comes encoded, its own.

        Raises
        ------
        InvalidProgramError, UnsupportedOperatorError
            The program cannot be encoded.
        """
        if isinstance(program, EncodedProgram):
            return self._as_read(program)
        found = self._encoded.get(program.hash)
        if found is None:
            if program.operator is not None:
                found = encode_operator(program.operator)
            else:
                schedule = self.artifact.config.schedule
                found = encode_tvm_json(program.tvm_json or "", program.function, schedule=schedule)
            if not np.isfinite(found.leaves).all() or not np.isfinite(found.totals).all():
                raise InvalidProgramError(
                    f"{program.name}: its sizes overflow the features",
                    hint="no loop nest of this size can run",
                )
            self._encoded.put(program.hash, found)
        encoded: EncodedPrograms = found
        return encoded

    def _as_read(self, program: EncodedProgram) -> EncodedPrograms:
        """Features that came encoded, with the columns that the network reads."""
        features, width = program.features, self.artifact.config.leaf_width
        if features.leaves.shape[2] < width and program.operator == TIR:
            raise InvalidProgramError(
                f"{program.name}: its features lack the schedule's columns",
                hint="encode it with schedule=True",
            )
        if features.leaves.shape[2] > width:
            features = replace(features, leaves=features.leaves[:, :, :width])
        return features

    def support(self) -> dict[str, Any]:
        """What this model covers: operators, devices seen in training, protocols, accuracy by source."""
        contexts = [c.split("|") for c in self.artifact.domain.contexts if c.count("|") == 4]
        trained: dict[str, set[str]] = {}
        for _, operator, dtype, protocol, backend in contexts:
            trained.setdefault(operator, set()).add(f"{backend}/{protocol}/{dtype}")
        return {
            "model_id": self.model_id,
            "operators": {
                name: {
                    "trained": sorted(trained.get(name, ())),
                    "fields": {
                        field_name: ("required" if info.is_required() else info.default)
                        for field_name, info in kind.model_fields.items()
                        if field_name != "operator"
                    },
                }
                for name, kind in sorted(operator_types().items())
            },
            "trained_devices": list(filter(None, self.artifact.devices)),
            "backends": list(BACKENDS),
            "protocols": list(PROTOCOLS),
            "frameworks": list(FRAMEWORKS),
            "default_protocol": DEFAULT_PROTOCOL,
            "quantile_range": [LEVELS[0], LEVELS[-1]],
            "accuracy": self.artifact.manifest.get("metrics", {}),
        }

    # -- inside -----------------------------------------------------------------------------------------
    def _failed(self, question: Question, error: CdmppError) -> Prediction:
        program = question.program
        device = question.device if isinstance(question.device, str) else question.device.name
        try:
            digest: str | None = program.hash
        except CdmppError:
            digest = None
        return Prediction(
            program.name, digest, device, program.backend, question.protocol, question.framework,
            self.model_id, error=ErrorInfo.of(error),
        )  # fmt: skip

    def _prediction(
        self, question: Question, key: tuple[Any, ...], answer: _Answer, levels: tuple[float, ...]
    ) -> Prediction:
        values = np.exp(read_quantiles(answer.log_levels[None], np.array([answer.factor]), levels)[0])
        point = float(np.exp(answer.log_point))
        seconds = {f"{level:g}": float(v) for level, v in zip(levels, values, strict=True)}
        return Prediction(
            question.program.name, key[0], key[3], question.program.backend, question.protocol,
            question.framework, self.model_id, point,
            # The point minimises the relative error and lies a little below the median.
            min(point, *seconds.values()), max(point, *seconds.values()), seconds,
            label(answer.coverage), round(answer.score, 4), answer.roofline,
        )  # fmt: skip

    def _compute(self, rows: list[tuple[Question, DeviceSpec]]) -> Iterable[_Answer]:
        if not rows:
            return []
        encoded = [self.encode(question.program) for question, _ in rows]
        store = ProgramStore.of(encoded, self.artifact.config.leaf_width)
        kinds: dict[tuple[str, str], int] = {}
        kind = [
            kinds.setdefault((operator_name(q.program), e.dtype), len(kinds))
            for (q, _), e in zip(rows, encoded, strict=True)
        ]
        # Most questions of a call share one specification object; two equal ones do no harm.
        specs = {id(spec): spec for _, spec in rows}
        number = {key: i for i, key in enumerate(specs)}
        device = np.array([number[id(spec)] for _, spec in rows])
        asked = Asked(
            store, list(kinds), np.array(kind), list(specs.values()),
            Questions(
                program=np.arange(len(rows)),
                device=device,
                backend=np.array([BACKENDS.index(q.program.backend) for q, _ in rows]),
                protocol=np.array([PROTOCOLS.index(q.protocol) for q, _ in rows]),
                framework=np.array([FRAMEWORKS.index(q.framework) if q.framework else -1 for q, _ in rows]),
            ),
        )  # fmt: skip
        said = self._answerer.answer(asked)
        bound = np.maximum(*roofline_s(store.summary, stack_devices(list(specs.values()))[device]))
        trust = (said.score.tolist(), said.coverage.tolist())
        columns = (said.point.tolist(), said.levels, said.factor, *trust, bound.tolist())
        return [_Answer(*row) for row in zip(*columns, strict=True)]


def _as_program(program: OperatorSpec | str | Mapping[str, Any]) -> TensorProgram:
    if isinstance(program, str | OperatorSpec):
        return TensorProgram.from_operator(program)
    return program_from_request(program)
