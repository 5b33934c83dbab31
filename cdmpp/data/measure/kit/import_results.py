"""Import of result files of the kit: checks them against their job and writes records and a dataset card.

Results of TVM programs become records of the GPU that measured them. Host times become a table beside them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from cdmpp.data.card import write_card
from cdmpp.data.folder import RECORDS
from cdmpp.data.measure.dataset import program_record, utc_text
from cdmpp.data.measure.kit.parts import HOME, PartResults, read_job, read_part, read_results
from cdmpp.data.measure.runtime.programs import ONCE_S
from cdmpp.data.measure.runtime.run import FORMAT
from cdmpp.data.measure.runtime.run import PROGRAMS as KIND
from cdmpp.data.measure.store import FIRST, Store, StoredMeasurement
from cdmpp.data.measure.timing import TimingSettings
from cdmpp.data.records import Measurement, from_measurements, write_records
from cdmpp.data.summary import relative_spread
from cdmpp.devices.registry import lookup
from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import CdmppError, DataError, InvalidDeviceError, UnknownDeviceError
from cdmpp.utils.writing import make_folder, write_text

HOST = "host.json"
#: Times of an item of the host part.
_CLOCKS = ("host", "device")
_HOST_NOTE = f"`{HOST}` has the host's time per call by case, with an idle GPU and behind a busy one, in seconds."


def write_host(
    folder: Path, about: Mapping[str, Any], files: Sequence[tuple[PartResults, DeviceSpec]], out: Path
) -> None:
    """Write :data:`HOST`, the table of host times in seconds."""
    rows = []
    for file, device in files:
        items = _items(folder, about, file)
        for result in file.items:
            item, repeats = items[result["id"]], result["repeats_s"]
            rows.append(
                {
                    **{name: item[name] for name in ("case", "queue", "nodes")},
                    **{f"{clock}_s": _median(repeats.get(clock)) for clock in _CLOCKS},
                    **{f"{clock}_repeats_s": list(repeats.get(clock, ())) for clock in _CLOCKS},
                    "failure": result["failure"],
                    "device": device.name,
                    "measured_at": utc_text(result["at"]),
                }
            )
    machines = [machine for file, _ in files for machine in file.machines]
    write_text(out / HOST, json.dumps({"format": 1, "machines": machines, "rows": rows}, indent=1))


def _items(folder: Path, about: Mapping[str, Any], file: PartResults) -> dict[str, dict[str, Any]]:
    part = read_part(folder / f"part-{file.head['part']:03d}.zip")
    if part.job != about["job"]:
        raise DataError(f"{part.path} belongs to another job", hint="export the job again")
    return {item["id"]: item for item in part.items}


def _median(repeats: Sequence[float] | None) -> float | None:
    return float(np.median(repeats)) if repeats else None


#: Sentences for the card.
PROGRAMS_HOW = (
    "TVM generated the CUDA sources and launches, nvcc compiled them with TVM's flags on another machine, and CUDA's "
    "driver launched them, without TVM's runtime. Inputs are random and equal for all schedules of a task.",
    "Pieces of the results of each schedule were compared with those of the first schedule of its task that ran. A "
    "schedule that differs is a failed record.",
    "The label is the median of repeats with warm caches: events around a CUDA graph of as many runs as take 1 ms. "
    "Columns `flushed_s` and `flushed_repeats_s` have median and repeats of single runs between two events, each after "
    "a write of twice the L2 cache.",
    f"A program whose run took more than {ONCE_S:g} s was run once (column `timed`).",
)
#: Clocks may exceed the nominal boost clock, and with it the peak, by this factor.
_PEAK_SLACK = 1.1
#: A flushed run may read only a part of an input (a stride): its bytes at the memory's peak rate, divided by this.
_BYTES_SLACK = 4.0


def program_rows(
    folder: Path, about: Mapping[str, Any], file: PartResults, device: DeviceSpec, *, drop_impossible: bool
) -> list[Measurement]:
    """Return the records of a result file of programs. A program that is faster than the device's peak is an error, or
    a failed record with ``drop_impossible``."""
    facts = about[KIND]
    items = _items(folder, about, file)
    with Store(folder / HOME) as store:
        programs = {program.hash: program for program in store.all_programs()}
    rows = []
    impossible: dict[str, str] = {}
    for result in file.items:
        name = result["id"]
        if name not in programs:
            raise DataError(f"{folder / HOME} has no program {name}", hint="use the folder that exported the parts")
        failure, times = result["failure"], result["repeats_s"]
        warm, flushed = (() if failure else tuple(times.get(protocol, ())) for protocol in ("warm", "flushed"))
        measurement = StoredMeasurement(name, device.name, FIRST, failure=failure)
        if not failure:
            if not warm or not flushed:
                raise DataError(f"{file.path}: program {name} has no times and no failure", hint="run the part again")
            warm_s = float(np.median(warm))
            if reason := _impossible_program(items[name], device, warm_s, float(np.median(flushed))):
                impossible[name] = reason
                measurement, flushed = replace(measurement, failure=f"impossible time: {reason}"), ()
            else:
                spread, once = relative_spread(warm), bool(result.get("once"))
                measurement = StoredMeasurement(
                    name, device.name, FIRST, warm, warm_s, spread, once=once, measured_at=result["at"]
                )
        machine = file.machines[result["call"]]
        conditions = {
            **{"target": facts["target"], "threads": facts["threads"], "affinity": "", "tvm": facts["tvm"]},
            "flushed_s": repr(float(np.median(flushed))) if flushed else "",
            "flushed_repeats_s": " ".join(repr(float(s)) for s in flushed),
            "driver": str(machine.get("before", {}).get("driver_version", "")),
        }
        rows.append(program_record(programs[name], measurement, conditions, TimingSettings().max_spread))
    if impossible and not drop_impossible:
        name, reason = next(iter(impossible.items()))
        others = f", and {len(impossible) - 1} more" if len(impossible) > 1 else ""
        raise DataError(
            f"{file.path}: {name} {reason}{others}",
            hint="run the part again; if the other times are right, --drop-impossible makes these failed records",
        )
    return rows


def _impossible_program(item: Mapping[str, Any], device: DeviceSpec, warm_s: float, flushed_s: float) -> str:
    """Return why the device cannot be so fast, or ""."""
    types = {dtype for _, dtype, _ in item["arguments"] if dtype.startswith(("float", "bfloat"))} or {"float32"}
    peak = max(device.peak(dtype, matrix=True) for dtype in types)
    least_s = item["flops"] / peak / _PEAK_SLACK
    fastest_s = min(warm_s, flushed_s)
    if fastest_s < least_s:
        return (
            f"took {fastest_s:.3g} s for {item['flops']:.3g} operations; {device.name} needs at least {least_s:.3g} s "
            "at its peak"
        )
    read_s = item["read_bytes"] / device.mem_bandwidth_bytes_per_s / _BYTES_SLACK
    if flushed_s < read_s:
        return (
            f"took {flushed_s:.3g} s to read {item['read_bytes']:.3g} bytes from memory; {device.name} needs at least "
            f"{read_s:.3g} s at {_BYTES_SLACK:g} times its peak bandwidth"
        )
    return ""


_UNIT = "s"
#: Records of a job are committed: a quarter smaller than at the usual level, in 30 ms per program.
_ZSTD_LEVEL = 19


def import_results(
    job: str | Path, files: Sequence[str | Path], out: str | Path, *, drop_impossible: bool = False
) -> Path:
    """Write the records of result files and their card to ``out``, whose records are replaced.

    ``files`` (``part-NNN.npz``) are of this job, from one or several GPUs of its architecture. Damaged files, files of
    another job, part or unit, and items that are not in the part or are given twice are errors, as are items that are
    faster than the device's peak unless ``drop_impossible`` makes them failed records.
    """
    folder, result = Path(job), Path(out)
    about = read_job(folder)
    if not files:
        raise DataError("no result file is named", hint="name them: DIR/*.npz")
    results = [file for path in files if (file := read_results(Path(path))).items]
    rows: list[Measurement] = []
    devices = []
    seen: set[tuple[str, str]] = set()
    for file in results:
        try:
            _check(file, about)
            device = _device(file, about)
            devices.append(device)
            items = {(item["id"], device.name) for item in file.items}
            if twice := seen & items:
                raise DataError(
                    f"{file.path}: item {min(twice)[0]} of {device.name} is given twice", hint="name each result once"
                )
            seen |= items
            if file.head["kind"] == KIND:
                rows += program_rows(folder, about, file, device, drop_impossible=drop_impossible)
        except CdmppError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError) as error:  # fields that are missing or strange
            raise DataError(
                f"{file.path} does not fit the job: {error!r}", hint="copy the results and the job again"
            ) from None
    if not rows:
        raise DataError("the result files have no programs", hint="import the host part together with the others")
    make_folder(result)
    write_records(from_measurements(rows), result / RECORDS, level=_ZSTD_LEVEL)
    notes = [*PROGRAMS_HOW, *_machines(results)]
    pairs = [pair for pair in zip(results, devices, strict=True) if pair[0].head["kind"] == "host"]
    if pairs:
        write_host(folder, about, pairs, result)
        notes.append(_HOST_NOTE)
    write_card(result, command=about[KIND]["command"], notes=notes, faults=_missing(about, results, devices))
    return result


def _check(file: PartResults, about: Mapping[str, Any]) -> None:
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


def _device(file: PartResults, about: Mapping[str, Any]) -> DeviceSpec:
    """Return the device that the driver named, after checking that it is the job's."""
    seen = (m.get("device", {}).get("gpu") or m.get("before", {}).get("name") for m in file.machines)
    names = {str(name) for name in seen if name}
    arch = str(json.loads(about[KIND]["target"])["arch"])
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
                f"{file.path} has results of the unknown GPU {name!r}", hint="cdmpp devices lists the known ones"
            ) from None
        boards[board.name] = board
    if len(boards) > 1:
        raise InvalidDeviceError(f"{file.path} has results of {' and '.join(boards)}", hint="use one --out per GPU")
    (board,) = boards.values()
    if arch not in board.arch.split():
        raise InvalidDeviceError(
            f"the job is for {arch}, and {file.path} has results of {board.name} ({board.arch})",
            hint="export a job for this GPU",
        )
    return board


def _machines(results: Sequence[PartResults]) -> list[str]:
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
                f"host {machine.get('cpu', 'not known')}."
            )
    return lines


def _missing(about: Mapping[str, Any], results: Sequence[PartResults], devices: Sequence[DeviceSpec]) -> list[str]:
    """Describe what was not measured, in sentences."""
    failures = len(about[KIND]["failures"])
    faults = [f"Left out: {failures:,} programs that could not be built."] if failures else []
    for name in dict.fromkeys(device.name for device in devices):
        done = Counter[int]()
        for file, device in zip(results, devices, strict=True):
            done[file.head["part"]] += len(file.items) if device.name == name else 0
        for number, part in enumerate(about["parts"]):
            total = len(part["items"])
            if left := total - done[number]:
                faults.append(f"Not finished on {name}: {left:,} of {total:,} items of part {number} ({part['kind']}).")
    return faults
