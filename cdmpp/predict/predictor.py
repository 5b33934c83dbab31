"""LatencyPredictor: loads a model and predicts. The HTTP service and the command line use it.

A query is one program on one device with a backend, a protocol, a framework and an implementation. Queries are
computed in chunks of a fixed shape, so a prediction does not depend on the other queries of the batch or on their
order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import cached_property, lru_cache
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cdmpp.devices.loading import resolve_device
from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import CdmppError, DataError, InvalidProgramError
from cdmpp.features.encode import EncodedProgram, EncodedPrograms
from cdmpp.model.artifact.folder import default_model
from cdmpp.model.artifact.load import load_artifact, save_adapted, save_corrected
from cdmpp.model.artifact.model import Artifact
from cdmpp.model.collectives.model import CollectiveModel
from cdmpp.model.domain.score import THRESHOLDS
from cdmpp.model.inference.collectives import (
    CollectiveQuery,
    collectives_of,
    explain_collective,
    is_collective_program,
    predict_collectives,
)
from cdmpp.model.inference.consistency import NO_UNITS
from cdmpp.model.inference.encoder import ProgramEncoder
from cdmpp.model.inference.engine import CHUNK_ROWS
from cdmpp.model.inference.pipeline import InferencePipeline
from cdmpp.model.raw_predictions import RawPredictions
from cdmpp.predict.bulk import DOMAINS, FeatureAnswers, FeatureQueries
from cdmpp.predict.modules.predictor import ModulePredictor
from cdmpp.predict.prediction import (
    DEFAULT_QUANTILES,
    Device,
    ErrorInfo,
    Prediction,
    Predictions,
    Query,
    check_quantiles,
    check_query,
    check_settings,
    device_list,
    failed_fields,
    query_launcher,
)
from cdmpp.predict.prediction_matrix import Failed, PredictionMatrix
from cdmpp.predict.stages import calibrate, check_finite, covered, encode_features, encode_queries, report
from cdmpp.predict.support import support
from cdmpp.programs.collectives import Collective
from cdmpp.programs.frontends.load import program_from_request
from cdmpp.programs.operators import OperatorSpec
from cdmpp.programs.program import TensorProgram
from cdmpp.programs.query_options import DEFAULT_PROTOCOL, Protocol
from cdmpp.utils.lru import Lru

if TYPE_CHECKING:
    from cdmpp.train.adaptation.records import Records

__all__ = [
    "CHUNK_ROWS",
    "DEFAULT_QUANTILES",
    "ErrorInfo",
    "LatencyPredictor",
    "Prediction",
    "Query",
    "check_quantiles",
    "default_model",
]

Array = np.ndarray[Any, np.dtype[Any]]
ProgramLike = TensorProgram | OperatorSpec | str | Mapping[str, Any]
#: Files of whole models, which :func:`cdmpp.load_programs` reads.
MODEL_SUFFIXES = (".onnx", ".pt2", ".json", ".py")

#: Memory of a cached row and its key, in bytes, approximately.
ROW_BYTES = 600
#: Model, program hash, backend, device's cache key and name, protocol, framework, implementation: all that a prediction
#: depends on. Exact tuples of texts, because the garbage collector does not traverse those.
RowKey = tuple[str, str, str, str, str, str, str | None, str | None]
#: A cached row of :meth:`RawPredictions.to_table`.
CachedRow = Array
#: A query and the specification of its device.
ResolvedQuery = tuple[Query, DeviceSpec]


class LatencyPredictor(ModulePredictor):
    """Predicts latencies with one loaded model. Safe to share between threads.

    Parameters
    ----------
    cache_rows : int
        Number of cached predictions, about 600 bytes each.
    threads : int, optional
        Threads that compute a large batch; predictions do not depend on it. Default: one per processor, at most 4, or
        OMP_NUM_THREADS where it is set.
    cache : Lru, optional
        Cache to share with other predictors, with weights in bytes; replaces ``cache_rows``.

    Examples
    --------
    >>> predictor = LatencyPredictor.load()                                 # doctest: +SKIP
    >>> predictor.predict(["linear:m=512,n=4096,k=1024,dtype=float16"], "t4")[0].latency_s  # doctest: +SKIP
    """

    def __init__(
        self,
        artifact: Artifact,
        *,
        cache_rows: int = 65_536,
        threads: int | None = None,
        cache: Lru[CachedRow] | None = None,
    ) -> None:
        self.artifact = artifact
        self._support: dict[str, Any] | None = None
        self.cache: Lru[CachedRow] = Lru(cache_rows * ROW_BYTES) if cache is None else cache
        self._pipeline = InferencePipeline(artifact, one_by_one=True, threads=threads)
        self._encoder = ProgramEncoder(artifact)
        self._report: dict[str, Any] | None = None

    @cached_property
    def collectives(self) -> CollectiveModel:
        """The model of collectives."""
        return collectives_of(self.artifact)

    @classmethod
    def load(cls, path: str | PathLike[str] | None = None) -> LatencyPredictor:
        """Load a model folder; without a path, the model that ships with the package.

        Raises
        ------
        ArtifactError
            The folder is missing or damaged, or has another format or feature schema.
        """
        return cls(load_artifact(path if path is not None else default_model()))

    @property
    def model_id(self) -> str:
        """Identity of the loaded model."""
        return self.artifact.model_id

    @property
    def adaptation(self) -> dict[str, Any] | None:
        """Report of the adaptation (:class:`cdmpp.train.adaptation.adapt.Adaptation`); None for a base model."""
        if self._report is not None:
            return self._report
        report: dict[str, Any] | None = self.artifact.manifest.get("adapter")
        return report

    def adapt(
        self,
        records: Records,
        device: DeviceSpec | Mapping[str, Any] | str | None = None,
        *,
        k: int | None = None,
        sampler: str = "variance",
        seed: int = 0,
        protocol: Protocol = DEFAULT_PROTOCOL,
        framework: str | None = None,
    ) -> LatencyPredictor:
        """Adapt the model to one device by measurements on it; returns a new predictor.

        Parameters
        ----------
        records : path, MeasurementTable, or sequence of (program, latency_s)
            A table in the format of ``cdmpp eval``, a CSV with the columns ``program`` and ``latency_us``, or
            programs in the forms of :meth:`predict` with their latencies in seconds.
        device : DeviceSpec, mapping of its fields, or name, optional
            Default: the one device that the records name.
        k : int, optional
            Number of records to choose, without reading latencies; the error on the remaining records is
            reported. Default: all records are used.
        sampler : {"kmeans", "random", "variance"}
            Method that chooses ``k`` records.
        seed : int
            Seed of the choice.
        protocol, framework
            Measuring protocol and framework of (program, latency_s) pairs.

        Returns
        -------
        LatencyPredictor
            :attr:`adaptation` reports the gain and warnings; :meth:`save` writes the adapted model.

        Raises
        ------
        DataError
            The records name several devices or none, contradict the specification, or are fewer than ``k``.
        UnknownDeviceError, InvalidDeviceError
            ``device`` is not a known name, or not a valid specification.
        ArtifactError
            This predictor is already adapted.
        """
        from cdmpp.train.adaptation.adapt import adapt
        from cdmpp.train.adaptation.records import device_records

        target = None if device is None else device if isinstance(device, str) else self._as_device(device)
        rows = device_records(records, target, self.artifact, protocol=protocol, framework=framework)
        adaptation = adapt(self.artifact, rows, k=k, sampler=sampler, seed=seed)
        adapted = LatencyPredictor(adaptation.artifact, cache=self.cache)
        adapted._report = adaptation.report
        return adapted

    def save(self, folder: str | PathLike[str]) -> None:
        """Write the folder of an adapted model; :meth:`load` needs the base model beside it.

        Raises
        ------
        ArtifactError
            The model is not adapted, or the folder holds something else.
        """
        if "collectives" in self.artifact.manifest:
            save_corrected(Path(folder), self.artifact)
        else:
            save_adapted(folder, self.artifact)

    def predict(
        self,
        programs: Sequence[ProgramLike],
        device: Device | Sequence[Device],
        *,
        protocol: Protocol = DEFAULT_PROTOCOL,
        framework: str | None = None,
        quantiles: Sequence[float] = DEFAULT_QUANTILES,
        implementation: str | None = None,
    ) -> Predictions:
        """Predict the run time of tensor programs on one device, or on each of several.

        Parameters
        ----------
        programs : sequence of TensorProgram, OperatorSpec, operator text or object, PrimFunc or IRModule, length n
            An IRModule has one PrimFunc. Order is kept; n = 0 gives an empty list.
        device : DeviceSpec, mapping of its fields, or str; or a sequence of length d of them
            Target hardware, or the name of a known device. Training need not have seen it.
        protocol : {"kernel", "graph", "eager"}
            What the latency includes (see :class:`Query`).
        quantiles : sequence of float
            Levels of the interval, between 0.02 and 0.98.
        implementation : {"fused", "composed", "compiled", "tuned"}, optional
            How the operators are executed (see :class:`Query`).

        Returns
        -------
        Predictions
            A list of n :class:`Prediction`. With a sequence of devices, a list of n * d: all devices of the first
            program, then all of the second (:meth:`Predictions.by_device` groups them). For a program that cannot be
            encoded, ``error`` is set; the others are unaffected.

        Raises
        ------
        UnknownDeviceError, InvalidDeviceError
            ``device`` is not a known name (the message lists the nearest names), or not a valid specification.
        DataError
            ``programs`` is a single text; a quantile, the protocol, the framework or the implementation
            is not supported.
        """
        if isinstance(programs, str):
            raise DataError(f"programs must be a list, not the text {programs[:60]!r}", hint="pass a list: [program]")
        specs = [self._as_device(device) for device in device_list(device)]
        check_settings(protocol, framework, implementation)
        matrix = PredictionMatrix([_as_program(program) for program in programs], specs)
        queries = [Query(program, spec, protocol, framework, implementation) for program, spec in matrix.pairs()]

        def failed(program: TensorProgram | Failed, spec: DeviceSpec | Failed) -> Prediction:
            assert isinstance(program, Failed)
            error = ErrorInfo.of(program.error)
            return Prediction(program.name, None, spec.name, "library", protocol, framework, self.model_id, error=error)

        rows = matrix.results(self.predict_queries(queries, quantiles), failed)
        return Predictions(prediction for row in rows for prediction in row)

    def predict_queries(self, queries: Sequence[Query], quantiles: Sequence[float] = DEFAULT_QUANTILES) -> Predictions:
        """Predict queries with different programs, devices and options; order is kept.

        Unlike in :meth:`predict`, an unknown device or option is an error of its query only.
        """
        levels, model_id = check_quantiles(quantiles), self.model_id
        keys: dict[int, RowKey] = {}
        resolved: dict[int, ResolvedQuery] = {}
        rows: dict[RowKey, CachedRow] = {}
        missing: dict[RowKey, ResolvedQuery] = {}
        errors: dict[int, CdmppError] = {}
        find = self._device_finder()
        for i, query in enumerate(queries):
            try:
                check_query(query)
                spec, digest = find(query.device)
                program = query.program
                options = (query.protocol, query.framework, query.implementation)
                key = (model_id, program.hash, program.backend, digest, spec.name, *options)
            except CdmppError as error:
                errors[i] = error
                continue
            keys[i], resolved[i] = key, (query, spec)
            if key in rows or key in missing:
                continue
            cached = self.cache.get(key)
            if cached is not None:
                rows[key] = cached
            else:
                missing[key] = (query, spec)
        failed = self._compute(missing, rows)
        errors |= {i: failed[key] for i, key in keys.items() if key in failed}
        results = {i: Prediction(**failed_fields(queries[i], error, model_id)) for i, error in errors.items()}
        predicted = [i for i in keys if i not in errors]
        if predicted:
            raw = RawPredictions.from_table(np.stack([rows[keys[i]] for i in predicted]))
            beyond = [(figure > THRESHOLDS[0]).tolist() for figure in (raw.distance, raw.coverage)]
            marks = zip(raw.adjusted.astype(int).tolist(), *beyond, strict=True)
            reasons = [self._reason(*resolved[i], mark) for i, mark in zip(predicted, marks, strict=True)]
            figures = calibrate(raw, levels, model_id)
            reported = report([resolved[i] for i in predicted], figures, reasons)
            for row in np.flatnonzero(raw.adjusted >= NO_UNITS).tolist():
                vars(reported[row])["_coverage"] = DOMAINS[covered(raw)[row]]
            results.update(zip(predicted, reported, strict=True))
        return Predictions(results[i] for i in range(len(queries)))

    def predict_features(self, queries: FeatureQueries) -> FeatureAnswers:
        """Predict programs that are already encoded, as arrays; order is kept.

        Results equal those of :meth:`predict_queries`; nothing is cached.

        Raises
        ------
        DataError, InvalidProgramError
            A quantile level is out of range, or the features are not those that this model reads.
        UnknownDeviceError
            A device name is not known.
        """
        levels = check_quantiles(queries.quantiles)
        specs = [self._as_device(device) for device in queries.devices]
        if not len(queries):
            return FeatureAnswers.none(levels, self.model_id)
        batch = encode_features(queries, specs, self.artifact.leaf_width, self._pipeline.half_type)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            answers = calibrate(self._pipeline.forward(batch), levels, self.model_id)
        check_finite(answers)
        return answers

    def encode(self, program: TensorProgram | EncodedProgram) -> EncodedPrograms:
        """Features of a program, cached by its hash; for an encoded program, its own features.

        Raises
        ------
        InvalidProgramError, UnsupportedOperatorError
            The program cannot be encoded.
        """
        [features] = self._encoder.encode([program])
        if isinstance(features, CdmppError):
            raise features
        return features

    def support(self) -> dict[str, Any]:
        """Coverage of the model: operators, types and devices, protocols, and accuracy."""
        if self._support is None:
            self._support = support(self.artifact)
        return deepcopy(self._support)

    def is_cached(self, key: RowKey) -> bool:
        """Whether the figures of a query are cached."""
        return self.cache.get(key) is not None

    # -- inside -----------------------------------------------------------------------------------------
    def _as_device(self, device: DeviceSpec | Mapping[str, Any] | str) -> DeviceSpec:
        return resolve_device(device, self.artifact.device)

    def _device_finder(self) -> Callable[[DeviceSpec | str], tuple[DeviceSpec, str]]:
        """Function from a device to its specification and cache key; looks each name or object up once per call."""
        seen: dict[str | int, tuple[DeviceSpec, str]] = {}

        def find(device: DeviceSpec | str) -> tuple[DeviceSpec, str]:
            # The queries keep their devices alive, so no two specifications share an id during the call.
            identity = device if isinstance(device, str) else id(device)
            if identity not in seen:
                spec = self.artifact.device(device) if isinstance(device, str) else device
                seen[identity] = spec, _cache_key(spec)
            return seen[identity]

        return find

    def _compute(
        self, missing: Mapping[RowKey, ResolvedQuery], rows: dict[RowKey, CachedRow]
    ) -> dict[RowKey, CdmppError]:
        """Compute rows that are not cached, add them to ``rows`` and the cache; returns the errors."""
        errors: dict[RowKey, CdmppError] = {}
        for collective, forward in ((False, self._forward), (True, self._forward_collectives)):
            keys = [key for key, (query, _) in missing.items() if is_collective_program(query.program) == collective]
            if not keys:
                continue
            raw, failed = forward([missing[key] for key in keys])
            errors |= {keys[i]: error for i, error in failed.items()}
            for key, row in zip((key for key in keys if key not in errors), raw.to_table(), strict=True):
                # A copy: a view would keep the whole table in memory as long as one of its rows is cached.
                rows[key] = row.copy()
                self.cache.put(key, rows[key], ROW_BYTES)
        return errors

    def _forward(self, queries: Sequence[ResolvedQuery]) -> tuple[RawPredictions, dict[int, CdmppError]]:
        """Predictions of tensor programs without an error, in order, and the errors by position."""
        batch, errors = encode_queries(self._encoder, self.artifact.leaf_width, self._pipeline.half_type, queries)
        return RawPredictions.empty() if batch is None else self._pipeline.forward(batch), errors

    def _forward_collectives(self, queries: Sequence[ResolvedQuery]) -> tuple[RawPredictions, dict[int, CdmppError]]:
        """:meth:`_forward` for collectives, which the network does not know."""
        try:
            model = self.collectives
        except CdmppError as error:
            return RawPredictions.empty(), dict.fromkeys(range(len(queries)), error)
        return predict_collectives(model, [_collective_query(query, spec) for query, spec in queries]), {}

    def _reason(self, query: Query, device: DeviceSpec, mark: tuple[int, bool, bool]) -> str | None:
        """Why a prediction is not the network's own or not "in", or what the measurements of a collective lacked.

        ``mark``: as :meth:`InferencePipeline.reason` takes it.
        """
        if not any(mark):
            return None
        if is_collective_program(query.program):
            return explain_collective(self.collectives, _collective_query(query, device)) or None
        where = (device, query.protocol, query_launcher(query) or "")
        return self._pipeline.reason(query.program, where, mark)


@lru_cache(maxsize=4096)
def _cache_key(spec: DeviceSpec) -> str:
    return spec.cache_key()


def _collective_query(query: Query, device: DeviceSpec) -> CollectiveQuery:
    """A query of a collective as its model takes it."""
    assert isinstance(query.program.operator, Collective)
    return CollectiveQuery(query.program.operator, device, query.protocol, query.framework)


def _of_tir(module: Any) -> TensorProgram:
    """The program of a PrimFunc, or of an IRModule with one."""
    from cdmpp.programs.frontends.tir import programs_from_tir

    programs = programs_from_tir(module)
    if len(programs) > 1:
        raise InvalidProgramError(
            f"the module has {len(programs)} PrimFuncs: {', '.join(program.name for program in programs)[:200]}",
            hint="pass cdmpp.programs.frontends.tir.programs_from_tir(module), which has a program for each",
        )
    return programs[0]


def _as_program(program: ProgramLike) -> TensorProgram | Failed:
    try:
        if isinstance(program, str | PathLike) and str(program).lower().endswith(MODEL_SUFFIXES):
            raise InvalidProgramError(
                f"{str(program)[:200]} is a whole model, not one program",
                hint="graph = cdmpp.load_programs(path); predictor.predict(graph.programs, device), times graph.counts",
            )
        if type(program).__module__.partition(".")[0] == "tvm":
            return _of_tir(program)
        return program_from_request(program)
    except CdmppError as error:
        return Failed(str(program)[:200], error)
