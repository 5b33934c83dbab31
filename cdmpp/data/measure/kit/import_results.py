"""Import of result files of the kit: checks them against their job and writes records and a dataset card."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from cdmpp.data.card import write_card
from cdmpp.data.folder import RECORDS
from cdmpp.data.measure.kit.import_library import HOW as LIBRARY_HOW
from cdmpp.data.measure.kit.import_library import host_rows, library_rows, write_host, write_unmapped
from cdmpp.data.measure.kit.import_programs import HOW, program_rows
from cdmpp.data.measure.kit.limits import ImpossibleTimesError
from cdmpp.data.measure.kit.parts import read_job
from cdmpp.data.measure.kit.results import Results, read_results
from cdmpp.data.measure.kit.runtime.run import FORMAT
from cdmpp.data.records import Measurement, from_measurements, write_records
from cdmpp.devices.registry import lookup
from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import DataError, InvalidDeviceError, UnknownDeviceError

_UNIT = "s"


#: Makes the records of a result file: (job folder, job.json, results, device).
Rows = Callable[[Path, Mapping[str, Any], Results, DeviceSpec], list[Measurement]]
#: Records and sentences for the card, by kind.
KINDS: dict[str, tuple[Rows, tuple[str, ...]]] = {
    "programs": (program_rows, HOW),
    "library": (library_rows, LIBRARY_HOW),
    "host": (host_rows, ()),
}
#: Writes a further file of a kind beside the records, from (job folder, job.json, results with devices, dataset
#: folder). Returns sentences for the card.
Table = Callable[[Path, Mapping[str, Any], Sequence[tuple[Results, DeviceSpec]], Path], list[str]]
TABLES: dict[str, Table] = {"library": write_unmapped, "host": write_host}


def import_results(
    job: str | Path, files: Sequence[str | Path], out: str | Path, *, drop_impossible: bool = False
) -> Path:
    """Write the records of result files and their card.

    Parameters
    ----------
    job : path
        Job folder with ``home/``.
    files : sequence of path
        Result files (``part-NNN.npz``) of this job, each part once.
    out : path
        Dataset folder; its records are replaced.
    drop_impossible : bool
        Make items that are faster than the device's peak failed records, instead of stopping.

    Returns
    -------
    Path
        ``out``.

    Raises
    ------
    DataError
        A file is damaged, or belongs to another job, part or unit; an item is not in the part.
    ImpossibleTimesError
        Items are faster than the device's peak.
    InvalidDeviceError
        The results are of another GPU than the job's.
    """
    folder, result = Path(job), Path(out)
    about = read_job(folder)
    if not files:
        raise DataError("no result file is named", hint="name them: DIR/*.npz")
    results = [read_results(Path(path)) for path in files]
    for file in results:
        _check(file, about)
    parts = [file.head["part"] for file in results]
    if len(set(parts)) < len(parts):
        twice = next(part for part in parts if parts.count(part) > 1)
        raise DataError(f"part {twice} is given twice", hint="name one result file for each part")
    rows: list[Measurement] = []
    devices = [_device(file, about) for file in results]
    for index, (file, device) in enumerate(zip(results, devices, strict=True)):
        make_rows = KINDS[file.head["kind"]][0]
        try:
            rows += make_rows(folder, about, file, device)
        except ImpossibleTimesError as error:
            if not drop_impossible:
                raise
            results[index] = _without(file, error.reasons)
            rows += make_rows(folder, about, results[index], device)
    if not rows:
        raise DataError("the result files have no records", hint="import the host part together with the others")
    try:
        result.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"cannot write {result}: {error.strerror}", hint="choose another --out") from None
    write_records(from_measurements(rows), result / RECORDS)
    kinds = dict.fromkeys(file.head["kind"] for file in results)
    notes = [note for kind in kinds for note in KINDS[kind][1]] + _machines(results)
    for kind in kinds:
        if kind in TABLES:
            pairs = [pair for pair in zip(results, devices, strict=True) if pair[0].head["kind"] == kind]
            notes += TABLES[kind](folder, about, pairs, result)
    command = next((about[kind]["command"] for kind in ("programs", "library") if kind in about), "")
    write_card(result, command=command, notes=notes, faults=_missing(about, results))
    return result


def _without(file: Results, reasons: Mapping[str, str]) -> Results:
    """Return the results with the named items as failures."""
    failed = {name: {"repeats_s": {}, "failure": f"impossible time: {reason}"} for name, reason in reasons.items()}
    items = [{**item, **failed.get(item["id"], {})} for item in file.items]
    return replace(file, items=items)


def _check(file: Results, about: Mapping[str, Any]) -> None:
    head, path = file.head, file.path
    if head.get("format") != FORMAT:
        raise DataError(f"{path} has format {head.get('format')}, not {FORMAT}", hint="use the cdmpp that wrote it")
    if head["job"] != about["job"]:
        raise DataError(
            f"{path} has results of job {head['job']}, not of {about['job']}", hint="name the folder of its job"
        )
    if head.get("unit") != _UNIT:
        raise DataError(f"{path} has times in {head.get('unit')!r}, not in {_UNIT!r}", hint="run the parts again")
    parts = about["parts"]
    if not 0 <= head["part"] < len(parts) or parts[head["part"]]["kind"] != head["kind"]:
        raise DataError(f"{path}: the job has no part {head['part']} of {head['kind']}", hint="copy the file again")
    if head["kind"] not in KINDS:
        raise DataError(f"{path} has results of the unknown kind {head['kind']!r}", hint="use a newer cdmpp")
    known = set(parts[head["part"]]["items"])
    for item in file.items:
        if item["id"] not in known:
            raise DataError(
                f"{path}: part {head['part']} of the job has no item {item['id']}", hint="use the results of this job"
            )
        for protocol, repeats in item["repeats_s"].items():
            if not repeats or not all(np.isfinite(r) and r > 0 for r in repeats):
                raise DataError(
                    f"{path}: item {item['id']} has the times {repeats} ({protocol}); they must be positive seconds",
                    hint="remove the item's line from the log and run the part again",
                )


def _device(file: Results, about: Mapping[str, Any]) -> DeviceSpec:
    """Return the device that the driver named, after checking that it is the job's."""
    seen = (m.get("device", {}).get("gpu") or m.get("before", {}).get("name") for m in file.machines)
    names = {str(name) for name in seen if name}
    wanted = about.get(file.head["kind"], {}).get("names") or [about["device"]]
    shown = " or ".join(wanted)
    if not names:
        raise InvalidDeviceError(
            f"{file.path} does not name the GPU", hint="run the part again, where nvidia-smi or the driver works"
        )
    boards: dict[str, DeviceSpec] = {}
    for name in sorted(names):
        try:
            board = lookup(name)
        except UnknownDeviceError:
            raise InvalidDeviceError(
                f"the job is for {shown}, and {file.path} has results of {name!r}", hint="export a job for this GPU"
            ) from None
        boards[board.name] = board
    if len(boards) > 1:
        raise InvalidDeviceError(f"{file.path} has results of {' and '.join(boards)}", hint="use one --out per GPU")
    (board,) = boards.values()
    if board.name not in wanted:
        raise InvalidDeviceError(
            f"the job is for {shown}, and {file.path} has results of {board.name}", hint="export a job for this GPU"
        )
    return board


def _machines(results: Sequence[Results]) -> list[str]:
    """Describe the machines in sentences."""
    lines = []
    for file in results:
        for machine in file.machines:
            before, after = machine.get("before", {}), machine.get("after", {})
            lines.append(
                f"Part {file.head['part']}, {machine.get('date', 'no date')}: "
                f"{before.get('name') or machine.get('device', {}).get('gpu', 'GPU')}, "
                f"driver {before.get('driver_version', 'not known')}, "
                f"power limit {before.get('power.limit', '?')} W, "
                f"SM clock {before.get('clocks.sm', '?')} MHz before and {after.get('clocks.sm', '?')} MHz after, "
                f"power {before.get('power.draw', '?')} and {after.get('power.draw', '?')} W, "
                f"temperature {before.get('temperature.gpu', '?')} and {after.get('temperature.gpu', '?')} °C; "
                f"host {machine.get('cpu', 'not known')}, {machine.get('nvcc') or 'no nvcc'}."
            )
    return lines


def _missing(about: Mapping[str, Any], results: Sequence[Results]) -> list[str]:
    """Describe what was not measured, in sentences."""
    done = {file.head["part"]: len(file.items) for file in results}
    faults = []
    for number, part in enumerate(about["parts"]):
        left = len(part["items"]) - done.get(number, 0)
        if left:
            faults.append(f"Not finished: {left:,} of {len(part['items']):,} items of part {number} ({part['kind']}).")
    return faults
