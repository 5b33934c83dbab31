"""Queries and predictions in bulk, as arrays, for callers with thousands of encoded programs.

A :class:`FeatureQueries` holds what the network reads of each program, so nothing is parsed or encoded
on the way to an answer; as safetensors bytes it is the binary body of ``POST /predict``. The features belong
to one version of the schema (:data:`cdmpp.features.schema.SCHEMA_HASH`), which is checked on reading.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from cdmpp.devices.loading import resolve_device
from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import DataError
from cdmpp.features.class_features import PROGRAM_COLUMNS
from cdmpp.features.encode import TIR, EncodedPrograms
from cdmpp.features.schedule import SCHEDULE_HASH, SCHEDULE_WIDTH
from cdmpp.features.schema import SCHEMA_HASH, WIDTH
from cdmpp.features.tensor_bytes import Layout, expect_format, numbers, read, texts, within, write
from cdmpp.features.walk import MAX_LEAVES
from cdmpp.model.domain.score import LABELS
from cdmpp.programs.elements import MAX_EXTENT
from cdmpp.programs.operators import operator_family, operator_types
from cdmpp.programs.query_options import (
    BACKENDS,
    DEFAULT_PROTOCOL,
    FRAMEWORKS,
    IMPLEMENTATIONS,
    PROTOCOLS,
    framework_code,
    implementation_of,
    launcher_of,
)
from cdmpp.programs.templates import is_class, size_names

ANSWERS_FORMAT = "cdmpp-feature-answers-1"
#: Labels of :attr:`FeatureAnswers.domain` by code.
DOMAINS = LABELS
_FIGURES: Layout = {
    **{name: ("f64", ("rows",)) for name in ("latency_s", "lower_s", "upper_s")},
    "quantiles": ("f64", ("rows", "levels")),
    "domain": ("i8", ("rows",)),
    "domain_score": ("f64", ("rows",)),
    "roofline_s": ("f64", ("rows",)),
}


@dataclass(frozen=True)
class FeatureAnswers:
    """Answers to :class:`FeatureQueries`, arrays of their n rows in their order."""

    #: float64, (n,): seconds, as in :class:`cdmpp.predict.prediction.Prediction`.
    latency_s: Array
    lower_s: Array
    upper_s: Array
    #: float64, (n, len(levels)): seconds at each of ``levels``.
    quantiles: Array
    #: int8, (n,): index into :data:`DOMAINS`.
    domain: Array
    #: float64, (n,): score of the domain, and roofline in seconds.
    domain_score: Array
    roofline_s: Array
    levels: tuple[float, ...]
    model_id: str

    def __len__(self) -> int:
        return len(self.latency_s)

    @property
    def labels(self) -> list[str]:
        """``domain`` in words."""
        return [DOMAINS[code] for code in self.domain.tolist()]

    @classmethod
    def none(cls, levels: tuple[float, ...], model_id: str) -> FeatureAnswers:
        """Answers to no queries."""
        empty = {name: np.zeros(0) for name in _FIGURES}
        empty |= {"quantiles": np.zeros((0, len(levels))), "domain": np.zeros(0, dtype=np.int8)}
        return cls(**empty, levels=levels, model_id=model_id)

    @classmethod
    def concat(cls, parts: Sequence[FeatureAnswers]) -> FeatureAnswers:
        """Rows of ``parts``, which are answers of one model to the same levels and not empty."""
        if len({(part.model_id, part.levels) for part in parts}) != 1:
            raise DataError("answers of several models or levels do not make one table")
        joined: dict[str, Any] = {name: np.concatenate([getattr(part, name) for part in parts]) for name in _FIGURES}
        return replace(parts[0], **joined)

    def take(self, rows: Array) -> FeatureAnswers:
        """Some rows."""
        return replace(self, **{name: getattr(self, name)[rows] for name in _FIGURES})

    def to_bytes(self) -> bytes:
        """Serialise as safetensors."""
        return write(
            {name: getattr(self, name) for name in _FIGURES},
            _FIGURES,
            {"format": ANSWERS_FORMAT, "model_id": self.model_id, "levels": json.dumps(self.levels)},
        )

    @classmethod
    def from_bytes(cls, body: bytes | bytearray | memoryview) -> FeatureAnswers:
        """Read what :meth:`to_bytes` wrote.

        Raises DataError: not such bytes.
        """
        tensors, metadata = read(body, _FIGURES)
        expect_format(metadata, ANSWERS_FORMAT)
        levels = numbers(texts(metadata, "levels"))
        if tensors["quantiles"].shape[1] != len(levels) or "model_id" not in metadata:
            raise DataError("the answers name no model, or not the levels of their quantiles")
        within("domain", tensors["domain"], 0, len(DOMAINS) - 1)
        return cls(**tensors, levels=levels, model_id=metadata["model_id"])


Array = np.ndarray[Any, np.dtype[Any]]


MEDIA_TYPE = "application/vnd.safetensors"
QUESTIONS_FORMAT = "cdmpp-feature-questions-1"
#: Feature schemas by width of a leaf: operator columns, or operator columns and a version of the schedule's.
SCHEMAS = {WIDTH: SCHEMA_HASH, WIDTH + SCHEDULE_WIDTH: f"{SCHEMA_HASH}+{SCHEDULE_HASH}"}
#: Bounds above those of any program: a magnitude is log2(1 + x) of a double; totals are doubles, which are
#: multiplied with a device's figures.
MAX_COLUMN, MAX_TOTAL = 1100.0, 1e200
MAX_POSITION = 2**24
MAX_QUANTILES, MAX_DEVICES, MAX_NAME = 16, 10_000, 200
_DTYPE = re.compile(r"[a-z][a-z0-9_]{0,31}")
_ROWS: Layout = {
    "leaves": ("f32", ("rows", "leaves", "columns")),
    "leaf_count": ("i32", ("rows",)),
    "positions": ("i32", ("rows", "leaves")),
    "totals": ("f64", ("rows", len(PROGRAM_COLUMNS))),
    "kind": ("i32", ("rows",)),
    "device": ("i32", ("rows",)),
    "backend": ("i8", ("rows",)),
    "protocol": ("i8", ("rows",)),
    "framework": ("i8", ("rows",)),
    "sizes": ("i32", ("rows", "size names")),
}
#: Bodies of earlier clients lack it.
_OPTIONAL = ("sizes",)


@dataclass(frozen=True)
class FeaturePart:
    """Encoded programs of one kind with the same device and options."""

    encoded: EncodedPrograms
    #: Its name, or "tir" for programs given as TIR.
    operator: str
    device: DeviceSpec | str
    #: As in :class:`cdmpp.predict.prediction.Query`.
    backend: str = "library"
    protocol: str = DEFAULT_PROTOCOL
    framework: str | None = None
    implementation: str | None = None

    @property
    def launcher(self) -> str | None:
        """The framework whose kernels answer, as :func:`cdmpp.programs.query_options.launcher_of` chooses it.

        Raises DataError: the framework or the implementation is not known.
        """
        for what, known in (("framework", FRAMEWORKS), ("implementation", IMPLEMENTATIONS)):
            if getattr(self, what) is not None:
                _code(what, getattr(self, what), known)
        if self.backend == "tvm":
            return self.framework
        implementation = implementation_of(self.operator, self.framework, self.implementation)
        return launcher_of(self.operator, self.framework, implementation)


@dataclass(frozen=True)
class FeatureQueries:
    """n queries as arrays, padded to one leaf count L."""

    #: float32, (n, L, W): leaf vectors; W is the schema's width, with or without the schedule's columns.
    leaves: Array
    #: int32, (n,): how many of the L are the program's own, 1 to L; what stands behind them is not read.
    leaf_count: Array
    positions: Array  #: int32, (n, L)
    totals: Array  #: float64, (n, len(PROGRAM_COLUMNS))
    #: int32, (n,): index into ``kinds`` and ``devices``.
    kind: Array
    device: Array
    #: int8, (n,): index into BACKENDS, PROTOCOLS and FRAMEWORKS (-1: not known) of :mod:`cdmpp.programs.query_options`.
    #: The framework is that of :attr:`FeaturePart.launcher`, so the arrays need no implementation.
    backend: Array
    protocol: Array
    framework: Array
    #: Operator's name ("tir" for programs given as TIR) and the element type of the first argument.
    kinds: tuple[tuple[str, str], ...]
    devices: tuple[DeviceSpec | str, ...]
    #: Levels to answer.
    quantiles: tuple[float, ...] = (0.1, 0.9)
    #: Which model answers; None: the loaded one.
    model: str | None = None
    #: Structural class of each of ``kinds``, "" where it is not known.
    structures: tuple[str, ...] = ()
    #: int32, (n, s): sizes of operators, as in :class:`EncodedPrograms`; 0 where they are not known. A type that
    #: training did not have for an operator is predicted from its 16-bit type, whose features these sizes give.
    sizes: Array = field(default_factory=lambda: np.zeros((0, 0), dtype=np.int32))

    def __post_init__(self) -> None:
        if not self.structures:
            object.__setattr__(self, "structures", ("",) * len(self.kinds))
        if self.sizes.shape == (0, 0):
            object.__setattr__(self, "sizes", np.zeros((len(self.leaves), 0), dtype=np.int32))

    def __len__(self) -> int:
        return len(self.leaves)

    @classmethod
    def of(
        cls, parts: Sequence[FeaturePart], *, quantiles: Sequence[float] = (0.1, 0.9), model: str | None = None
    ) -> FeatureQueries:
        """The rows of ``parts`` in order.

        Raises DataError: an option or operator is not known, or features are not finite.
        """
        counts = [len(part.encoded) for part in parts]
        edges = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        rows = int(edges[-1])
        longest = max((part.encoded.leaves.shape[1] for part in parts), default=1)
        width = max((part.encoded.leaves.shape[2] for part in parts), default=WIDTH)
        leaves = np.zeros((rows, longest, width), dtype=np.float32)
        positions = np.zeros((rows, longest), dtype=np.int32)
        totals = np.zeros((rows, len(PROGRAM_COLUMNS)))
        sizes = np.zeros((rows, max((_sizes(part).shape[1] for part in parts), default=0)), dtype=np.int32)
        kinds: dict[tuple[str, str, str], int] = {}
        devices: dict[str, int] = {}
        listed: list[DeviceSpec | str] = []
        codes = np.zeros((len(parts), 6), dtype=np.int32)
        # Most parts share one specification object, whose text is expensive to make.
        known: dict[int, int] = {}
        for i, part in enumerate(parts):
            encoded, place = part.encoded, slice(int(edges[i]), int(edges[i + 1]))
            launcher = part.launcher
            real = encoded.leaves.shape[1]
            leaves[place, :real, : encoded.leaves.shape[2]] = encoded.leaves
            positions[place, :real] = encoded.positions
            totals[place] = encoded.totals
            known_sizes = _sizes(part)
            sizes[place, : known_sizes.shape[1]] = known_sizes
            structure = encoded.structure if known_sizes.shape[1] else ""
            number = known.get(id(part.device))
            if number is None:
                spec = part.device
                key = spec if isinstance(spec, str) else spec.model_dump_json()
                number = known[id(spec)] = devices.setdefault(key, len(devices))
                if number == len(listed):
                    listed.append(spec)
            codes[i] = (
                real,
                kinds.setdefault((part.operator, encoded.dtype, structure), len(kinds)),
                number,
                _code("backend", part.backend, BACKENDS),
                _code("protocol", part.protocol, PROTOCOLS),
                framework_code(launcher),
            )
        repeated = np.repeat(codes, counts, axis=0)
        made = cls(
            leaves=leaves,
            leaf_count=repeated[:, 0],
            positions=positions,
            totals=totals,
            kind=repeated[:, 1],
            device=repeated[:, 2],
            backend=repeated[:, 3].astype(np.int8),
            protocol=repeated[:, 4].astype(np.int8),
            framework=repeated[:, 5].astype(np.int8),
            kinds=tuple((operator, dtype) for operator, dtype, _ in kinds),
            devices=tuple(listed),
            quantiles=tuple(map(float, quantiles)),
            model=model,
            structures=tuple(structure for _, _, structure in kinds),
            sizes=sizes,
        )
        made.check()
        return made

    @property
    def families(self) -> tuple[str, ...]:
        """Operator family of each of ``kinds``, as in :class:`EncodedPrograms`."""
        return tuple(TIR if operator == TIR else operator_family(operator) for operator, _ in self.kinds)

    def take(self, rows: Array) -> FeatureQueries:
        """The rows with these positions; kinds and devices are not changed."""
        return replace(self, **{name: getattr(self, name)[rows] for name in _ROWS})

    def check(self) -> None:
        """Raise :class:`DataError` unless the arrays have matching shapes and valid values.

        Device names and quantile levels are checked by the predictor, not here.
        """
        if self.leaves.shape[2:] not in [(width,) for width in SCHEMAS]:
            raise DataError(f"a leaf has {self.leaves.shape[2]} columns", hint=f"one of {', '.join(map(str, SCHEMAS))}")
        longest = self.leaves.shape[1]
        if not 1 <= longest <= MAX_LEAVES:
            raise DataError(f"programs are padded to {longest} leaves", hint=f"1 to {MAX_LEAVES}")
        within("leaf_count", self.leaf_count, 1, longest)
        within("positions", self.positions, 0, MAX_POSITION)
        within("kind", self.kind, 0, len(self.kinds) - 1)
        within("device", self.device, 0, len(self.devices) - 1)
        for name, known in (("backend", BACKENDS), ("protocol", PROTOCOLS), ("framework", FRAMEWORKS)):
            within(name, getattr(self, name), -1 if name == "framework" else 0, len(known) - 1)
        within("leaves", self.leaves, -MAX_COLUMN, MAX_COLUMN)
        within("totals", self.totals, 0.0, MAX_TOTAL)
        for name in ("matrix", "work_fraction"):
            within(f"totals, {name}", self.totals[:, PROGRAM_COLUMNS.index(name)], 0.0, 1.0)
        for operator, dtype in self.kinds:
            known_dtypes = operator_types()[operator].dtypes if operator in operator_types() else ()
            if operator != TIR and operator not in operator_types():
                raise DataError(f"kinds: operator {operator!r} is not known", hint="GET /support lists them")
            if not _DTYPE.fullmatch(dtype) or (known_dtypes and dtype not in known_dtypes):
                raise DataError(f"kinds: {operator} has no element type {dtype!r}")
        self._check_sizes()
        levels = self.quantiles
        if not 1 <= len(levels) <= MAX_QUANTILES or not all(math.isfinite(q) and 0 < q < 1 for q in levels):
            raise DataError(f"quantiles: 1 to {MAX_QUANTILES} levels between 0 and 1 are needed")

    def _check_sizes(self) -> None:
        if len(self.structures) != len(self.kinds):
            raise DataError(f"{len(self.structures)} structures for {len(self.kinds)} kinds")
        within("sizes", self.sizes, 0, MAX_EXTENT)
        for number, ((operator, dtype), structure) in enumerate(zip(self.kinds, self.structures, strict=True)):
            if not structure:
                continue
            if not structure.startswith(f"{operator}:{dtype}") or not is_class(structure):
                raise DataError(f"structures: {structure[:100]!r} is no structure of {operator} with {dtype}")
            if self.sizes.shape[1] < len(size_names(operator)):
                raise DataError(f"sizes: {operator} has {len(size_names(operator))}, not {self.sizes.shape[1]}")
            if operator_family(operator) == "moe":
                self._check_loads(operator, number)

    def _check_loads(self, operator: str, number: int) -> None:
        """Refuse sizes of a layer of experts that its specification refuses: loads are computed expert by expert."""
        rows = np.flatnonzero(self.kind == number)
        names = size_names(operator)
        sizes = dict(zip(names, self.sizes[rows, : len(names)].astype(np.int64).T, strict=True))
        rules = [(sizes[name] < 1, f"{name} is 0", "") for name in names]
        for broken, problem, hint in (*rules, *operator_types()[operator].violations(sizes)):
            if np.any(broken):
                raise DataError(f"sizes: row {int(rows[np.argmax(broken)])}, {operator}: {problem}", hint=hint)

    def to_bytes(self) -> bytes:
        """Serialise as safetensors; names and devices go into the metadata."""
        return write(
            {name: getattr(self, name) for name in _ROWS},
            _ROWS,
            {
                "format": QUESTIONS_FORMAT,
                "feature_schema": SCHEMAS[self.leaves.shape[2]],
                "kinds": json.dumps(self.kinds),
                "structures": json.dumps(self.structures),
                "devices": json.dumps([d if isinstance(d, str) else _fields(d) for d in self.devices]),
                "quantiles": json.dumps(self.quantiles),
                "model": json.dumps(self.model),
            },
        )

    @classmethod
    def from_bytes(cls, body: bytes | bytearray | memoryview) -> FeatureQueries:
        """Inverse of :meth:`to_bytes`; checks all content.

        Raises DataError: not such bytes, of another version of the features, or a value that cannot be;
        InvalidDeviceError: a device specification is invalid.
        """
        tensors, metadata = read(body, _ROWS, _OPTIONAL)
        expect_format(metadata, QUESTIONS_FORMAT)
        width = tensors["leaves"].shape[2]
        if width in SCHEMAS and metadata.get("feature_schema") != SCHEMAS[width]:
            raise DataError(
                f"the features are of schema {metadata.get('feature_schema', 'unknown')[:80]!r}, "
                f"this is {SCHEMAS[width]!r}",
                hint="encode the programs with the service's version of cdmpp, or send them as JSON",
            )
        kinds, devices = texts(metadata, "kinds"), texts(metadata, "devices")
        levels, model = texts(metadata, "quantiles"), texts(metadata, "model")
        made = cls(
            **tensors,
            kinds=_kinds(kinds),
            structures=_structures(texts(metadata, "structures")) if "structures" in metadata else (),
            devices=_devices(devices),
            quantiles=numbers(levels),
            model=_text_or_none(model),
        )
        made.check()
        return made


def _fields(device: DeviceSpec) -> dict[str, Any]:
    fields: dict[str, Any] = device.model_dump(mode="json", exclude_none=True)
    return fields


def _code(what: str, value: str, known: Sequence[str]) -> int:
    if value not in known:
        raise DataError(f"{what} {value!r} is not known", hint="one of: " + ", ".join(known))
    return known.index(value)


def _sizes(part: FeaturePart) -> Array:
    return np.zeros((len(part.encoded), 0)) if part.encoded.sizes is None else part.encoded.sizes


def _structures(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise DataError("metadata 'structures' is not a list of texts")
    return tuple(value)


def _kinds(value: Any) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair) for pair in value
    ):
        raise DataError("metadata 'kinds' is not a list of [operator, element type]")
    return tuple((operator, dtype) for operator, dtype in value)


def _devices(value: Any) -> tuple[DeviceSpec | str, ...]:
    named = isinstance(value, list) and len(value) <= MAX_DEVICES
    if not named or not all(isinstance(d, dict) or (isinstance(d, str) and len(d) <= MAX_NAME) for d in value):
        raise DataError(f"metadata 'devices' is not a list of at most {MAX_DEVICES} names or specifications")
    return tuple(resolve_device(d, str) for d in value)


def _text_or_none(value: Any) -> str | None:
    if value is not None and not (isinstance(value, str) and len(value) <= MAX_NAME):
        raise DataError("metadata 'model' is neither null nor the name of a model")
    return value
