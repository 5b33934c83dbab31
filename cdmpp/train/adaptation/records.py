"""Measurements of the device that a model is adapted to: their rows, checks, and the base's predictions.

A survey predicts every record of a device in one pass; selection and adaptation start from it. Checks raise errors or
return named warnings.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np

from cdmpp.data.load import load_table
from cdmpp.data.records import Measurement, as_device, from_measurements
from cdmpp.data.split_file import without_sealed
from cdmpp.data.table import MeasurementTable
from cdmpp.devices.registry import lookup
from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import CdmppError, DataError
from cdmpp.model.adapter import AdapterFeatures, FeatureMaker, Names
from cdmpp.model.artifact.model import Artifact
from cdmpp.model.inference.pipeline import InferencePipeline
from cdmpp.model.nn.figures import stack_devices
from cdmpp.model.nn.inputs import FAMILIES, roofline_s
from cdmpp.programs.frontends.load import program_from_request
from cdmpp.programs.operators import OperatorSpec
from cdmpp.programs.program import TensorProgram
from cdmpp.programs.query_options import DEFAULT_PROTOCOL, FRAMEWORKS, PROTOCOLS
from cdmpp.train.evaluation.cache import FeatureCache
from cdmpp.train.evaluation.query_batches import query_parts
from cdmpp.train.evaluation.tables import reasons, rows_of

Array = np.ndarray[Any, np.dtype[Any]]

#: A program in a form of the predictor, and its latency in seconds.
Pair = tuple[TensorProgram | OperatorSpec | str | Mapping[str, Any], float]
Records = str | PathLike[str] | MeasurementTable | Sequence[Pair] | Sequence[Measurement]


@dataclass(frozen=True)
class DeviceRecords:
    """Rows of one device."""

    table: MeasurementTable  # all rows, with ``device`` as their device
    device: DeviceSpec
    origin: Array  # (rows of the table,): row number in the file, 0-based, without the header
    usable: Array  # rows of the table that have a latency and can be predicted, ordered by program
    unsupported: Counter[str]  # reason to number of the other rows

    @property
    def specs(self) -> dict[str, DeviceSpec]:
        """The device by name, to replace the table's specification of that name."""
        return {self.device.name: self.device}


def device_records(
    records: Records,
    device: DeviceSpec | str | None,
    artifact: Artifact,
    *,
    protocol: str = DEFAULT_PROTOCOL,
    framework: str | None = None,
) -> DeviceRecords:
    """The rows to adapt a model to; ``protocol`` and ``framework`` are those of (program, latency_s) pairs.

    ``device`` None: the one device that the records name. A name: rows of that device, or all rows where the records
    name none; ``artifact`` knows devices that no table has. A specification: rows of that name or with those figures;
    where there are none and the records name at most one device, all rows are taken to be of this one. Records of
    several devices, or of another one, are an error.
    """
    table = as_table(records, protocol, framework)
    if not len(table):
        raise DataError("the records are empty", hint="a program and its latency per row")
    spec, chosen = _of_device(table, device, artifact)
    given = as_device(table.select(chosen), spec)
    why = reasons(given)
    usable = np.flatnonzero(why == "")
    lost = Counter(why[why != ""].tolist())
    if not len(usable):
        left = ", ".join(f"{reason} {n:,}" for reason, n in lost.most_common(5))
        raise DataError(f"no record of {spec.name} can be used: {left}", hint="cdmpp data info FILE shows the reasons")
    usable = usable[np.argsort(given.program_key[usable], kind="stable")]
    return DeviceRecords(given, spec, np.flatnonzero(chosen), usable, lost)


def as_table(records: Records, protocol: str, framework: str | None) -> MeasurementTable:
    """Records of any form as a table. Errors count pairs from 0."""
    if isinstance(records, MeasurementTable):
        return records
    if isinstance(records, str | PathLike):
        return without_sealed(load_table(records), [records])
    rows = [r if isinstance(r, Measurement) else _measurement(i, r, protocol, framework) for i, r in enumerate(records)]
    if not rows:
        raise DataError("the records are empty", hint="a program and its latency per row")
    return from_measurements(rows)


def measurement(
    program: TensorProgram, latency_s: float, protocol: str = DEFAULT_PROTOCOL, framework: str | None = None
) -> Measurement:
    """A program and its latency, without a device."""
    for what, value, known in (("protocol", protocol, PROTOCOLS), ("framework", framework, FRAMEWORKS)):
        if value is not None and value not in known:
            raise DataError(f"{what} {value!r} is not known", hint="one of: " + ", ".join(known))
    operator = program.operator
    return Measurement(
        program=json.dumps(operator.canonical()) if operator is not None else program.tvm_json or "",
        program_kind="operator" if operator is not None else "tvm_json",
        program_hash=program.hash,
        device="",
        latency_s=latency_s,
        backend=program.backend,
        protocol=protocol,
        framework=framework or "",
    )


def _measurement(position: int, pair: Any, protocol: str, framework: str | None) -> Measurement:
    try:
        program, latency_s = pair
        if isinstance(latency_s, bool) or not np.isfinite(latency_s) or latency_s <= 0:
            raise DataError(f"latency_s {latency_s!r} is no time", hint="seconds, above 0")
        return measurement(program_from_request(program), float(latency_s), protocol, framework)
    except CdmppError as error:
        raise DataError(f"record {position}: {error.message}", hint=error.hint) from None
    except (TypeError, ValueError):
        raise DataError(
            f"record {position} is not a program with its latency", hint="pass (program, latency_s)"
        ) from None


def _of_device(
    table: MeasurementTable, device: DeviceSpec | str | None, artifact: Artifact
) -> tuple[DeviceSpec, Array]:
    """The device, and the mask of its rows."""
    counts = {name: n for name, n in table.device.counts().items() if name}
    listed = ", ".join(f"{name} ({n:,})" for name, n in sorted(counts.items()))
    if device is None:
        if len(counts) > 1:
            raise DataError(f"the records are of {len(counts)} devices: {listed}", hint="say which: --device NAME")
        if not counts:
            raise DataError("the records do not say their device", hint="say which: --device NAME|FILE")
        name = next(iter(counts))
        spec = lookup(name, {**artifact.device_specs, **table.device_specs})
        return spec, table.device.is_(name)
    spec = artifact.device(device) if isinstance(device, str) else device
    mask = rows_of(table, {spec.name, *spec.aliases})
    if not isinstance(device, str):
        mask |= _same_figures(table, spec)
    if mask.any():
        return spec, mask
    if not counts or (len(counts) == 1 and not isinstance(device, str)):
        return spec, np.ones(len(table), dtype=np.bool_)
    raise DataError(
        f"no record is of {spec.name}; there are: {listed}",
        hint="choose one of these" if isinstance(device, str) else "give the records of one device",
    )


def _same_figures(table: MeasurementTable, spec: DeviceSpec) -> Array:
    """Mask of rows whose device has exactly these figures, under any name."""
    same = []
    for code, name in enumerate(table.device.names):
        try:
            if name and table.device_spec(name).nominal().digest() == spec.nominal().digest():
                same.append(code)
        except CdmppError:
            continue
    return np.isin(table.device.codes, same)


@dataclass(frozen=True)
class Survey:
    """Base predictions per distinct query; a row is one measurement of a query."""

    rows: Array  # (n,): rows of the records' table that the model can predict
    query: Array  # (n,): query of each row
    # per query, as the next three: point, quantiles, factor and coverage of
    # :class:`cdmpp.model.raw_predictions.RawPredictions`
    point: Array
    levels: Array
    factor: Array
    score: Array
    roofline_s: Array  # per query: max(arithmetic at peak, traffic at full bandwidth)
    features: AdapterFeatures  # per query
    names: Names
    lost: int  # number of rows whose program cannot be encoded


def survey(
    pipeline: InferencePipeline,
    records: DeviceRecords,
    cache: FeatureCache,
    progress: Callable[[int], None] | None = None,
) -> Survey:
    """Predict every record of a device with the base model; latencies are not read."""
    maker = FeatureMaker(pipeline.artifact.weights)
    rows: list[Array] = []
    query: list[Array] = []
    outputs: list[tuple[Array, ...]] = []
    features: list[AdapterFeatures] = []
    count, lost = 0, 0
    for part in query_parts(records.table, records.usable, cache, records.specs):
        lost += len(part.failed)
        if len(part.index):
            batch, base = part.batch, pipeline.predict_base(part.batch)
            summary, matrix = batch.store.summary[batch.rows.program], stack_devices(batch.specs)[batch.rows.device]
            bound = np.maximum(*roofline_s(summary, matrix))
            outputs.append((base.point, base.levels.astype(np.float32), base.factor, base.coverage, bound))
            assert base.peers is not None and base.view is not None
            features.append(maker.features(batch, base.peers, base.view))
            rows.append(records.usable[part.index])
            query.append(part.position + count)
            count += len(batch.rows)
        if progress is not None:
            progress(len(part.index) + len(part.failed))
    if not count:
        raise DataError(
            f"none of the {lost} records has a program that can be encoded",
            hint="cdmpp inspect names the fault of a program",
        )
    point, levels, factor, score, roofline = (np.concatenate(column) for column in zip(*outputs, strict=True))
    return Survey(
        np.concatenate(rows),
        np.concatenate(query),
        point,
        levels,
        factor,
        score,
        roofline,
        AdapterFeatures.concat(features),
        maker.names,
        lost,
    )


#: A named warning in a result: {"code", "message"}.
Warning_ = dict[str, str]

#: A latency below the roofline by this factor cannot be explained by caches, winograd or clock changes.
FASTER = 2.0
#: With fewer measurements, predictions of a family depend mostly on other families.
FEW = 3


def warning(code: str, message: str) -> Warning_:
    """A named warning."""
    return {"code": code, "message": message}


def check_physics(device: str, latency_s: Array, roofline_s: Array) -> None:
    """Raise a DataError if more than half of the measured ``latency_s`` (k,) are faster than :data:`FASTER` times the
    roofline: max(arithmetic at peak, traffic at full bandwidth)."""
    faster = latency_s * FASTER < roofline_s
    if faster.mean() > 0.5:
        by = float(np.median(roofline_s[faster] / latency_s[faster]))
        raise DataError(
            f"{int(faster.sum())} of {len(faster)} records contradict the specification of {device}: they "
            f"are faster than its peak rates allow, by a factor of {by:.3g}",
            hint="check the unit of the latencies and the device's figures (flop/s, bytes/s)",
        )


def protocol_warnings(protocols: Sequence[str]) -> list[Warning_]:
    """Warning where records have several protocols; each protocol has an offset."""
    names = sorted(set(protocols))
    if len(names) < 2:
        return []
    counts = ", ".join(f"{name} {list(protocols).count(name)}" for name in names)
    return [
        warning(
            "mixed_protocols",
            f"the records were measured by several protocols ({counts}); each has an offset of its own, "
            "estimated from its own records",
        )
    ]


def family_warnings(measured: Array, queried: Array) -> list[Warning_]:
    """Families of operators with few measurements, from the family codes of the measured and of all queries."""
    sparse = []
    for code in np.unique(queried).tolist():
        count = int((measured == code).sum())
        if count < FEW:
            sparse.append(f"{FAMILIES[code]} {count}")
    if not sparse:
        return []
    return [
        warning(
            "few_of_family",
            f"fewer than {FEW} programs were measured of: {', '.join(sparse)}; their answers lean on the others",
        )
    ]
