"""From queries to predictions: what is encoded, computed and remembered on the way.

Work is done once per call and not once per row wherever that changes no figure: operators that share a
lowered structure are encoded together, rows go through the network together, quantiles are read together.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from cdmpp.artifact.model import Artifact
from cdmpp.devices.spec import DeviceSpec
from cdmpp.domain.calibration import read_quantiles
from cdmpp.domain.score import label
from cdmpp.errors import CdmppError, InvalidProgramError
from cdmpp.features.encode import EncodedPrograms, encode_operators, encode_tvm_json, finite, overflow
from cdmpp.features.encoded import TIR, EncodedProgram, operator_name
from cdmpp.inference.pipeline import InferencePipeline
from cdmpp.nn.inputs import roofline_s, stack_devices
from cdmpp.nn.rows import QueryBatch, QueryRows
from cdmpp.nn.store import ProgramStore
from cdmpp.prediction import ErrorInfo, Prediction, Query, check_settings
from cdmpp.programs.program import TensorProgram
from cdmpp.programs.query_options import BACKENDS, FRAMEWORKS, PROTOCOLS

Array = np.ndarray[Any, np.dtype[Any]]
Value = TypeVar("Value")

#: Bytes of encoded programs that are remembered, and names of devices.
ENCODED_BYTES, NAMED_DEVICES = 1 << 24, 4096
#: Figures of a row as they are remembered, before quantiles are asked for; the network's levels follow.
_POINT, _FACTOR, _SCORE, _COVERAGE, _ROOFLINE, _LEVELS = range(6)


class Key(NamedTuple):
    """What an answer depends on, apart from the model, and the device's name, which it repeats."""

    program: str
    backend: str
    device: str
    name: str
    protocol: str
    framework: str | None


class Lru(Generic[Value]):
    """A bounded dictionary that forgets the least recently used; safe between threads.

    Parameters
    ----------
    most : int
        Of the sum of weights.
    """

    def __init__(self, most: int) -> None:
        self._most, self._sum, self._lock = most, 0, threading.Lock()
        self._items: OrderedDict[Any, tuple[Value, int]] = OrderedDict()

    def get(self, key: Any) -> Value | None:
        """What was put, or None."""
        with self._lock:
            found = self._items.get(key)
            if found is None:
                return None
            self._items.move_to_end(key)
            return found[0]

    def put(self, key: Any, value: Value, weight: int = 1) -> None:
        """Remember a value; one that weighs more than all may is not."""
        with self._lock:
            old = self._items.pop(key, None)
            self._sum -= old[1] if old is not None else 0
            if weight > self._most:
                return
            self._sum += weight
            self._items[key] = (value, weight)
            while self._sum > self._most:
                self._sum -= self._items.popitem(last=False)[1][1]


class RowAnswers:
    """Answers rows with one model. Safe to share between threads.

    Parameters
    ----------
    artifact : Artifact
    cache_rows : int
        Answers that are remembered.
    threads : int
        Of the network.
    """

    def __init__(self, artifact: Artifact, cache_rows: int, threads: int = 1) -> None:
        self.artifact = artifact
        self.pipeline = InferencePipeline(artifact, one_by_one=True, threads=threads)
        self._encoded: Lru[EncodedPrograms] = Lru(ENCODED_BYTES)
        self._figures: Lru[Array] = Lru(cache_rows)
        self._named: Lru[tuple[DeviceSpec, str]] = Lru(NAMED_DEVICES)

    def predict(self, queries: Sequence[Query], levels: tuple[float, ...]) -> list[Prediction]:
        """Predictions in the order of the queries; what is wrong with a query is its answer's error."""
        results: list[Prediction | None] = [None] * len(queries)
        keys: dict[int, Key] = {}
        figures: dict[Key, Array] = {}
        missing: dict[Key, tuple[Query, DeviceSpec]] = {}
        device_of = self._devices()
        for i, query in enumerate(queries):
            try:
                spec, digest = device_of(query.device)
                check_settings(query.protocol, query.framework)
                program = query.program
                key = Key(program.hash, program.backend, digest, spec.name, query.protocol, query.framework)
            except CdmppError as error:
                results[i] = self._failed(query, error)
                continue
            keys[i] = key
            if key in figures or key in missing:
                continue
            known = self._figures.get(key)
            if known is not None:
                figures[key] = known
            else:
                missing[key] = (query, spec)
        errors: dict[Key, CdmppError] = {}
        if missing:
            encoded = self._encode_all([query.program for query, _ in missing.values()])
            sound = []
            for key, found in zip(missing, encoded, strict=True):
                if isinstance(found, CdmppError):
                    errors[key] = found
                else:
                    sound.append((key, *missing[key], found))
            for (key, *_), row in zip(sound, self._compute(sound), strict=True):
                figures[key] = row
                self._figures.put(key, row)
        answered = [(i, key) for i, key in keys.items() if key not in errors]
        for i, key in keys.items():
            if key in errors:
                results[i] = self._failed(queries[i], errors[key])
        for (i, _), prediction in zip(answered, self._read(queries, answered, figures, levels), strict=True):
            results[i] = prediction
        return [result for result in results if result is not None]

    def encode(self, program: TensorProgram | EncodedProgram) -> EncodedPrograms:
        """Features of a program, remembered by its hash; of one that comes encoded, its own.

        Raises
        ------
        InvalidProgramError, UnsupportedOperatorError
            The program cannot be encoded.
        """
        [found] = self._encode_all([program])
        if isinstance(found, CdmppError):
            raise found
        return found

    # -- inside -----------------------------------------------------------------------------------------
    def _devices(self) -> Callable[[DeviceSpec | str], tuple[DeviceSpec, str]]:
        """Looks a device and its digest up, an object once per call and a name once."""
        seen: dict[int, tuple[DeviceSpec, str]] = {}

        def find(device: DeviceSpec | str) -> tuple[DeviceSpec, str]:
            # The queries keep their devices alive, so no two of them share an id during the call.
            place = id(device)
            if place not in seen:
                named = self._named.get(device) if isinstance(device, str) else None
                if named is None:
                    spec = self.artifact.device(device) if isinstance(device, str) else device
                    named = spec, spec.digest()
                    if isinstance(device, str):
                        self._named.put(device, named)
                seen[place] = named
            return seen[place]

        return find

    def _encode_all(self, programs: Sequence[TensorProgram | EncodedProgram]) -> list[EncodedPrograms | CdmppError]:
        """Features of programs, or why there are none."""
        found: dict[str, EncodedPrograms | CdmppError] = {}
        operators: dict[str, TensorProgram] = {}
        encoded = []
        for program in programs:
            if isinstance(program, EncodedProgram) or program.hash in found or program.hash in operators:
                continue
            known = self._encoded.get(program.hash)
            if known is not None:
                found[program.hash] = known
            elif program.operator is not None:
                operators[program.hash] = program
            else:
                found[program.hash] = self._one(program)
        for key, each in zip(operators, self._operators(list(operators.values())), strict=True):
            found[key] = each
            self._keep(key, each)
        for program in programs:
            if isinstance(program, EncodedProgram):
                encoded.append(self._as_read(program))
            else:
                encoded.append(found[program.hash])
        return encoded

    def _operators(self, programs: Sequence[TensorProgram]) -> Sequence[EncodedPrograms | CdmppError]:
        specs = [program.operator for program in programs if program.operator is not None]
        try:
            return encode_operators(specs)
        except CdmppError as error:
            if len(programs) == 1:
                return [error]
            # An operator that does not exist for its type spoils no other.
            return [self._operators([program])[0] for program in programs]

    def _one(self, program: TensorProgram) -> EncodedPrograms | CdmppError:
        """A program given as TIR."""
        try:
            found = encode_tvm_json(program.tvm_json or "", program.function, schedule=self.artifact.config.schedule)
        except CdmppError as error:
            return error
        if not finite(found).all():
            return overflow(program.name)
        self._keep(program.hash, found)
        return found

    def _keep(self, key: str, found: EncodedPrograms | CdmppError) -> None:
        if isinstance(found, EncodedPrograms):
            self._encoded.put(key, found, found.leaves.nbytes + found.totals.nbytes + 500)

    def _as_read(self, program: EncodedProgram) -> EncodedPrograms | CdmppError:
        """Features that came encoded, with the columns that the network reads."""
        features, width = program.features, self.artifact.config.leaf_width
        if features.leaves.shape[2] < width and program.operator == TIR:
            return InvalidProgramError(
                f"{program.name}: its features lack the schedule's columns", hint="encode it with schedule=True"
            )
        return features.narrow(width)

    def _compute(self, rows: Sequence[tuple[Key, Query, DeviceSpec, EncodedPrograms]]) -> Iterable[Array]:
        """Figures of rows as they are remembered."""
        if not rows:
            return []
        store = ProgramStore.of((encoded for *_, encoded in rows), self.artifact.config.leaf_width)
        kinds: dict[tuple[str, str], int] = {}
        specs: dict[tuple[str, str], int] = {}
        devices: list[DeviceSpec] = []
        numbers = []
        for key, query, spec, encoded in rows:
            device = specs.setdefault((key.device, key.name), len(specs))
            if device == len(devices):
                devices.append(spec)
            kind = kinds.setdefault((operator_name(query.program), encoded.dtype), len(kinds))
            framework = FRAMEWORKS.index(key.framework) if key.framework else -1
            numbers.append((kind, device, BACKENDS.index(key.backend), PROTOCOLS.index(key.protocol), framework))
        kind_of, device_of, backend, protocol, framework_of = np.array(numbers).T
        asked = QueryBatch(
            store,
            list(kinds),
            kind_of,
            devices,
            QueryRows(np.arange(len(rows)), device_of, backend, protocol, framework_of),
        )
        output = self.pipeline.predict(asked)
        bound = np.maximum(*roofline_s(store.summary, stack_devices(devices)[device_of]))
        table = np.column_stack([output.point, output.factor, output.score, output.coverage, bound, output.levels])
        # Copies: a view would keep the whole table as long as any of its rows is remembered.
        return [row.copy() for row in table]

    def _read(
        self,
        queries: Sequence[Query],
        answered: Sequence[tuple[int, Key]],
        figures: dict[Key, Array],
        levels: tuple[float, ...],
    ) -> list[Prediction]:
        """Predictions of answered queries, their quantiles read together."""
        if not answered:
            return []
        table = np.stack([figures[key] for _, key in answered])
        points = np.exp(table[:, _POINT])
        values = np.exp(read_quantiles(table[:, _LEVELS:], table[:, _FACTOR], levels))
        # The point minimises the relative error and lies a little below the median.
        lower = np.minimum(points, values.min(axis=1)).tolist()
        upper = np.maximum(points, values.max(axis=1)).tolist()
        names, model_id = [f"{level:g}" for level in levels], self.artifact.model_id
        scores, coverage = table[:, _SCORE].tolist(), table[:, _COVERAGE].tolist()
        bounds, seconds = table[:, _ROOFLINE].tolist(), points.tolist()
        return [
            Prediction(
                queries[i].program.name,
                key.program,
                key.name,
                key.backend,
                key.protocol,
                key.framework,
                model_id,
                seconds[row],
                lower[row],
                upper[row],
                dict(zip(names, each, strict=True)),
                label(coverage[row]),
                round(scores[row], 4),
                bounds[row],
            )
            for row, ((i, key), each) in enumerate(zip(answered, values.tolist(), strict=True))
        ]

    def _failed(self, query: Query, error: CdmppError) -> Prediction:
        program = query.program
        device = query.device if isinstance(query.device, str) else query.device.name
        try:
            digest: str | None = program.hash
        except CdmppError:
            digest = None
        return Prediction(
            program.name,
            digest,
            device,
            program.backend,
            query.protocol,
            query.framework,
            self.artifact.model_id,
            error=ErrorInfo.of(error),
        )
