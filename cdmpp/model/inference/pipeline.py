"""Inference on queries: network, peers and adapter in one class.

The predictor sends a few rows and needs results that do not depend on the other rows of the batch. Evaluation
sends hundreds of thousands and needs speed. Both use :class:`InferencePipeline`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from cdmpp.devices.spec import DeviceSpec
from cdmpp.features.encode import TIR, EncodedProgram, element_types, operator_name
from cdmpp.model.adapter import FeatureMaker
from cdmpp.model.artifact.model import Artifact
from cdmpp.model.domain.evidence import ADAPTED, Evidence, QueryKind, contexts_of, kinds_of
from cdmpp.model.domain.peers import (
    Peers,
    Trained,
    as_peers,
    carried_shift,
    corrects,
    interval_factor,
    rule_of,
    weights,
)
from cdmpp.model.domain.score import NEAR_STEP, THRESHOLDS, Context, limited_step
from cdmpp.model.inference.alike import Alike
from cdmpp.model.inference.boosting import boost, booster_code
from cdmpp.model.inference.consistency import ADJUSTMENTS, ISSUE_REASON, NO_UNITS, REASONS, REPLACED, Rules
from cdmpp.model.inference.engine import all_threads, engine_of, network_queries
from cdmpp.model.inference.limits import limit
from cdmpp.model.nn.figures import stack_devices
from cdmpp.model.nn.inputs import roofline_s
from cdmpp.model.nn.rows import BLOCK_ROWS, QueryBatch, QueryRows, RowInputs, concatenate, distinct_rows
from cdmpp.model.raw_predictions import RawPredictions
from cdmpp.programs.elements import base_type
from cdmpp.programs.program import TensorProgram
from cdmpp.programs.query_options import BACKENDS, PROTOCOLS, framework_code, implementation_of

Array = np.ndarray[Any, np.dtype[Any]]

#: Step of an unseen device, divided by the number of peer architectures: one architecture alone is weak evidence
#: about another.
FEW_STEP = 1.0
#: A service computes several batches at a time.
MAX_THREADS = 4
#: Reasons that are remembered.
MAX_REASONS = 4096
#: Device, protocol and framework ("": none) of a query.
Where = tuple[DeviceSpec, str, str]
_TVM, _PYTORCH = BACKENDS.index("tvm"), framework_code("pytorch")


class InferencePipeline:
    """Predicts queries with one model.

    ``one_by_one``: compute each query independently of the others, equal to the last digit. ``threads`` compute a large
    batch; with ``one_by_one`` the results do not depend on it. Default:
    :func:`cdmpp.model.inference.engine.all_threads`, with ``one_by_one`` at most :data:`MAX_THREADS`.
    """

    def __init__(self, artifact: Artifact, *, one_by_one: bool = False, threads: int | None = None) -> None:
        self._scheduled: InferencePipeline | None = None
        if artifact.scheduled is not None:
            inner = artifact.part(scheduled=True)
            self._scheduled = InferencePipeline(inner, one_by_one=one_by_one, threads=threads)
            artifact = artifact.part(scheduled=False)
        self.artifact, self._one_by_one = artifact, one_by_one
        count = threads or (min(all_threads(), MAX_THREADS) if one_by_one else all_threads())
        # Threads of one network call change the last digits; chunks that are computed at the same time do not.
        count, self._parallel_chunks = (1, count) if one_by_one else (count, 1)
        self._engine = engine_of(artifact.weights, count)
        # Devices are matched by their figures, not by name: a custom specification named "t4" is not the T4
        # of the training set, and the T4's figures under another name are.
        self._devices = artifact.trained_devices
        self._trained = known_devices(self._devices)
        self._trained_matrix = stack_devices([spec for _, spec in self._devices])
        self._nominal_matrix = stack_devices([spec.nominal() for _, spec in self._devices])
        self._embedding = np.array([index for index, _ in self._devices], dtype=np.intp)
        self._column_of = {index: position for position, index in enumerate(self._embedding.tolist())}
        self._peers = Peers(self._devices, artifact.domain)
        adapter = artifact.adapter
        self._features = FeatureMaker(artifact.weights, adapter.names) if adapter is not None else None
        self.evidence = Evidence(artifact.domain.contexts, self._adapter_contexts(), artifact.domain.host_bound)
        self._rules, self._alike = Rules(self.evidence), Alike(self.evidence, [spec for _, spec in self._devices])
        self._reasons: dict[tuple[Any, ...], str] = {}

    def forward(self, batch: QueryBatch) -> RawPredictions:
        """Predictions before calibration, in the order of the queries, with the adapter where the model has one.

        Predictions of one program agree across protocols and types (:mod:`cdmpp.model.inference.consistency`). Programs
        of backend ``tvm`` are predicted by the model's part for them, if it has one. Raises InvalidProgramError where a
        prediction depends on the program's 16-bit form, which the batch lacks.
        """
        tvm = batch.rows.backend == _TVM
        if self._scheduled is None or not tvm.any():
            return _with_roofline(batch, self._predict(batch))
        if tvm.all():
            return self._scheduled.forward(batch)
        parts = [
            (rows, pipeline.forward(replace(batch, rows=batch.rows.take(rows))))
            for pipeline, rows in ((self, np.flatnonzero(~tvm)), (self._scheduled, np.flatnonzero(tvm)))
        ]
        return RawPredictions.placed(parts)

    def _predict(self, batch: QueryBatch) -> RawPredictions:
        names = self._evidence_names(batch.specs)
        queries, batch = batch, self._with_measured_engines(batch, names)
        output = self._predict_possible(batch, names)
        alike = self._alike.of(batch, names)
        if alike is not None:
            output = alike.apply(output, self._predict_possible(alike.batch, self._evidence_names(alike.batch.specs)))
        other = (batch.rows.framework != queries.rows.framework) & (queries.rows.framework >= 0)
        codes = output.adjusted.astype(np.int8) | np.where(other, ADJUSTMENTS["engine"], 0).astype(np.int8)
        output = _with_status(batch, replace(output, adjusted=codes))
        return replace(output, adjusted=output.adjusted + NO_UNITS * self._lacks_units(batch, names))

    def _lacks_units(self, batch: QueryBatch, names: Sequence[str]) -> Array:
        """Whether the device has no units for the type (:meth:`Evidence.lacks_units`), (n,) bool."""
        rows, lacks = batch.rows, []
        columns = [rows.device, batch.kind[rows.program], rows.backend]
        first, inverse = distinct_rows(columns)
        for device, number, backend in np.stack([c[first] for c in columns], axis=1).tolist():
            operator, dtype = batch.kinds[number]
            kind = QueryKind(names[device], operator, dtype, BACKENDS[backend])
            lacks.append(self.evidence.lacks_units(kind, batch.specs[device]))
        return np.array(lacks, dtype=np.bool_)[inverse]

    def _predict_possible(self, batch: QueryBatch, names: Sequence[str]) -> RawPredictions:
        """Predictions that agree across protocols and types, within the physical bounds."""
        consistency = self._rules.consistency(batch, names)
        if consistency is None:
            output = self._predict_independently(batch)
        else:
            output = consistency.apply(self._predict_independently(consistency.batch), self)
        return limit(batch, *self._measured_limits(batch, names), output)

    def _with_measured_engines(self, batch: QueryBatch, names: Sequence[str]) -> QueryBatch:
        """The queries with the frameworks whose kernels answer them (:meth:`Evidence.measured_engine`)."""
        kinds, row = kinds_of(batch, names)
        codes = [framework_code(self.evidence.measured_engine(kind, framework)) for kind, framework in kinds]
        return replace(
            batch, rows=replace(batch.rows, framework=np.array(codes, dtype=batch.rows.framework.dtype)[row])
        )

    def _measured_limits(self, batch: QueryBatch, names: Sequence[str]) -> tuple[Array, Array]:
        """Factors on the physical limits, (n,) each, from the measured rows of a query's operator on the device.

        :meth:`Domain.fast_share` and :meth:`Domain.slow_factor`; 0 and infinite for what the model was adapted to, and
        infinite for what a framework composes of several kernels.
        """
        kinds, row = kinds_of(batch, names)
        domain, fast, slow = self.artifact.domain, [], []
        for kind, framework in kinds:
            context = (kind.device, kind.operator, framework)
            adapted = self.evidence.was_adapted(kind)
            composed = implementation_of(kind.operator, framework) == "composed"
            fast.append(0.0 if adapted else domain.fast_share(*context))
            slow.append(np.inf if composed or adapted else domain.slow_factor(*context))
        return np.array(fast)[row], np.array(slow)[row]

    def _counts_as_unseen(self, batch: QueryBatch, names: Sequence[str]) -> Array:
        """Whether training had no row of the operator on the device (:meth:`Evidence.lacks`), (n,) bool."""
        kinds, row = kinds_of(batch, names)
        return np.array([self.evidence.lacks(kind, framework) for kind, framework in kinds], dtype=np.bool_)[row]

    def needs_other_predictions(self, batch: QueryBatch) -> bool:
        """Whether a prediction of the batch depends on others."""
        return self._rules.consistency(batch, self._evidence_names(batch.specs)) is not None

    def half_type(self, operator: str, dtype: str, backend: str) -> str | None:
        """The 16-bit type whose features :meth:`forward` may need beside those of a program; None: it does not."""
        if self._scheduled is not None and backend == BACKENDS[_TVM]:
            return self._scheduled.half_type(operator, dtype, backend)
        return self.evidence.may_need_half(operator, dtype, backend)

    def reason(self, program: TensorProgram | EncodedProgram, where: Where, row: tuple[int, bool, bool]) -> str:
        """Why a prediction is not the network's own, and why it is not "in"; "" where it is both.

        ``where``: device, protocol, framework ("": none). ``row``: :attr:`RawPredictions.adjusted`; whether the
        distance, and the coverage, are beyond those of "in".
        """
        if self._scheduled is not None and program.backend == BACKENDS[_TVM]:
            return self._scheduled.reason(program, where, row)
        kind = QueryKind("", operator_name(program), element_types(program), program.backend)
        kind = kind._replace(dtype="") if kind.operator == TIR else kind
        key = (kind, where, row)
        if key not in self._reasons:
            if len(self._reasons) > MAX_REASONS:
                self._reasons.clear()
            self._reasons[key] = "; ".join(self._explain(*key))
        return self._reasons[key]

    def _explain(self, kind: QueryKind, where: Where, row: tuple[int, bool, bool]) -> Iterator[str]:
        (device, protocol, framework), (adjusted, is_far, is_doubtful) = where, row
        _, operator, types, backend, _ = kind
        half = self.half_type(operator, types, backend) or self.evidence.half_type(operator, backend, types)
        named = REASONS | ({ADJUSTMENTS["limit"]: ISSUE_REASON} if operator == TIR else {})
        for code, text in named.items():
            if code & adjusted:
                yield text.format(operator=operator, half=half, dtype=base_type(types))
        if not is_doubtful:
            return
        [name] = self._evidence_names([device])
        if lacking := self.artifact.domain.lacking(Context(name, operator, types, protocol, backend, framework)):
            yield lacking
        elif self.evidence.lacks(kind._replace(device=name), framework):
            yield f"training had {operator} on {device.name} in another implementation only"
        elif not (adjusted or is_far):
            yield "training had it with other schedules or sizes only"
        if is_far:
            yield "its sizes are outside those of training"
        if names := self._relatives(kind, where):
            yield f"carried over from {names}"

    def _relatives(self, kind: QueryKind, where: Where) -> str:
        """The peers of most weight of an unseen device, at most three, as "t4 (60 %), p4 (40 %)"; "" without peers."""
        device, protocol, framework = where
        [(index, spec)], [name] = self._figures([device]), self._evidence_names([device])
        is_known = index and not self.evidence.lacks(kind._replace(device=name), framework)
        if is_known or not corrects(spec.kind, kind.operator):
            return ""
        implementation = implementation_of(kind.operator, "pytorch" if framework == "pytorch" else None)
        peers = self._peers.of(
            spec.kind, spec.vendor, kind.operator, kind.dtype, protocol, kind.backend, implementation
        )
        if not peers:
            return ""
        weight = weights(spec, kind.operator, kind.dtype or "float32", tuple(peer for _, peer in peers))
        largest = [i for i in np.argsort(-weight, kind="stable")[:3].tolist() if weight[i]]
        return ", ".join(f"{peers[i][1].name} ({100 * weight[i]:.0f} %)" for i in largest)

    def _predict_independently(self, batch: QueryBatch) -> RawPredictions:
        adapter = self.artifact.adapter
        if adapter is None or not adapter.weight:
            return self.predict_base(batch, details=False)
        return self._adapted(batch, self.predict_base(batch))

    def factor(self, coverage: Array) -> Array:
        """Calibrated factor on the intervals of queries of this coverage."""
        calibration = np.array([self.artifact.calibration[name] for name in ("in", "near", "out")])
        factor: Array = calibration[(coverage > THRESHOLDS[0]).astype(int) + (coverage > THRESHOLDS[1])]
        return factor

    def _open_factor(self, batch: QueryBatch, trained_names: Sequence[str]) -> Array:
        """Further factor for queries without a framework that several frameworks answer with unlike kernels."""
        rows, factor = batch.rows, np.ones(len(batch.rows))
        wider, open_ = self.artifact.calibration.get("open", 1.0), np.flatnonzero(batch.rows.framework < 0)
        if wider == 1.0 or not len(open_):
            return factor
        columns = [c[open_] for c in (rows.device, batch.kind[rows.program], rows.protocol, rows.backend)]
        several = self.evidence.several_frameworks(trained_names, batch.kinds, columns)
        factor[open_[several]] = wider
        return factor

    def distance(self, batch: QueryBatch) -> Array:
        """Distance of the queries' programs from the training programs."""
        programs, position = np.unique(batch.rows.program, return_inverse=True)
        return self.artifact.domain.program_distance(batch.store.summary[programs])[position.reshape(-1)]

    def steps(self, batch: QueryBatch) -> Array:
        """Part of the domain score for contexts that training did not have, without peers."""
        names = [spec.name if index else "" for index, spec in self._figures(batch.specs)]
        contexts, context = contexts_of(batch.rows, batch.kind, batch.kinds, names)
        return np.array([self._step(each) for each in contexts])[context]

    def _step(self, context: Context) -> float:
        """:meth:`cdmpp.model.domain.score.Domain.step`; the context may have rows of another implementation only."""
        step = self.artifact.domain.step(context)
        query = QueryKind(context.device, context.operator, context.dtype, context.backend)
        lacks = context.device and self.evidence.lacks(query, context.framework)
        return max(step, NEAR_STEP) if lacks else step

    def _booster_codes(self, contexts: Sequence[Context]) -> Array:
        boosters, known = self.artifact.boosters, self.artifact.domain.contexts
        return np.array([-1 if boosters is None else booster_code(boosters, known, each) for each in contexts])

    def _evidence_names(self, specs: Sequence[DeviceSpec]) -> list[str]:
        """Names of devices in :attr:`evidence`: "" for a device that the model has no measurements of."""
        names = []
        for spec in specs:
            index, figures = find_trained(self._trained, spec)
            names.append(figures.name if index else ADAPTED if self._is_adapted(spec) else "")
        return names

    def _adapter_contexts(self) -> list[Context]:
        """Contexts of the records that the model was adapted with."""
        adapter = self.artifact.adapter
        if adapter is None or not adapter.weight:
            return []
        [name] = self._evidence_names([adapter.device])
        features = adapter.process.features
        pairs = np.unique(np.stack([features.operator, features.setting], axis=1), axis=0).tolist()
        return [adapter.names.context(name, operator, setting) for operator, setting in pairs]

    def predict_base(self, batch: QueryBatch, *, details: bool = True) -> RawPredictions:
        """Predict queries with network and peers, without the adapter.

        ``details``: return :attr:`RawPredictions.view` and :attr:`RawPredictions.peers`.
        """
        batch, trained, names = self._add_devices_without_embedding(batch)
        rows = batch.rows
        specs = [spec for _, spec in trained]
        # The trained devices follow the query's devices in the matrix: they are peers of unseen ones.
        matrix = stack_devices(specs)
        inputs = RowInputs(batch.store, np.concatenate([matrix, self._trained_matrix]))
        nominal = RowInputs(batch.store, np.concatenate([matrix, self._nominal_matrix]))
        embedding = np.concatenate([np.array([index for index, _ in trained], dtype=np.intp), self._embedding])
        # The queries and the same queries on peer devices go through the network together.
        unseen, parts = np.flatnonzero(embedding[rows.device] == 0), [rows]
        groups: list[tuple[Array, DeviceSpec, str, Array, Array, Array]] = []
        moved: list[tuple[DeviceSpec, str, Array, tuple[Array, Array]]] = []
        contexts, context = contexts_of(rows, batch.kind, batch.kinds, names)
        step = np.array([self._step(each) for each in contexts])[context]
        for members, spec, kind in _by_kind(batch, unseen):
            peers = self._peers.of(spec.kind, spec.vendor, *kind)
            if not peers:
                continue
            weight = weights(spec, *kind[:2], tuple(peer for _, peer in peers))
            counts = (weight > 0) & corrects(spec.kind, kind[0])
            computed = np.ones(len(peers), dtype=bool) if details else counts
            columns = np.array([self._column_of[index] for index, _ in peers])[computed]
            groups.append((members, spec, kind[0], weight[counts], columns, counts[computed]))
            parts.append(as_peers(rows.take(members), len(specs) + columns))
            step[members] += FEW_STEP / len({peer.arch for _, peer in peers})
        every = concatenate(parts)
        if len(every) > len(rows):
            trained_names = [spec.name for _, spec in self._devices]
            contexts, context = contexts_of(every, batch.kind, batch.kinds, [*names, *trained_names])
        code = self._booster_codes(contexts)[context]
        output, every_point, reference = self._run(inputs, every, code, len(rows), embedding, details)
        point, levels = output.point, output.levels
        opinions = np.full((len(rows), len(self._devices)), np.nan, dtype=np.float32) if details else None
        start = len(rows)
        for members, spec, operator, weight, columns, counts in groups:
            shape = (len(members), len(columns))
            span = slice(start, start + len(members) * len(columns))
            start = span.stop
            if len(weight):
                part, rule = rows.take(members), rule_of(spec, operator)
                # A device with measured rates is compared with the peers' measured ones.
                sheets = nominal if spec.sustained is None else inputs
                on_peers = as_peers(part, len(specs) + columns[counts])
                used = np.arange(span.start, span.stop).reshape(shape)[:, counts].reshape(-1)
                both = np.concatenate([members, used])
                shifted = carried_shift(every_point[both], reference[both], sheets, (part, on_peers), weight, rule)
                point[members] += shifted[0]
                levels[members] += shifted[0][:, None]
                moved.append((spec, operator, members, shifted))
            if opinions is not None:
                opinions[members[:, None], columns[None, :]] = (every_point - reference)[span].reshape(shape)
        distance = self.distance(batch)
        step = limited_step(distance, step, _status_codes(batch) > 0)
        factor = self.factor(distance + step) * self._open_factor(batch, names)
        for spec, operator, members, shifted in moved:
            factor[members] = interval_factor(spec, operator, levels[members], shifted, factor[members])
        return replace(output, peers=opinions, distance=distance, step=step, factor=factor)

    def _add_devices_without_embedding(self, batch: QueryBatch) -> tuple[QueryBatch, list[Trained], list[str]]:
        """Trained devices a second time without their embedding, for the queries that they count as unseen for.

        Returns the same queries, of which those that :meth:`_counts_as_unseen` refer to the device's second entry;
        :meth:`_figures` of the devices of that batch; and the devices' names in the contexts of the training set, ""
        where it did not have them.
        """
        figures, specs, rows = self._figures(batch.specs), list(batch.specs), batch.rows
        names = [spec.name if index else "" for index, spec in figures]
        unseen, moved = self._counts_as_unseen(batch, names), rows.device.copy()
        for device in np.unique(rows.device[unseen]).tolist():
            if names[device]:
                moved[unseen & (rows.device == device)] = len(specs)
                specs.append(specs[device])
                figures.append((0, specs[device]))
                names.append(names[device])
        return replace(batch, specs=specs, rows=replace(rows, device=moved)), figures, names

    def _run(
        self, inputs: RowInputs, rows: QueryRows, code: Array, queries: int, embedding: Array, view: bool
    ) -> tuple[RawPredictions, Array, Array]:
        """Output of the network for the first ``queries`` rows; log latency and log reference of all rows.

        ``code``: :func:`booster_code` of each row.
        """
        blocks = []
        for start in range(0, len(rows), BLOCK_ROWS):
            part = rows if len(rows) <= BLOCK_ROWS else rows.take(np.arange(start, min(start + BLOCK_ROWS, len(rows))))
            columns = network_queries(inputs, part)
            block = self._engine.predict(
                inputs,
                part,
                columns,
                embedding=embedding,
                batch_invariant=self._one_by_one,
                view=view and start < queries,
                parallel_chunks=self._parallel_chunks,
            )
            if self.artifact.boosters is not None:
                chosen = slice(start, start + len(part))
                boost(self.artifact.boosters, block, columns[0], embedding[part.device], code[chosen])
            blocks.append(block)
        point = np.concatenate([block.point for block in blocks])
        reference = np.concatenate([block.reference for block in blocks])
        return RawPredictions.join(blocks, queries), point, reference

    def _figures(self, specs: Sequence[DeviceSpec]) -> list[Trained]:
        """:func:`as_trained`; the adapted device has the figures that it was adapted with."""
        trained = as_trained(self._trained, specs)
        adapter = self.artifact.adapter
        if adapter is None:
            return trained
        device = adapter.device
        return [(index, device if not index and same_device(spec, device) else spec) for index, spec in trained]

    def _is_adapted(self, spec: DeviceSpec) -> bool:
        adapter = self.artifact.adapter
        return adapter is not None and bool(adapter.weight) and same_device(spec, adapter.device)

    def _adapted(self, batch: QueryBatch, base: RawPredictions) -> RawPredictions:
        """The base's output with the adapter's values for queries on the adapted device."""
        adapter, maker = self.artifact.adapter, self._features
        assert adapter is not None and maker is not None and base.peers is not None and base.view is not None
        is_adapted = np.array([same_device(spec, adapter.device) for spec in batch.specs])
        members = np.flatnonzero(is_adapted[batch.rows.device])
        if not len(members):
            return base
        specs = [spec for _, spec in self._figures(batch.specs)]
        part = QueryBatch(batch.store, batch.kinds, batch.kind, specs, batch.rows.take(members))
        features = maker.features(part, base.peers[members], base.view[members])
        point, levels, unsure = adapter.apply(
            base.point[members], base.levels[members], features, one_by_one=self._one_by_one
        )
        base.point[members], base.levels[members] = point, levels
        base.factor[members] = adapter.width
        base.step[members] *= unsure
        return base


@lru_cache(maxsize=1024)
def data_sheet(spec: DeviceSpec) -> str:
    """Digest of a device's data sheet; measured ceilings do not change it."""
    return spec.nominal().digest()


def same_device(device: DeviceSpec, other: DeviceSpec) -> bool:
    """Whether two specifications describe one device by its data sheet, whatever its name."""
    return data_sheet(device) == data_sheet(other) and _agree(device, other)


@lru_cache(maxsize=4096)
def _agree(device: DeviceSpec, other: DeviceSpec) -> bool:
    return device.agrees(other)


def known_devices(devices: Sequence[Trained]) -> dict[str, list[Trained]]:
    """Trained devices by the digest of their data sheet."""
    known: dict[str, list[Trained]] = {}
    for trained in devices:
        known.setdefault(data_sheet(trained[1]), []).append(trained)
    return known


def find_trained(known: dict[str, list[Trained]], spec: DeviceSpec) -> Trained:
    """The trained device with the figures of ``spec``, of several the one with its name; (0, spec) if there is none."""
    same = [trained for trained in known.get(data_sheet(spec), ()) if _agree(spec, trained[1])]
    if len(same) == 1:
        return same[0]
    return next((trained for trained in same if trained[1].name == spec.name), same[0] if same else (0, spec))


def as_trained(known: dict[str, list[Trained]], specs: Sequence[DeviceSpec]) -> list[Trained]:
    """Index (0: not trained on) and figures of devices.

    A trained device has the figures that it was trained with, including ceilings from its training rows.
    """
    return [find_trained(known, spec) for spec in specs]


def _by_kind(batch: QueryBatch, chosen: Array) -> Iterator[tuple[Array, DeviceSpec, tuple[str, str, str, str, str]]]:
    """The chosen rows grouped by device and kind of query (operator, dtype, protocol, backend, implementation)."""
    rows = batch.rows
    kind = batch.kind[rows.program[chosen]]
    in_pytorch = rows.framework[chosen] == _PYTORCH
    columns = [rows.device[chosen], kind, rows.protocol[chosen], rows.backend[chosen], in_pytorch]
    first, inverse = distinct_rows(columns)
    distinct = np.stack([c[first] for c in columns], axis=1).tolist()
    for i, (device, program, protocol, backend, pytorch) in enumerate(distinct):
        operator, dtype = batch.kinds[program]
        members = chosen[inverse == i]
        implementation = implementation_of(operator, "pytorch" if pytorch else None)
        yield members, batch.specs[device], (operator, dtype, PROTOCOLS[protocol], BACKENDS[backend], implementation)


def _status_codes(batch: QueryBatch) -> Array:
    """Code of :data:`ADJUSTMENTS` for the status of each row's device, int8; 0 for a device without a status."""
    codes = np.array([ADJUSTMENTS[spec.status] if spec.status else 0 for spec in batch.specs], dtype=np.int8)
    return codes[batch.rows.device] if len(codes) else np.zeros(len(batch.rows), dtype=np.int8)


def _with_status(batch: QueryBatch, output: RawPredictions) -> RawPredictions:
    """The output, in which replaced engines, limited figures, stand-ins and unreleased devices are not
    "in"; the latter with the reason."""
    codes = _status_codes(batch)
    doubtful = (codes > 0) | (output.adjusted & REPLACED > 0)
    step = limited_step(output.distance, output.step, doubtful)
    return replace(output, step=step, adjusted=output.adjusted + codes)


def _with_roofline(batch: QueryBatch, output: RawPredictions) -> RawPredictions:
    """The output with the roofline of each query."""
    summary = batch.store.summary[batch.rows.program]
    rooflines = roofline_s(summary, stack_devices(batch.specs)[batch.rows.device])
    return replace(output, roofline_s=np.maximum(*rooflines))
