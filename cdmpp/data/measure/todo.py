"""Programs to measure: the folder that ``cdmpp select`` writes, with a CSV file for any tool, and their measurement."""

from __future__ import annotations

import csv
import io
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cdmpp.data.device_specs import parse_spec, spec_text
from cdmpp.data.folder import DEVICE, STORE
from cdmpp.data.physics import UNSTABLE
from cdmpp.devices.loading import specification_toml
from cdmpp.devices.registry import find_known
from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import CdmppError, DataError
from cdmpp.programs.operators import OperatorSpec, operator_family, read_operator
from cdmpp.programs.query_options import PROTOCOLS
from cdmpp.utils.files import MAX_CONFIG_BYTES, MAX_REQUEST_BYTES, MAX_ROWS, parse_json, parse_table, read_bytes
from cdmpp.utils.units import format_latency
from cdmpp.utils.writing import check_new_folder, make_folder, write_text

# Records need pyarrow, which a machine that only times a job may lack: they are imported late.
if TYPE_CHECKING:
    from cdmpp.data.records import Measurement
    from cdmpp.data.table import MeasurementTable

PROGRAMS, ABOUT, README = "programs.csv", "select.json", "README.md"
COLUMNS = ("program", "operator", "family", "expected_latency_s", "latency_us", "protocol", "framework", "device")
RECORDS = "records.parquet"
#: Seconds between two writes of the measurements.
_WRITE_EVERY_S = 20.0


@dataclass(frozen=True)
class Todo:
    """Programs to measure on one device by one protocol."""

    programs: tuple[OperatorSpec, ...]
    expected_s: tuple[float, ...]  # predicted latencies in seconds
    device: DeviceSpec
    protocol: str
    framework: str
    about: dict[str, Any]  # parameters of the selection: model, k, sampler, seed
    estimate_s: float  # estimated time of all measurements


def is_todo(path: Path) -> bool:
    """Whether a folder was written by :func:`write_todo`."""
    return (path / ABOUT).is_file() and (path / PROGRAMS).is_file() and not (path / STORE).exists()


def is_scheduled_todo(path: Path) -> bool:
    """Whether a folder has TVM programs that ``cdmpp select`` chose (:mod:`cdmpp.data.measure.scheduled_todo`)."""
    return (path / ABOUT).is_file() and (path / STORE).is_file()


def write_todo(todo: Todo, folder: Path) -> None:
    """Write the folder, which must be new or empty: another may contain latencies entered by a user."""
    check_new_folder(folder)
    make_folder(folder)
    rows = io.StringIO()
    writer = csv.writer(rows, lineterminator="\n")
    writer.writerow(COLUMNS)
    for spec, expected in zip(todo.programs, todo.expected_s, strict=True):
        operator = (spec.text(), spec.operator, operator_family(spec.operator))
        writer.writerow((*operator, f"{expected:.4g}", "", todo.protocol, todo.framework, todo.device.name))
    about = {
        **todo.about,
        "device": json.loads(spec_text(todo.device)),
        "protocol": todo.protocol,
        "framework": todo.framework,
        "estimate_s": round(todo.estimate_s, 1),
    }
    for name, text in (
        (PROGRAMS, rows.getvalue()),
        (README, _readme(todo, folder)),
        (DEVICE, specification_toml(todo.device)),
        (ABOUT, json.dumps(about, indent=1) + "\n"),
    ):
        write_text(folder / name, text)


def _readme(todo: Todo, folder: Path) -> str:
    on = "cuda:0" if todo.device.kind == "gpu" else "cpu"
    meaning = {
        "eager": "one call from the host, including the launch",
        "graph": "one call inside a captured CUDA graph",
        "kernel": "the time of the kernels only",
    }[todo.protocol]
    model = todo.about.get("model", "models/base")
    file = "" if todo.device == find_known(todo.device.name) else f" --device {folder / DEVICE}"
    return f"""# {len(todo.programs)} programs to measure on {todo.device.name}

According to the model, measuring them with `cdmpp measure` takes about {format_latency(todo.estimate_s)}.

**On a machine with PyTorch and the device:**

    cdmpp measure {folder} --on {on}
    cdmpp adapt --model {model} --records {folder}/records.parquet{file} --out {todo.device.name}-adapted

**With another tool:** fill the column `latency_us` of `{PROGRAMS}` (or add `latency_ms` or
`latency_s`), then

    cdmpp adapt --model {model} --records {folder}/{PROGRAMS}{file} --out {todo.device.name}-adapted

Empty rows are not used. The latency is defined by the protocol `{todo.protocol}`: {meaning}.
Correct the columns `protocol` and `framework` if your tool uses another definition.
"""


def read_todo(folder: Path) -> Todo:
    """Read a folder of :func:`write_todo`; the CSV may have fewer or additional programs. Errors count rows from 1,
    without the header."""
    try:
        about = parse_json(read_bytes(folder / ABOUT, MAX_CONFIG_BYTES))
        device = parse_spec(json.dumps(about.pop("device")))
        protocol, framework = str(about.pop("protocol")), str(about.pop("framework"))
        estimate_s = float(about.pop("estimate_s"))
        rows = parse_table(read_bytes(folder / PROGRAMS, MAX_REQUEST_BYTES), MAX_ROWS)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{folder} is not a folder of cdmpp select: {error}", hint="select the programs again"
        ) from None
    if protocol not in PROTOCOLS:
        raise DataError(f"{folder}: protocol {protocol!r} is unknown", hint="one of: " + ", ".join(PROTOCOLS))
    programs, expected = [], []
    for number, row in enumerate(rows, 1):
        try:
            programs.append(read_operator((row.get("program") or "").strip()))
            expected.append(float(row.get("expected_latency_s") or "nan"))
        except CdmppError as error:
            raise DataError(f"{folder / PROGRAMS}, row {number}: {error.message}", hint=error.hint) from None
        except ValueError:
            expected.append(float("nan"))
    if not programs:
        raise DataError(f"{folder / PROGRAMS} has no programs", hint="select the programs again")
    return Todo(tuple(programs), tuple(expected), device, protocol, framework, about, estimate_s)


@dataclass(frozen=True)
class TodoResult:
    """Result of a run."""

    path: Path
    records: int  # successful records in the file
    new: int  # those of them that are from this run
    failed: dict[str, str]  # programs that failed, with the reason


def records_path(out: Path | None, folder: Path) -> Path:
    """Return the file of records: ``out`` if it ends in .parquet, else :data:`RECORDS` in that folder."""
    path = folder if out is None else out
    return path if path.suffix == ".parquet" else path / RECORDS


def measure_programs(
    programs: Sequence[OperatorSpec],
    measure: Callable[[OperatorSpec], Measurement],
    path: Path,
    *,
    device: str,
    protocol: str,
    step: Callable[[], None] = lambda: None,
) -> TodoResult:
    """Measure programs into a file of records (:func:`records_path`); programs that it already has are skipped.

    After an interruption (``KeyboardInterrupt``) the file contains the measurements so far. ``measure`` is for example
    :meth:`cdmpp.data.measure.library.LibraryTimer.record`, with ``device`` and ``protocol``; a file with records of
    others is an error. ``step`` is called once per program, measured or skipped.
    """
    done = _done(path, device, protocol)
    hashes = set() if done is None else {done.program_hashes[key] for key in done.program_key.tolist()}
    new: list[Measurement] = []
    written = time.monotonic()
    try:
        for spec in programs:
            if spec.hash() not in hashes:
                row = measure(spec)
                if row.excluded_reason == UNSTABLE:  # the disturbance may have ended
                    row = measure(spec)
                new.append(row)
                if time.monotonic() - written > _WRITE_EVERY_S:
                    _write(path, done, new)
                    written = time.monotonic()
            step()
    finally:
        if new:
            _write(path, done, new)
    failed = {row.program: row.failure for row in new if row.failure}
    return TodoResult(path, (0 if done is None else len(done)) + len(new) - len(failed), len(new) - len(failed), failed)


def _done(path: Path, device: str, protocol: str) -> MeasurementTable | None:
    """Return the successful records of earlier runs."""

    from cdmpp.data.load import load_table
    from cdmpp.data.summary import measured

    if not path.exists():
        return None
    table = load_table(path)
    for what, labels, expected in (("device", table.device, device), ("protocol", table.protocol, protocol)):
        others = set(labels.used()) - {expected}
        if others:
            raise DataError(
                f"{path} holds records of the {what} {', '.join(sorted(others))}, not of {expected}",
                hint="choose another --out",
            )
    return table.select(np.flatnonzero(measured(table) & (table.program_key >= 0)))


def _write(path: Path, done: MeasurementTable | None, new: Sequence[Measurement]) -> None:
    from cdmpp.data.records import from_measurements, write_records
    from cdmpp.data.table import concat

    make_folder(path.parent)
    table = from_measurements(list(new))
    write_records(table if done is None else concat([done, table]), path)
