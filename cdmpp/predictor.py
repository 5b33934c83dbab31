"""LatencyPredictor: load a model, ask it. The HTTP service and the command line go through here.

One question is one row: a program, a device, a backend, a protocol, a framework. Rows are computed in
chunks of a fixed shape that depends on the program alone, so an answer does not depend on what else was
asked at the same time, in which order, or through which door.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cdmpp.devices.loading import from_mapping
from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import CdmppError, DataError, InvalidDeviceError, InvalidProgramError
from cdmpp.features.encode import EncodedPrograms, encode_operator, encode_tvm_json
from cdmpp.frontends.request import program_from_request
from cdmpp.nn.artifact import Artifact, load_artifact
from cdmpp.nn.calibration import read_quantiles
from cdmpp.nn.domain import Context, Label, label
from cdmpp.nn.inputs import device_numbers, question_inputs, roofline_s
from cdmpp.nn.network import LEVELS
from cdmpp.nn.peers import Peers, Trained, shift
from cdmpp.nn.store import ProgramStore
from cdmpp.programs.operators import OperatorSpec, operator_types
from cdmpp.programs.program import TensorProgram
from cdmpp.programs.question import BACKENDS, DEFAULT_PROTOCOL, FRAMEWORKS, PROTOCOLS, Protocol

Array = np.ndarray[Any, np.dtype[Any]]

#: Rows per forward pass. Fixed: matrix kernels are chosen by shape, and their last digits differ.
CHUNK_ROWS = 32
DEFAULT_QUANTILES = (0.1, 0.9)


@dataclass(frozen=True)
class ErrorInfo:
    """Why one question has no answer."""

    code: str
    message: str
    hint: str = ""

    @classmethod
    def of(cls, error: CdmppError) -> ErrorInfo:
        """From an exception."""
        return cls(error.code, error.message, error.hint)


@dataclass(frozen=True)
class Question:
    """One row to predict.

    Attributes
    ----------
    program : TensorProgram
    device : DeviceSpec or str
        A specification, or the name of a known device.
    protocol : {"kernel", "graph", "eager"}
        What the latency includes: device time alone, launch inside a captured graph, a call from the host.
    framework : str or None
        Who launches a library kernel ("pytorch", "vllm", ...), where that is known.
    """

    program: TensorProgram
    device: DeviceSpec | str
    protocol: Protocol = DEFAULT_PROTOCOL
    framework: str | None = None


@dataclass(frozen=True)
class Prediction:
    """An answer; ``error`` is set when there is none, and then every figure is None.

    Attributes
    ----------
    latency_s : float
        Predicted run time in seconds, > 0.
    lower_s, upper_s : float
        The outermost of the requested quantiles, or ``latency_s`` where that lies outside.
    quantiles : dict of str to float
        Requested level (as text, "0.1") to seconds.
    domain : {"in", "near", "out"}
        Whether training covered the question; ``domain_score`` is the figure behind it (0 is closest).
    roofline_s : float
        max(arithmetic at peak, traffic at full bandwidth): a bound, not a prediction. Kernels that read
        from cache or save arithmetic (winograd) can be faster.
    """

    name: str
    program_hash: str | None
    device: str
    backend: str
    protocol: str
    framework: str | None
    model_id: str
    latency_s: float | None = None
    lower_s: float | None = None
    upper_s: float | None = None
    quantiles: dict[str, float] = field(default_factory=dict)
    domain: Label | None = None
    domain_score: float | None = None
    roofline_s: float | None = None
    error: ErrorInfo | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; an error instead of figures, never both."""
        out = asdict(self)
        if self.error is None:
            del out["error"]
        else:
            for key in _FIGURES:
                del out[key]
        return out


_FIGURES = ("latency_s", "lower_s", "upper_s", "quantiles", "domain", "domain_score", "roofline_s")


@dataclass(frozen=True)
class _Answer:
    """What the network says of a row, before quantiles are asked for."""

    log_point: float
    log_levels: Array
    score: float
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


def default_model() -> Path:
    """The model that ships with the package: in the wheel, or beside it in a checkout."""
    packed = Path(__file__).with_name("_models") / "base"
    return packed if packed.is_dir() else Path(__file__).parents[1] / "models" / "base"


class LatencyPredictor:
    """Predicts latencies with one loaded model. Safe to share between threads.

    Examples
    --------
    >>> predictor = LatencyPredictor.load()                                 # doctest: +SKIP
    >>> predictor.predict(["linear:m=512,n=4096,k=1024,dtype=float16"], "t4")[0].latency_s  # doctest: +SKIP
    """

    def __init__(self, artifact: Artifact, *, cache_rows: int = 200_000) -> None:
        self.artifact = artifact
        # A device is known by its figures, not by its name: a specification of one's own that calls
        # itself "t4" is not the T4 that was trained on, and the T4's figures under another name are.
        devices = artifact.trained_devices
        self._trained = {spec.digest(): (index, spec.name) for index, spec in reversed(devices)}
        self._peers = Peers(devices, artifact.domain)
        self._encoded = _Lru(20_000)
        self._answers = _Lru(cache_rows)

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
        _check_setting("protocol", protocol, PROTOCOLS)
        if framework is not None:
            _check_setting("framework", framework, FRAMEWORKS)
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
                _check_setting("protocol", question.protocol, PROTOCOLS)
                if question.framework is not None:
                    _check_setting("framework", question.framework, FRAMEWORKS)
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

    def encode(self, program: TensorProgram) -> EncodedPrograms:
        """Features of a program, remembered by its hash.

        Raises
        ------
        InvalidProgramError, UnsupportedOperatorError
            The program cannot be encoded.
        """
        found = self._encoded.get(program.hash)
        if found is None:
            if program.operator is not None:
                found = encode_operator(program.operator)
            else:
                schedule = self.artifact.network.config.schedule
                found = encode_tvm_json(program.tvm_json or "", program.function, schedule=schedule)
            if not np.isfinite(found.leaves).all() or not np.isfinite(found.totals).all():
                raise InvalidProgramError(
                    f"{program.name}: its sizes overflow the features",
                    hint="no loop nest of this size can run",
                )
            self._encoded.put(program.hash, found)
        encoded: EncodedPrograms = found
        return encoded

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
        domain = label(answer.score)
        factor = np.array([self.artifact.calibration[domain]])
        values = np.exp(read_quantiles(answer.log_levels[None], factor, levels)[0])
        point = float(np.exp(answer.log_point))
        seconds = {f"{level:g}": float(v) for level, v in zip(levels, values, strict=True)}
        return Prediction(
            question.program.name, key[0], key[3], question.program.backend, question.protocol,
            question.framework, self.model_id, point,
            # The point minimises the relative error and lies a little below the median.
            min(point, *seconds.values()), max(point, *seconds.values()), seconds,
            domain, round(answer.score, 4), answer.roofline,
        )  # fmt: skip

    def _compute(self, rows: list[tuple[Question, DeviceSpec]]) -> Iterable[_Answer]:
        if not rows:
            return []
        encoded = [self.encode(question.program) for question, _ in rows]
        store = ProgramStore.of(encoded, self.artifact.network.config.leaf_width)
        device = np.stack([device_numbers(spec) for _, spec in rows])
        codes = np.array(
            [
                (
                    BACKENDS.index(q.program.backend),
                    PROTOCOLS.index(q.protocol),
                    FRAMEWORKS.index(q.framework) if q.framework else -1,
                )
                for q, _ in rows
            ],
            dtype=np.int16,
        )
        identity = [self._trained.get(spec.digest(), (0, "")) for _, spec in rows]
        known = np.array([index for index, _ in identity], dtype=np.int64)
        every = np.arange(len(rows))
        ratio, levels, reference = self._forward(store, every, device, codes, known)
        self._ask_peers(rows, encoded, store, codes, known, ratio, levels)
        compute, memory = roofline_s(store.summary, device)
        scores = self.artifact.domain.score(
            store.summary,
            [
                Context(name, *_kind(q.program, e.dtype), q.protocol, q.program.backend, q.framework or "")
                for (q, _), e, (_, name) in zip(rows, encoded, identity, strict=True)
            ],
        )  # fmt: skip
        bound = np.maximum(compute, memory)
        point, levels = ratio + reference, levels + reference[:, None]
        answers = zip(point.tolist(), levels, scores.tolist(), bound.tolist(), strict=True)
        return [_Answer(*row) for row in answers]

    @torch.inference_mode()
    def _forward(
        self, store: ProgramStore, program: Array, device: Array, codes: Array, known: Array
    ) -> tuple[Array, Array, Array]:
        """Point and quantiles of log(latency / reference), and log(reference), per row; in fixed chunks."""
        inputs, logs, reference = question_inputs(store.summary[program], device, *codes.T)
        ratio, levels = np.empty(len(program)), np.empty((len(program), len(LEVELS)))
        for size, bucket in store.buckets.items():
            members = np.flatnonzero(store.bucket[program] == size)
            for start in range(0, len(members), CHUNK_ROWS):
                chosen = members[start : start + CHUNK_ROWS]
                # A short chunk repeats its first row: the shape of the computation stays the same.
                padded = np.concatenate([chosen, np.repeat(chosen[:1], CHUNK_ROWS - len(chosen))])
                slots = store.slot[program[padded]]
                p, q = self.artifact.network(
                    torch.from_numpy(bucket.leaves[slots]), torch.from_numpy(bucket.positions[slots]),
                    torch.from_numpy(bucket.mask[slots]), torch.from_numpy(inputs[padded]),
                    torch.from_numpy(logs[padded]), torch.from_numpy(known[padded]),
                )  # fmt: skip
                ratio[chosen] = p[: len(chosen)].double().numpy()
                levels[chosen] = q[: len(chosen)].double().numpy()
        return ratio, levels, reference

    def _ask_peers(
        self, rows: list[tuple[Question, DeviceSpec]], encoded: list[EncodedPrograms], store: ProgramStore,
        codes: Array, known: Array, ratio: Array, levels: Array,
    ) -> None:  # fmt: skip
        """Mix the known devices' opinion into the rows of unseen ones, in place."""
        asked: list[tuple[int, Trained]] = []
        for row in np.flatnonzero(known == 0).tolist():
            question, spec = rows[row]
            operator, dtype = _kind(question.program, encoded[row].dtype)
            peers = self._peers.of(spec.kind, operator, dtype, question.protocol, question.program.backend)
            asked.extend((row, peer) for peer in peers)
        if not asked:
            return
        row_of = np.array([row for row, _ in asked])
        opinions = self._forward(
            store, row_of, np.stack([device_numbers(peer) for _, (_, peer) in asked]), codes[row_of],
            np.array([index for _, (index, _) in asked], dtype=np.int64),
        )[0]  # fmt: skip
        for row in np.unique(row_of):
            by = shift(ratio[row : row + 1], opinions[None, row_of == row])
            ratio[row] += by[0]
            levels[row] += by[0]


def _kind(program: TensorProgram, dtype: str) -> tuple[str, str]:
    """Operator ("tir" for a program given as TIR) and element type: what the domain calls a question."""
    return (program.operator.operator if program.operator is not None else "tir"), dtype


def check_quantiles(quantiles: Sequence[float]) -> tuple[float, ...]:
    """At least one level, each within the network's range."""
    levels = tuple(float(q) for q in quantiles)
    if not levels or not all(LEVELS[0] <= q <= LEVELS[-1] for q in levels):
        raise DataError(
            f"quantiles {list(quantiles)} are not levels between {LEVELS[0]} and {LEVELS[-1]}",
            hint="for example 0.1 and 0.9 for an 80 % interval",
        )
    return levels


def _check_setting(what: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise DataError(f"{what} {value!r} is not known", hint="one of: " + ", ".join(known))


def _as_program(program: OperatorSpec | str | Mapping[str, Any]) -> TensorProgram:
    if isinstance(program, str | OperatorSpec):
        return TensorProgram.from_operator(program)
    return program_from_request(program)
