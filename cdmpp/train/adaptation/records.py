"""Measurements of the device that a model is adapted to."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np

from cdmpp.data.device_specs import resolve
from cdmpp.data.load import load_table
from cdmpp.data.records import Measurement, as_device, from_measurements
from cdmpp.data.split_file import without_sealed
from cdmpp.data.table import MeasurementTable
from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import CdmppError, DataError
from cdmpp.model.artifact.model import Artifact
from cdmpp.programs.frontends.request import program_from_request
from cdmpp.programs.operators import OperatorSpec
from cdmpp.programs.program import TensorProgram
from cdmpp.programs.query_options import DEFAULT_PROTOCOL, FRAMEWORKS, PROTOCOLS
from cdmpp.train.evaluation.tables import reasons, rows_of

Array = np.ndarray[Any, np.dtype[Any]]
#: A program in a form of the predictor, and its latency in seconds.
Pair = tuple[TensorProgram | OperatorSpec | str | Mapping[str, Any], float]
Records = str | PathLike[str] | MeasurementTable | Sequence[Pair] | Sequence[Measurement]


@dataclass(frozen=True)
class DeviceRecords:
    """Rows of one device.

    Attributes
    ----------
    table : MeasurementTable
        All rows, with ``device`` as their device.
    device : DeviceSpec
    origin : (rows of the table,) int
        Row number in the file (0-based, without the header) of each row.
    usable : int
        Rows of the table that have a latency and can be predicted, ordered by program.
    unsupported : Counter of str
        Reason to number of the other rows.
    """

    table: MeasurementTable
    device: DeviceSpec
    origin: Array
    usable: Array
    unsupported: Counter[str]

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
    """The rows to adapt a model to.

    Parameters
    ----------
    records : path, MeasurementTable, sequence of (program, latency_s), or sequence of Measurement
    device : DeviceSpec, str or None
        None: the one device that the records name. A name: rows of that device, or all rows where the
        records name none. A specification: rows of that name or with those figures; where there are none
        and the records name at most one device, all rows are taken to be of this one.
    artifact : Artifact
        Knows devices that no table has.
    protocol, framework : str
        Of (program, latency_s) pairs.

    Raises
    ------
    DataError
        The records name several devices, or another one; no row can be used; a table cannot be read.
    UnknownDeviceError
        The device, as named or as the records name it, is not known.
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
    """Records of any form as a table.

    Raises
    ------
    DataError
        A path cannot be read, or a pair is not (program, latency) (the message counts from 0).
    """
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
    """A program and its latency, without a device.

    Raises
    ------
    DataError
        Protocol or framework are not known.
    """
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
        if not isinstance(program, TensorProgram):
            program = (
                TensorProgram.from_operator(program)
                if isinstance(program, str | OperatorSpec)
                else program_from_request(program)
            )
        return measurement(program, float(latency_s), protocol, framework)
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
        spec = resolve(name, {**artifact.device_specs, **table.device_specs})
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
