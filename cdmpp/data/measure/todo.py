"""Folder of programs to measure, written by ``cdmpp select``: a CSV file for any tool, and its description."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cdmpp.data.device_specs import parse_spec, spec_text
from cdmpp.data.folder import DEVICE
from cdmpp.devices.loading import specification_toml
from cdmpp.devices.registry import find_known
from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import CdmppError, DataError
from cdmpp.programs.operators import OperatorSpec, operator_family
from cdmpp.programs.query_options import PROTOCOLS
from cdmpp.utils.files import MAX_CONFIG_BYTES, MAX_REQUEST_BYTES, read_bytes
from cdmpp.utils.units import format_latency
from cdmpp.utils.writing import replacing

PROGRAMS, ABOUT, README = "programs.csv", "select.json", "README.md"
COLUMNS = ("program", "operator", "family", "expected_latency_s", "latency_us", "protocol", "framework", "device")


@dataclass(frozen=True)
class Todo:
    """Programs to measure on one device by one protocol.

    Attributes
    ----------
    programs : tuple of OperatorSpec
    expected_s : tuple of float
        Predicted latencies in seconds.
    device : DeviceSpec
    protocol, framework : str
    about : dict
        Parameters of the selection: model, k, sampler, seed.
    estimate_s : float
        Estimated time of all measurements, in seconds.
    """

    programs: tuple[OperatorSpec, ...]
    expected_s: tuple[float, ...]
    device: DeviceSpec
    protocol: str
    framework: str
    about: dict[str, Any]
    estimate_s: float


def is_todo(path: Path) -> bool:
    """Whether a folder was written by :func:`write_todo`."""
    return (path / ABOUT).is_file() and (path / PROGRAMS).is_file()


def write_todo(todo: Todo, folder: Path) -> None:
    """Write the folder.

    Raises
    ------
    DataError
        The folder cannot be written, or is not empty: it may contain latencies entered by a user.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DataError(f"{folder} already exists and is not empty", hint="choose a new folder for --out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"cannot write {folder}: {error.strerror}", hint="choose another --out") from None
    rows = io.StringIO()
    writer = csv.writer(rows, lineterminator="\n")
    writer.writerow(COLUMNS)
    for spec, expected in zip(todo.programs, todo.expected_s, strict=True):
        writer.writerow(
            (
                spec.text(),
                spec.operator,
                operator_family(spec.operator),
                f"{expected:.4g}",
                "",
                todo.protocol,
                todo.framework,
                todo.device.name,
            )
        )
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
        with replacing(folder / name) as aside:
            aside.write_text(text, encoding="utf-8")


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
    """Read a folder of :func:`write_todo`; the CSV may have fewer or additional programs.

    Raises
    ------
    DataError
        A file cannot be read, or a row is not a program (rows are counted from 1, without the header).
    """
    # Imported late: it needs pyarrow, which a machine that only times a job may lack.
    from cdmpp.programs.operators import read_operator

    try:
        about = json.loads(read_bytes(folder / ABOUT, MAX_CONFIG_BYTES))
        device = parse_spec(json.dumps(about.pop("device")))
        protocol, framework = str(about.pop("protocol")), str(about.pop("framework"))
        estimate_s = float(about.pop("estimate_s"))
        text = read_bytes(folder / PROGRAMS, MAX_REQUEST_BYTES).decode("utf-8-sig")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{folder} is not a folder of cdmpp select: {error}", hint="select the programs again"
        ) from None
    if protocol not in PROTOCOLS:
        raise DataError(f"{folder}: protocol {protocol!r} is unknown", hint="one of: " + ", ".join(PROTOCOLS))
    programs, expected = [], []
    for number, row in enumerate(csv.DictReader(io.StringIO(text)), 1):
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
