"""From queries to answers: network, peers and adapter in one place, for every door.

The predictor asks for some rows and wants figures that do not depend on the company of a row; evaluation
asks for hundreds of thousands and wants speed. Both go through :class:`InferencePipeline`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from cdmpp.devices.spec import DeviceSpec
from cdmpp.nn.adapter_features import FeatureMaker
from cdmpp.nn.artifact import Artifact
from cdmpp.nn.domain import THRESHOLDS, Context
from cdmpp.nn.engine import NetworkOutput, all_threads
from cdmpp.nn.inputs import stack_devices
from cdmpp.nn.levels import LEVELS
from cdmpp.nn.peers import Peers, Trained, as_peers, shift, weights
from cdmpp.nn.rows import RowInputs
from cdmpp.nn.store import ProgramStore
from cdmpp.programs.query_options import BACKENDS, FRAMEWORKS, PROTOCOLS

Array = np.ndarray[Any, np.dtype[Any]]

_LOW, _HIGH = LEVELS.index(0.1), LEVELS.index(0.9)
#: Rows that go to the network in one call.
BLOCK_ROWS = 65_536
#: What the width of an interval (a natural logarithm) adds to the domain score.
SPREAD_STEP = 2.0
#: What an unseen device adds to the distance from training, over the number of architectures that were
#: trained on its query: from one nothing can be learned about another.
FEW_STEP = 1.0


@dataclass(frozen=True)
class Queries:
    """Rows to predict as numbers, arrays of one length; see :class:`cdmpp.nn.rows.QueryRows`."""

    program: Array
    device: Array
    backend: Array
    protocol: Array
    framework: Array

    def __len__(self) -> int:
        return len(self.program)

    def take(self, rows: Array) -> Queries:
        """Some rows."""
        return Queries(**{name: getattr(self, name)[rows] for name in self.__dataclass_fields__})

    @classmethod
    def concat(cls, parts: Sequence[Queries]) -> Queries:
        """Rows of ``parts``, which is not empty, one after the other."""
        return cls(**{n: np.concatenate([getattr(p, n) for p in parts]) for n in cls.__dataclass_fields__})

    def distinct(self) -> tuple[Array, Array]:
        """Rows that are the first of their kind, and for every row which of these it equals."""
        code = np.zeros(len(self), dtype=np.int64)
        for column in vars(self).values():
            code = code * (int(column.max(initial=0)) + 2) + column + 1  # -1 stands for "not known"
        _, first, inverse = np.unique(code, return_index=True, return_inverse=True)
        return first, inverse.reshape(-1)


@dataclass(frozen=True)
class QueryBatch:
    """Queries with what they refer to.

    Attributes
    ----------
    store : ProgramStore
        ``rows.program`` are its keys.
    kinds : sequence of (operator, dtype)
        As the domain names programs ("tir" for one given as TIR).
    kind : (programs,) int
        Index into ``kinds`` per key.
    specs : sequence of DeviceSpec
        ``rows.device`` are their positions.
    """

    store: ProgramStore
    kinds: Sequence[tuple[str, str]]
    kind: Array
    specs: Sequence[DeviceSpec]
    rows: Queries


@dataclass(frozen=True)
class Answers:
    """What is said of each query, arrays of one length.

    Attributes
    ----------
    point : (n,)
        log of the predicted seconds.
    levels : (n, len(LEVELS))
        log quantiles, before :func:`cdmpp.nn.calibration.read_quantiles` scales them by ``factor``.
    factor : (n,)
    coverage : (n,)
        How far a query lies from what was trained on: decides over label and factor.
    """

    point: Array
    levels: Array
    factor: Array
    coverage: Array

    @property
    def score(self) -> Array:
        """Domain score, (n,): ranks queries by the error to expect of them.

        Coverage tells a new device from a known one; among the queries of either, the width of the
        calibrated 80 % interval tells a convolution that a library may run in ten ways from a copy.
        """
        width = (self.levels[:, _HIGH] - self.levels[:, _LOW]) * self.factor
        return np.asarray(self.coverage + SPREAD_STEP * width)


@dataclass(frozen=True)
class BaseOutput:
    """What network and peers say, before an adapter; arrays of one length.

    Attributes
    ----------
    point, levels
        As in :class:`Answers`.
    peers : (n, trained devices) float32
        The peers' opinions: log(latency / reference); NaN for those that were not asked.
    view : (n, VIEW_COLUMNS) float32
        The last hidden layer in few columns; only where it was asked for, as ``peers``.
    strangeness, step : (n,)
        The two parts of the domain score.
    """

    point: Array
    levels: Array
    peers: Array | None
    view: Array | None
    strangeness: Array
    step: Array


class InferencePipeline:
    """Answers queries with one artifact.

    Parameters
    ----------
    artifact : Artifact
    one_by_one : bool
        Every figure as if its query were asked alone, to the last digit.
    threads : int, optional
        Of the network. Default: one where queries are answered one by one, which services do in several
        threads of their own; else :func:`cdmpp.nn.engine.all_threads`.
    """

    def __init__(self, artifact: Artifact, *, one_by_one: bool = False, threads: int | None = None) -> None:
        self.artifact, self._one_by_one = artifact, one_by_one
        count = threads or (1 if one_by_one else all_threads())
        self._engine = artifact.weights.engine(count)
        # A device is known by its figures, not by its name: a specification of one's own that calls
        # itself "t4" is not the T4 that was trained on, and the T4's figures under another name are.
        self._devices = artifact.trained_devices
        self._trained = known_devices(self._devices)
        self._trained_matrix = stack_devices([spec for _, spec in self._devices])
        self._peers = Peers(self._devices, artifact.domain)
        adapter = artifact.adapter
        self._features = FeatureMaker(artifact.weights, adapter.names) if adapter is not None else None
        self._tuned = None
        if adapter is not None and adapter.tuned is not None and adapter.weight:
            self._tuned = artifact.weights.tuned(adapter.tuned).engine(count)

    def answer(self, asked: QueryBatch) -> Answers:
        """Answer queries, in their order."""
        adapter = self.artifact.adapter
        adapts = adapter is not None and bool(adapter.weight)
        base = self.base(asked, seen=adapts)
        coverage = base.strangeness + base.step
        answers = Answers(base.point, base.levels, self.factor(coverage), coverage)
        if adapts:
            self._adapt(asked, base, answers)
        return answers

    def factor(self, coverage: Array) -> Array:
        """Calibrated factor on the intervals of queries of this coverage."""
        calibration = np.array([self.artifact.calibration[name] for name in ("in", "near", "out")])
        factor: Array = calibration[(coverage > THRESHOLDS[0]).astype(int) + (coverage > THRESHOLDS[1])]
        return factor

    def base(self, asked: QueryBatch, *, seen: bool = True) -> BaseOutput:
        """What network and peers say: the answers of the base of an adapted model.

        ``seen``: whether :attr:`BaseOutput.view` and :attr:`BaseOutput.peers` are wanted.
        """
        rows = asked.rows
        found = self._figures(asked.specs)
        identity = [(index, spec.name if index else "") for index, spec in found]
        specs = [spec for _, spec in found]
        # The trained devices stand below the query's: they speak for those that are not known.
        inputs = RowInputs(asked.store, self._matrix(specs))
        embedding = np.array([index for index, _ in (*identity, *self._devices)])
        column_of = {index: position for position, (index, _) in enumerate(self._devices)}
        # Queries and what their peers are asked go through the network together.
        unseen, parts = np.flatnonzero(embedding[rows.device] == 0), [rows]
        asking: list[tuple[Array, Array, list[int]]] = []
        few = np.zeros(len(rows))
        for members, spec, query in _same_query(asked, unseen):
            known = self._peers.of(spec.kind, spec.vendor, *query)
            if not known:
                continue
            columns = [column_of[index] for index, _ in known]
            asking.append((members, weights(spec, query[1], [peer for _, peer in known]), columns))
            parts.append(as_peers(rows.take(members), [len(specs) + column for column in columns]))
            few[members] = FEW_STEP / len({peer.arch for _, peer in known})
        said, efficiency = self._ask(inputs, Queries.concat(parts), len(rows), embedding, seen)
        point, levels = said.point, said.levels
        opinions = np.full((len(rows), len(self._devices)), np.nan, dtype=np.float32) if seen else None
        start = len(rows)
        for members, weight, columns in asking:
            stop = start + len(members) * len(columns)
            theirs = efficiency[start:stop].reshape(len(members), len(columns))
            start = stop
            by = shift(efficiency[members], theirs, weight)
            point[members] += by
            levels[members] += by[:, None]
            if opinions is not None:
                opinions[members[:, None], np.array(columns)[None, :]] = theirs
        used, program = np.unique(rows.program, return_inverse=True)
        strangeness = self.artifact.domain.strangeness(asked.store.summary[used])[program.reshape(-1)]
        step = _steps(self.artifact, asked, [name for _, name in identity]) + few
        return BaseOutput(point, levels, opinions, said.view, strangeness, step)

    def _ask(
        self, inputs: RowInputs, rows: Queries, own: int, embedding: Array, seen: bool
    ) -> tuple[NetworkOutput, Array]:
        """What is said of the first ``own`` rows; and log(latency / reference) of all."""
        efficiency, said = np.empty(len(rows)), []
        for start in range(0, len(rows), BLOCK_ROWS):
            part = rows.take(np.arange(start, min(start + BLOCK_ROWS, len(rows))))
            answer = self._engine.predict(
                inputs, part, embedding=embedding, alone=self._one_by_one, view=seen and start < own
            )
            efficiency[start : start + len(part)] = answer.point - answer.reference
            if start < own:
                said.append(answer.first(own - start))
        return NetworkOutput.concat(said), efficiency

    def tuning(self, asked: QueryBatch) -> Array:
        """What the tuned weights add to the log latency of queries, (n,)."""
        assert self._tuned is not None
        found = self._figures(asked.specs)
        inputs = RowInputs(asked.store, stack_devices([spec for _, spec in found]))
        # The tuned vector stands in place of "not one that was trained on".
        hidden = np.zeros(len(asked.specs), dtype=np.int64)
        identity = np.array([index for index, _ in found])
        alone = self._one_by_one
        tuned = self._tuned.predict(inputs, asked.rows, embedding=hidden, alone=alone)
        own = self._engine.predict(inputs, asked.rows, embedding=identity, alone=alone)
        return np.asarray(tuned.point - own.point)

    def _matrix(self, specs: Sequence[DeviceSpec]) -> Array:
        """Figures of devices, with the trained devices' below."""
        return np.concatenate([stack_devices(specs), self._trained_matrix])

    def _figures(self, specs: Sequence[DeviceSpec]) -> list[Trained]:
        """:func:`as_trained`; the adapted device has the figures that it was adapted with."""
        found = as_trained(self._trained, specs)
        adapter = self.artifact.adapter
        if adapter is None:
            return found
        mine = data_sheet(adapter.device)
        return [(index, adapter.device if not index and data_sheet(spec) == mine else spec) for index, spec in found]

    def _adapt(self, asked: QueryBatch, base: BaseOutput, answers: Answers) -> None:
        """Put the adapter's answers in place of the base's, where the device is the adapted one."""
        adapter, maker = self.artifact.adapter, self._features
        assert adapter is not None and maker is not None and base.peers is not None and base.view is not None
        device = data_sheet(adapter.device)
        mine = np.array([data_sheet(spec) == device for spec in asked.specs])
        members = np.flatnonzero(mine[asked.rows.device])
        if not len(members):
            return
        specs = [spec for _, spec in self._figures(asked.specs)]
        part = QueryBatch(asked.store, asked.kinds, asked.kind, specs, asked.rows.take(members))
        features = maker.features(part, base.peers[members], base.view[members])
        delta = self.tuning(part) if self._tuned is not None else np.zeros(len(members))
        point, levels, unsure = adapter.apply(
            base.point[members] + delta, base.levels[members] + delta[:, None], features, one_by_one=self._one_by_one
        )
        answers.point[members], answers.levels[members] = point, levels
        answers.factor[members] = adapter.width
        answers.coverage[members] = base.strangeness[members] + base.step[members] * unsure


@lru_cache(maxsize=1024)
def data_sheet(spec: DeviceSpec) -> str:
    """Digest of a device's data sheet: one that brings ceilings is still that device."""
    return spec.nominal().digest()


def known_devices(devices: Sequence[Trained]) -> dict[str, Trained]:
    """Trained devices by the digest of their data sheet."""
    return {data_sheet(spec): (i, spec) for i, spec in reversed(devices)}


def as_trained(known: dict[str, Trained], specs: Sequence[DeviceSpec]) -> list[Trained]:
    """Index (0: not trained on) and figures of devices.

    A trained device has the figures that it was trained with, ceilings from its training rows among them.
    """
    return [known.get(data_sheet(spec), (0, spec)) for spec in specs]


def _same_query(asked: QueryBatch, chosen: Array) -> Iterator[tuple[Array, DeviceSpec, tuple[str, str, str, str]]]:
    """The chosen rows by device and kind of query (operator, type, protocol, backend)."""
    rows = asked.rows
    kind = asked.kind[rows.program[chosen]]
    columns = [rows.device[chosen], kind, rows.protocol[chosen], rows.backend[chosen]]
    distinct, inverse = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
    for i, (device, program, protocol, backend) in enumerate(distinct.tolist()):
        operator, dtype = asked.kinds[program]
        members = chosen[inverse.reshape(-1) == i]
        yield members, asked.specs[device], (operator, dtype, PROTOCOLS[protocol], BACKENDS[backend])


def _steps(artifact: Artifact, asked: QueryBatch, trained_names: list[str]) -> Array:
    """The part of the domain score that says whether training had the context: once per distinct one."""
    rows = asked.rows
    columns = np.stack([rows.device, asked.kind[rows.program], rows.protocol, rows.backend, rows.framework], axis=1)
    distinct, inverse = np.unique(columns, axis=0, return_inverse=True)
    steps = []
    for device, kind, protocol, backend, framework in distinct.tolist():
        launcher = FRAMEWORKS[framework] if framework >= 0 else ""
        operator, dtype = asked.kinds[kind]
        setting = (PROTOCOLS[protocol], BACKENDS[backend], launcher)
        steps.append(artifact.domain.step(Context(trained_names[device], operator, dtype, *setting)))
    return np.array(steps)[inverse.reshape(-1)]
