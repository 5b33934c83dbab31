"""Predict every row of measured tables and say how far off the predictions are (``cdmpp eval``).

A table's distinct programs are encoded once, some thousands at a time, and the rows that ask for them go
through the network in large batches: memory is bounded by the table's own columns. The figures are those
of :class:`cdmpp.predictor.LatencyPredictor` on the same rows, but for the last digits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from cdmpp.data.table import MeasurementTable
from cdmpp.devices.registry import lookup
from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import UnknownDeviceError
from cdmpp.evaluation.cache import FeatureCache
from cdmpp.evaluation.chunks import ProgramChunk, program_chunks
from cdmpp.evaluation.metrics import measure
from cdmpp.evaluation.ranking import rank
from cdmpp.nn.artifact import Artifact
from cdmpp.nn.batch import Inputs, predict_rows
from cdmpp.nn.calibration import read_quantiles
from cdmpp.nn.domain import THRESHOLDS, Context
from cdmpp.nn.inputs import stack_devices
from cdmpp.nn.peers import Peers, ask_peers
from cdmpp.programs.question import BACKENDS, FRAMEWORKS, PROTOCOLS

Array = np.ndarray[Any, np.dtype[Any]]
Group = tuple[str, str, str]

#: The interval whose coverage is reported.
INTERVAL = (0.1, 0.9)
#: Latencies outside are slips of units or of the clock: a relative error of 10^300 says nothing.
BELIEVABLE_S = (1e-9, 1e6)


class HasArtifact(Protocol):
    """A LatencyPredictor, for one."""

    @property
    def artifact(self) -> Artifact:
        """The loaded model."""


@dataclass(frozen=True)
class TableRows:
    """Rows to predict as numbers, arrays of one length; see :class:`cdmpp.nn.batch.QuestionRows`."""

    program: Array
    device: Array
    backend: Array
    protocol: Array
    framework: Array

    def __len__(self) -> int:
        return len(self.program)

    def take(self, rows: Array) -> TableRows:
        """Some rows."""
        return TableRows(**{name: getattr(self, name)[rows] for name in self.__dataclass_fields__})

    def distinct(self) -> tuple[Array, Array]:
        """Rows that are the first of their kind, and for every row which of these it equals."""
        code = np.zeros(len(self), dtype=np.int64)
        for column in vars(self).values():
            code = code * (int(column.max(initial=0)) + 2) + column + 1  # -1 stands for "not known"
        _, first, inverse = np.unique(code, return_index=True, return_inverse=True)
        return first, inverse.reshape(-1)


@dataclass
class _Scores:
    """What all tables together gave: per predicted row its group and latencies, and the rest counted."""

    groups: dict[Group, int] = field(default_factory=dict)
    #: Group, measured, point, lower, upper; task and device, program (-1: of no task).
    columns: list[tuple[Array, ...]] = field(default_factory=list)
    #: (task, device name in the file) and program hash, numbered over all tables.
    tasks: dict[tuple[str, str], int] = field(default_factory=dict)
    schedules: dict[str, int] = field(default_factory=dict)
    unsupported: Counter[tuple[str, str, str, str]] = field(default_factory=Counter)

    def result(self) -> dict[str, Any]:
        columns = [np.concatenate(parts) for parts in zip(*self.columns, strict=True)]
        group, measured, point, lower, upper, task, schedule = columns or [np.zeros(0)] * 7

        def figures(rows: Any) -> dict[str, Any]:
            found = measure(point[rows], measured[rows], lower[rows], upper[rows])
            if (task[rows] >= 0).any():
                found |= rank(point[rows], measured[rows], task[rows], schedule[rows])
            return found

        order = np.argsort(group, kind="stable")
        edges = np.searchsorted(group[order], np.arange(len(self.groups) + 1))
        groups = []
        for (source, device, op), code in sorted(self.groups.items()):
            rows = order[edges[code] : edges[code + 1]]
            if len(rows):
                groups.append({"source": source, "device": device, "op": op, **figures(rows)})
        return {
            "overall": figures(slice(None)),
            "groups": groups,
            "unsupported": [
                {"source": source, "device": device, "op": op, "reason": reason, "n": n}
                for (source, device, op, reason), n in sorted(self.unsupported.items())
            ],
        }


def evaluate(
    model: Artifact | HasArtifact,
    tables: Iterable[MeasurementTable],
    *,
    devices: Collection[str] | None = None,
    cache: FeatureCache | None = None,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Errors of a model on measured tables.

    Parameters
    ----------
    model : Artifact or LatencyPredictor
    tables : iterable of MeasurementTable
        Read one after the other: pass a generator, and only one is in memory at a time.
    devices : collection of str, optional
        Only rows of these devices: names or aliases that cdmpp knows, or names as a table has them.
    cache : FeatureCache, optional
        For programs given as TVM JSON.
    progress : callable, optional
        Called with the number of rows done since the last call.

    Returns
    -------
    dict
        ``overall``: the figures of :func:`cdmpp.evaluation.metrics.measure` over all predicted rows, each
        row of equal weight, and of :func:`cdmpp.evaluation.ranking.rank` where programs are schedules of
        tasks; ``groups``: the same by ``source``, ``device`` and ``op``, the latter two as
        the file names them; ``unsupported``: how many rows (``n``) of which group were not predicted, and
        the ``reason``: a code of :data:`cdmpp.data.table.UNSUPPORTED`, ``failed``, ``no_latency``,
        ``latency_not_positive``, ``latency_not_believable`` (outside 1 ns to 10^6 s), or
        ``invalid_program`` with what is wrong with the program. Every row is in one of the two.

    Raises
    ------
    UnknownDeviceError
        A name in ``devices`` that neither cdmpp nor any table knows.
    """
    artifact = model if isinstance(model, Artifact) else model.artifact
    wanted = None if devices is None else {*devices, *(d.name for d in map(_known, devices) if d)}
    scores, kept = _Scores(), cache or FeatureCache(schedule=artifact.network.config.schedule)
    unmatched = {name for name in devices or () if _known(name) is None}
    for table in tables:
        unmatched -= set(table.device_name.names)
        _evaluate_table(artifact, table, wanted, kept, scores, progress or (lambda _: None))
    for name in sorted(unmatched):
        lookup(name)  # says which names are near
    return scores.result()


def _evaluate_table(
    artifact: Artifact, table: MeasurementTable, wanted: set[str] | None, cache: FeatureCache,
    scores: _Scores, progress: Callable[[int], None],
) -> None:  # fmt: skip
    chosen = np.ones(len(table), dtype=np.bool_)
    if wanted is not None:
        chosen = _rows_of(table, wanted)
    reason = _reasons(table)
    lost = np.flatnonzero(chosen & (reason != ""))
    _count(scores, table, lost, reason[lost])
    rows = np.flatnonzero(chosen & (reason == ""))
    progress(len(table) - len(rows))
    if not len(rows):
        return
    rows = rows[np.argsort(table.program_key[rows], kind="stable")]
    keys = table.program_key[rows]
    group, schedules = _groups(scores, table, rows), _schedules(scores, table, rows)
    device_names = sorted({table.device.names[code] for code in np.unique(table.device.codes[rows])})
    specs = [table.device_spec(name) for name in device_names]
    numbers = TableRows(
        program=keys,
        device=_codes(table.device.names, device_names)[table.device.codes[rows]],
        backend=_codes(table.backend.names, BACKENDS)[table.backend.codes[rows]],
        protocol=_codes(table.protocol.names, PROTOCOLS)[table.protocol.codes[rows]],
        framework=_codes(table.framework.names, FRAMEWORKS)[table.framework.codes[rows]],
    )
    needed = np.zeros(table.n_programs, dtype=np.bool_)
    needed[keys] = True
    for chunk in program_chunks(table, needed, cache):
        low, high = np.searchsorted(keys, [chunk.first, chunk.first + len(chunk.kind)])
        index = np.arange(low, high)
        if chunk.failed:
            bad = np.isin(keys[index] - chunk.first, list(chunk.failed))
            why = [chunk.failed[key] for key in (keys[index[bad]] - chunk.first).tolist()]
            _count(scores, table, rows[index[bad]], np.array(why, dtype=object))
            index = index[~bad]
        if len(index):
            part = numbers.take(index)
            part = TableRows(**{**vars(part), "program": part.program - chunk.first})
            # A question is asked once, however often it was measured: equal rows get equal answers.
            first, same = part.distinct()
            point, bounds = (v[same] for v in _predict(artifact, chunk, part.take(first), specs))
            low_s, high_s = np.exp(bounds).T
            point_s = np.exp(point)
            # The same widening as in a Prediction: the point may lie below the interval.
            bounds_s = np.minimum(low_s, point_s), np.maximum(high_s, point_s)
            ranked = (column[index] for column in schedules)
            latency_s = table.latency_s[rows[index]]
            scores.columns.append((group[index], latency_s, point_s, *bounds_s, *ranked))
        progress(int(high - low))


def _predict(
    artifact: Artifact, chunk: ProgramChunk, rows: TableRows, specs: list[DeviceSpec]
) -> tuple[Array, Array]:
    """log latency and log bounds of the interval, per row."""
    # As in the predictor: a device is known by its figures, and one of two twins stands for both.
    indexed = artifact.trained_devices
    trained = {spec.digest(): (i, spec.name) for i, spec in reversed(indexed)}
    identity = [trained.get(spec.digest(), (0, "")) for spec in specs]
    # The trained devices stand below the table's: they speak for those that the network does not know.
    inputs = Inputs(chunk.store, stack_devices([*specs, *(spec for _, spec in indexed)]))
    embedding = np.array([index for index, _ in (*identity, *indexed)])
    row_of = {index: len(specs) + position for position, (index, _) in enumerate(indexed)}
    point, levels = predict_rows(artifact.network, inputs, rows, embedding=embedding)
    unseen = np.flatnonzero(embedding[rows.device] == 0)
    peers = Peers(indexed, artifact.domain)
    for members, question in _same_question(chunk, rows, unseen, specs):
        point[members], levels[members] = ask_peers(
            artifact.network, inputs, rows.take(members), point[members], levels[members],
            [row_of[index] for index, _ in peers.of(*question)], embedding,
        )  # fmt: skip
    used, program = np.unique(rows.program, return_inverse=True)
    score = artifact.domain.strangeness(chunk.store.summary[used])[program]
    score = score + _steps(artifact, chunk, rows, [name for _, name in identity])
    factor = np.array([artifact.calibration[name] for name in ("in", "near", "out")])
    label = (score > THRESHOLDS[0]).astype(np.int64) + (score > THRESHOLDS[1])
    return point, read_quantiles(levels, factor[label], INTERVAL)


def _same_question(
    chunk: ProgramChunk, rows: TableRows, chosen: Array, specs: list[DeviceSpec]
) -> Iterator[tuple[Array, tuple[str, str, str, str, str]]]:
    """The chosen rows by device kind and kind of question."""
    kinds = sorted({spec.kind for spec in specs})
    kind = np.array([kinds.index(spec.kind) for spec in specs])[rows.device[chosen]]
    columns = [kind, chunk.kind[rows.program[chosen]], rows.protocol[chosen], rows.backend[chosen]]
    distinct, inverse = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
    for i, (device, program, protocol, backend) in enumerate(distinct.tolist()):
        operator, dtype = chunk.kinds[program]
        members = chosen[inverse.reshape(-1) == i]
        yield members, (kinds[device], operator, dtype, PROTOCOLS[protocol], BACKENDS[backend])


def _steps(artifact: Artifact, chunk: ProgramChunk, rows: TableRows, trained_names: list[str]) -> Array:
    """The part of the domain score that says whether training had the context: once per distinct one."""
    columns = np.stack(
        [rows.device, chunk.kind[rows.program], rows.protocol, rows.backend, rows.framework], axis=1
    )
    distinct, inverse = np.unique(columns, axis=0, return_inverse=True)
    steps = []
    for device, kind, protocol, backend, framework in distinct.tolist():
        launcher = FRAMEWORKS[framework] if framework >= 0 else ""
        operator, dtype = chunk.kinds[kind]
        asked = (PROTOCOLS[protocol], BACKENDS[backend], launcher)
        steps.append(artifact.domain.step(Context(trained_names[device], operator, dtype, *asked)))
    return np.array(steps)[inverse.reshape(-1)]


def _known(name: str) -> DeviceSpec | None:
    try:
        return lookup(name)
    except UnknownDeviceError:
        return None


def _rows_of(table: MeasurementTable, wanted: Collection[str]) -> Array:
    """Mask of the rows whose device goes by one of these names, canonical or as the file has it."""
    canonical = np.array([name in wanted for name in table.device.names])
    written = np.array([name in wanted for name in table.device_name.names])
    mask: Array = canonical[table.device.codes] | written[table.device_name.codes]
    return mask


def _reasons(table: MeasurementTable) -> Array:
    """Why a row cannot be evaluated, "" where it can."""
    reason = table.unsupported.array()
    reason[(reason == "") & table.failed] = "failed"
    with np.errstate(invalid="ignore"):
        reason[(reason == "") & (table.latency_s <= 0)] = "latency_not_positive"
    reason[(reason == "") & ~np.isfinite(table.latency_s)] = "no_latency"
    believable = (table.latency_s >= BELIEVABLE_S[0]) & (table.latency_s <= BELIEVABLE_S[1])
    reason[(reason == "") & ~believable] = "latency_not_believable"
    return reason


def _groups(scores: _Scores, table: MeasurementTable, rows: Array) -> Array:
    """Group of each row, numbered over all tables."""
    codes = np.stack([labels.codes[rows] for labels in (table.source, table.device_name, table.op)], axis=1)
    distinct, inverse = np.unique(codes, axis=0, return_inverse=True)
    number = [
        scores.groups.setdefault(
            (table.source.names[s], table.device_name.names[d], table.op.names[o]), len(scores.groups)
        )
        for s, d, o in distinct.tolist()
    ]
    return np.array(number, dtype=np.int64)[inverse.reshape(-1)]


def _schedules(scores: _Scores, table: MeasurementTable, rows: Array) -> tuple[Array, Array]:
    """Of each row: task and device, and program, numbered over all tables; -1 where there is no task."""
    task, program = np.full(len(rows), -1, dtype=np.int64), np.full(len(rows), -1, dtype=np.int64)
    position = table.program_key[rows] - table.tvm.first_key
    for i in np.flatnonzero(position >= 0).tolist():
        name = table.tvm.tasks[position[i]]
        if name:
            device = table.device_name[int(rows[i])]
            task[i] = scores.tasks.setdefault((name, device), len(scores.tasks))
            digest = table.tvm.hashes[position[i]]
            program[i] = scores.schedules.setdefault(digest, len(scores.schedules))
    return task, program


def _count(scores: _Scores, table: MeasurementTable, rows: Array, reasons: Array) -> None:
    labels = (table.source.take(rows), table.device_name.take(rows), table.op.take(rows))
    scores.unsupported.update(zip(*(column.array() for column in labels), reasons, strict=True))


def _codes(names: Iterable[str], known: Iterable[str]) -> Array:
    """Index of each name among the known ones, -1 where it is not there ("" for no framework)."""
    index = {name: i for i, name in enumerate(known)}
    return np.array([index.get(name, -1) for name in names], dtype=np.int64)
