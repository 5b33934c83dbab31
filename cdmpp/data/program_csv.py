"""User measurements: a table with a column ``program`` and a latency, from any tool.

``cdmpp select`` writes such a CSV with the latencies left empty. What cannot be read is an error that names
the rows, not a row passed over: whoever typed forty figures wants to know of the one that is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

import numpy as np

from cdmpp.data.arrow import pa
from cdmpp.data.labels import Labels, Mask
from cdmpp.data.raw import LATENCY_UNITS, RawTable, read_columns, read_raw
from cdmpp.data.records import COLUMNS, NEEDED, table_from_arrow
from cdmpp.data.table import Float64, MeasurementTable
from cdmpp.errors import CdmppError, DataError
from cdmpp.programs.operators import read_operator
from cdmpp.programs.query_options import BACKENDS, DEFAULT_PROTOCOL, FRAMEWORKS, IMPLEMENTATIONS, PROTOCOLS

#: Column -> its values and what stands for an empty cell.
_SETTINGS = {
    "backend": (BACKENDS, "library"),
    "protocol": (PROTOCOLS, DEFAULT_PROTOCOL),
    "framework": (("", *FRAMEWORKS), ""),
    "implementation": (("", *IMPLEMENTATIONS), ""),
}
_READ = ("program", "device", *_SETTINGS, *LATENCY_UNITS)
_SHOWN = 5


def matches(columns: Collection[str]) -> bool:
    """Whether a table with these columns is one of programs and latencies."""
    given = set(columns)
    return "program" in given and bool(given & LATENCY_UNITS.keys()) and not given >= NEEDED


def read_program_csv(path: Path) -> MeasurementTable:
    """Read a CSV (or Parquet file) of operators and their latencies.

    Columns: ``program``, an operator's text (``"linear:m=512,n=4096,k=1024"``) or the JSON of its fields; one of
    ``latency_us``, ``latency_ms``, ``latency_s``, empty where nothing was measured; where present ``device`` (a known
    name), ``backend`` (an empty cell or no column: library), ``protocol`` (kernel), ``framework`` (not known),
    ``implementation`` (the default of operator and framework). All others are never read. Without a device, rows are
    ``unknown_device`` until :func:`cdmpp.data.records.as_device` gives them one. Errors count rows from 1, the header
    not among them.
    """
    raw = read_raw(path, [name for name in read_columns(path) if name in _READ])
    program = raw.labels("program").map(str.strip)
    _complain(path, program, _unreadable, "program")
    settings = {}
    for name, (allowed, default) in _SETTINGS.items():
        given = raw.labels(name).map(str.strip)
        given = Labels(given.codes, tuple(cell or default for cell in given.names))
        _complain(path, given, _not_one_of(allowed), name)
        settings[name] = given
    rows = len(raw)
    columns = {
        "program": program,
        "program_kind": Labels.constant("operator", rows),
        "device": raw.labels("device").map(str.strip),
        **settings,
    }
    arrays = {name: pa.array(labels.array(), COLUMNS[name][0].value_type) for name, labels in columns.items()}
    arrays["latency_s"] = pa.array(_latency_s(raw), from_pandas=True)
    return table_from_arrow(pa.table(arrays), path)


def _latency_s(raw: RawTable) -> Float64:
    """Seconds, NaN where a cell is empty, from the one column that holds figures."""
    columns_s: dict[str, Float64] = {}
    for name, per_second in LATENCY_UNITS.items():
        if name not in raw.columns:
            continue
        values = raw.floats(name) / per_second
        given = ~raw.labels(name).map(str.strip).is_("")
        with np.errstate(invalid="ignore"):
            wrong = np.flatnonzero(given & ~(np.isfinite(values) & (values > 0)))
        if len(wrong):
            cells = raw.labels(name)
            raise DataError(
                f"{raw.path}: {name} {cells[int(wrong[0])]!r} is not a latency {_at(wrong)}",
                hint="positive numbers, or an empty cell where nothing was measured",
            )
        if given.any():
            columns_s[name] = values
    if len(columns_s) != 1:
        problem = f"{' and '.join(columns_s)} both hold latencies" if columns_s else "no row has a latency"
        raise DataError(f"{raw.path}: {problem}", hint="fill one of the columns " + ", ".join(LATENCY_UNITS))
    return next(iter(columns_s.values()))


def _complain(path: Path, cells: Labels, problem: Callable[[str], CdmppError | None], column: str) -> None:
    """Raise for the first distinct cell that cannot be read, with all rows that hold one."""
    wrong = {code: error for code, cell in enumerate(cells.names) if (error := problem(cell)) is not None}
    bad: Mask = np.isin(cells.codes, list(wrong))
    if bad.any():
        rows = np.flatnonzero(bad)
        error = wrong[int(cells.codes[rows[0]])]
        raise DataError(f"{path}: {column} {_at(rows)}: {error.message}", hint=error.hint)


def _unreadable(text: str) -> CdmppError | None:
    if not text:
        return DataError("the cell is empty", hint="an operator such as linear:m=512,n=4096,k=1024")
    try:
        read_operator(text)
    except CdmppError as error:
        return error
    return None


def _not_one_of(allowed: Collection[str]) -> Callable[[str], CdmppError | None]:
    def problem(cell: str) -> CdmppError | None:
        if cell in allowed:
            return None
        return DataError(f"{cell!r} is not known", hint="one of: " + ", ".join(filter(None, allowed)))

    return problem


def _at(rows: np.ndarray[tuple[int], np.dtype[np.int64]]) -> str:
    shown = ", ".join(str(row + 1) for row in rows[:_SHOWN].tolist())
    more = f" and {len(rows) - _SHOWN} more" if len(rows) > _SHOWN else ""
    return f"in row{'s' if len(rows) > 1 else ''} {shown}{more}"
