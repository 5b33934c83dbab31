"""LatencyPredictor: load a model, ask it. The HTTP service and the command line go through here.

One query is one row: a program, a device, a backend, a protocol, a framework. Rows are computed in
chunks of a fixed shape that depends on the program alone, so an answer does not depend on what else was
asked at the same time, in which order, or through which door.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

from cdmpp.artifact.adapted import save_adapted
from cdmpp.artifact.folder import default_model
from cdmpp.artifact.load import load_artifact
from cdmpp.artifact.model import Artifact
from cdmpp.devices.loading import from_mapping
from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import CdmppError, DataError, InvalidDeviceError
from cdmpp.features.bulk import FeatureAnswers, FeatureQueries
from cdmpp.features.encode import EncodedPrograms
from cdmpp.features.encoded import EncodedProgram
from cdmpp.frontends.request import program_from_request
from cdmpp.inference.bulk import predict_features
from cdmpp.inference.engine import CHUNK_ROWS
from cdmpp.nn.config import LEVELS
from cdmpp.prediction import DEFAULT_QUANTILES, ErrorInfo, Prediction, Query, check_quantiles, check_settings
from cdmpp.programs.operators import OperatorSpec, operator_types
from cdmpp.programs.program import TensorProgram
from cdmpp.programs.query_options import BACKENDS, DEFAULT_PROTOCOL, FRAMEWORKS, PROTOCOLS, Protocol
from cdmpp.row_answers import RowAnswers

if TYPE_CHECKING:
    from cdmpp.adaptation.records import Records

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


class LatencyPredictor:
    """Predicts latencies with one loaded model. Safe to share between threads.

    Parameters
    ----------
    artifact : Artifact
    cache_rows : int
        Answers that are remembered, some 500 bytes each.
    threads : int
        Of the network, for one call at a time. The last digit of a figure may depend on it.

    Examples
    --------
    >>> predictor = LatencyPredictor.load()                                 # doctest: +SKIP
    >>> predictor.predict(["linear:m=512,n=4096,k=1024,dtype=float16"], "t4")[0].latency_s  # doctest: +SKIP
    """

    def __init__(self, artifact: Artifact, *, cache_rows: int = 65_536, threads: int = 1) -> None:
        self.artifact = artifact
        self._rows = RowAnswers(artifact, cache_rows, threads)
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
            Which latency is meant (see :class:`Query`).
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
        items: list[Query | tuple[str, CdmppError]] = []
        for program in programs:
            try:
                ready = program if isinstance(program, TensorProgram) else _as_program(program)
                items.append(Query(ready, spec, protocol, framework))
            except CdmppError as error:
                items.append((str(program)[:200], error))
        asked = iter(self.predict_queries([q for q in items if isinstance(q, Query)], quantiles))
        return [
            next(asked)
            if isinstance(item, Query)
            else Prediction(
                item[0], None, spec.name, "library", protocol, framework, self.model_id, error=ErrorInfo.of(item[1])
            )
            for item in items
        ]

    def _as_device(self, device: DeviceSpec | Mapping[str, Any] | str) -> DeviceSpec:
        if isinstance(device, str):
            return self.artifact.device(device)
        if isinstance(device, DeviceSpec):
            return device
        if isinstance(device, Mapping):
            return from_mapping(dict(device))
        raise InvalidDeviceError(f"{device!r} is not a device", hint="pass a name, a DeviceSpec or its fields")

    def predict_queries(
        self, queries: Sequence[Query], quantiles: Sequence[float] = DEFAULT_QUANTILES
    ) -> list[Prediction]:
        """Predict rows of different programs, devices, protocols and frameworks; order is kept.

        Unlike :meth:`predict`, an unknown device, protocol or framework is an error of its row.
        """
        return self._rows.predict(queries, check_quantiles(quantiles))

    def predict_features(self, queries: FeatureQueries) -> FeatureAnswers:
        """Predict programs that are encoded already, as arrays; order is kept.

        The same rows get the same figures as from :meth:`predict_queries`; nothing is remembered.

        Raises
        ------
        DataError, InvalidProgramError
            A level is out of range, or features are not what this model reads.
        UnknownDeviceError
            A device's name is not known.
        """
        return predict_features(self._rows.pipeline, queries)

    def encode(self, program: TensorProgram | EncodedProgram) -> EncodedPrograms:
        """Features of a program, remembered by its hash; of one that comes encoded, its own.

        Raises
        ------
        InvalidProgramError, UnsupportedOperatorError
            The program cannot be encoded.
        """
        return self._rows.encode(program)

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


def _as_program(program: OperatorSpec | str | Mapping[str, Any]) -> TensorProgram:
    if isinstance(program, str | OperatorSpec):
        return TensorProgram.from_operator(program)
    return program_from_request(program)
