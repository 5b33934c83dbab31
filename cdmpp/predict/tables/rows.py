"""Rows of a table as queries."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import CdmppError, DataError
from cdmpp.predict.prediction import ErrorInfo, Prediction, Query, check_option
from cdmpp.predict.tables.sources import TableRow
from cdmpp.programs.elements import MAX_SHOWN
from cdmpp.programs.frontends.load import program_from_request
from cdmpp.programs.operators import operator_types, read_value
from cdmpp.programs.program import TensorProgram
from cdmpp.programs.query_options import ALL_FRAMEWORKS, BACKENDS, DEFAULT_PROTOCOL, IMPLEMENTATIONS, PROTOCOLS, Backend
from cdmpp.programs.query_options import Protocol as MeasuringProtocol

#: Columns that override an option of the command in their row; an empty cell leaves the option.
_SETTINGS: dict[str, tuple[str, ...]] = {
    "backend": BACKENDS,
    "protocol": PROTOCOLS,
    "framework": ALL_FRAMEWORKS,
    "implementation": IMPLEMENTATIONS,
}
#: An operator accepts it in place of another field.
_FURTHER_FIELDS = ("past_total",)


@dataclass(frozen=True)
class TableOptions:
    """Options that hold for every row."""

    #: Devices of every row; empty: the table has a column ``device``.
    devices: tuple[DeviceSpec | str, ...] = ()
    #: As in :class:`cdmpp.predict.prediction.Query`, where the row does not name its own.
    backend: Backend | None = None
    protocol: MeasuringProtocol = DEFAULT_PROTOCOL
    framework: str | None = None
    implementation: str | None = None


@dataclass(frozen=True)
class FailedRow:
    """A row that is no query."""

    #: Name and device as the table has them.
    name: str
    device: str
    error: CdmppError

    def prediction(self, options: TableOptions, model_id: str) -> Prediction:
        """The prediction with its error."""
        return Prediction(
            self.name,
            None,
            self.device,
            options.backend or "library",
            options.protocol,
            options.framework,
            model_id,
            error=ErrorInfo.of(self.error),
        )


class RowReader:
    """Makes queries of the rows of one table.

    ``columns``: columns of the table: ``program`` (an operator's text, or JSON: an operator's fields,
    ``{"tvm_json": text}`` or TVM JSON), or ``operator`` with its fields as further columns; optionally ``device``,
    ``backend``, ``protocol``, ``framework`` and ``implementation``. ``used``, ``unused``: columns that are read, and
    the others.
    Raises DataError: the table names neither programs nor operators, or there is no device.
    """

    def __init__(self, columns: Sequence[str], options: TableOptions) -> None:
        self._options = options
        if "program" in columns:
            self._fields: list[str] = []
        elif "operator" in columns:
            self._fields = [name for name in columns if name in _field_names()]
        else:
            raise DataError(
                f"no column names the programs; the table has {', '.join(columns)[:MAX_SHOWN]}",
                hint="a column program (linear:m=512,n=4096,k=1024), or operator and its fields (m, n, k, dtype)",
            )
        settings = [name for name in _SETTINGS if name in columns]
        if not options.devices:
            if "device" not in columns:
                raise DataError("no device is named", hint="give --device, or add a column device")
            settings.append("device")
        self._settings = settings
        self.used = [*(self._fields or ["program"]), *settings]
        self.unused = [name for name in columns if name not in self.used]

    def queries(self, row: TableRow) -> list[Query | FailedRow]:
        """Queries of a row, one per device."""
        cells, devices, name = row.cells, self._options.devices, ""
        try:
            if isinstance(cells, CdmppError):
                raise cells
            if not devices:
                devices = (_device(cells["device"]),)
            name = self._name(cells)
            settings = {column: self._setting(column, cells[column]) for column in self._settings if column != "device"}
            backend = cast(Backend | None, settings.get("backend") or self._options.backend)
            program = self._program(cells, backend)
            protocol = cast(MeasuringProtocol, settings.get("protocol") or self._options.protocol)
            framework = settings.get("framework") or self._options.framework
            implementation = settings.get("implementation") or self._options.implementation
            return [Query(program, device, protocol, framework, implementation) for device in devices]
        except CdmppError as error:
            names = [device if isinstance(device, str) else device.name for device in devices or ("",)]
            return [FailedRow(name, device, error) for device in names]

    def _name(self, cells: Mapping[str, Any]) -> str:
        """The program as the row gives it, for rows with errors."""
        if not self._fields:
            return str(cells["program"] if cells["program"] is not None else "")[:MAX_SHOWN]
        given = [(name, cells[name]) for name in self._fields if name != "operator" and not _empty(cells[name])]
        text = ",".join(f"{name}={value}" for name, value in given)
        return f"{cells['operator']}:{text}"[:MAX_SHOWN]

    def _program(self, cells: Mapping[str, Any], backend: Backend | None) -> TensorProgram:
        if not self._fields:
            return program_from_request(_program_value(cells["program"]), backend)
        fields = {name: _value(cells[name]) for name in self._fields if not _empty(cells[name])}
        return TensorProgram.from_operator(fields, backend or "library")

    @staticmethod
    def _setting(column: str, cell: Any) -> str | None:
        if _empty(cell):
            return None
        text = str(cell).strip()
        check_option(column, text[:80], _SETTINGS[column])
        return text


@cache
def _field_names() -> frozenset[str]:
    """Fields of all operators."""
    return frozenset(_FURTHER_FIELDS).union(*(spec.model_fields for spec in operator_types().values()))


def _empty(cell: Any) -> bool:
    return (
        cell is None or (isinstance(cell, str) and not cell.strip()) or (isinstance(cell, float) and math.isnan(cell))
    )


def _device(cell: Any) -> str:
    if _empty(cell):
        raise DataError("the cell of device is empty", hint="name a device (cdmpp devices), or give --device")
    return str(cell).strip()


def _value(cell: Any) -> Any:
    """A field's value: a text as an operator's text has it; pandas stores integers with gaps as floats."""
    if isinstance(cell, str):
        return read_value(cell.strip())
    return int(cell) if isinstance(cell, float) and cell.is_integer() else cell


def _program_value(cell: Any) -> Any:
    """A program as a request gives it: JSON is decoded."""
    if _empty(cell):
        raise DataError("the cell of program is empty", hint="an operator such as linear:m=512,n=4096,k=1024")
    if isinstance(cell, Mapping):  # a struct of Parquet, which has all fields in all rows
        return {name: _value(value) for name, value in cell.items() if not _empty(value)}
    if not isinstance(cell, str):
        return cell
    text = cell.strip()
    if not text.startswith("{"):
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    # TVM JSON is an object with neither of the keys of a request.
    is_request = isinstance(value, dict) and not {"operator", "tvm_json", "tvmscript"}.isdisjoint(value)
    return value if is_request else {"tvm_json": text}
