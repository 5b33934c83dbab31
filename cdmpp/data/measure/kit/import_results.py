"""Import of result files of the kit: checks them against their job and writes records and a dataset card.

Results of TVM programs and of library operators become records. Host times and operators that records cannot describe
become tables beside them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from cdmpp.data.arrow import pa, pq
from cdmpp.data.card import write_card
from cdmpp.data.folder import RECORDS
from cdmpp.data.measure.dataset import program_record, utc_text
from cdmpp.data.measure.kit.parts import (
    HOME,
    PEAK_SLACK,
    ImpossibleTimesError,
    Results,
    read_job,
    read_part,
    read_results,
)
from cdmpp.data.measure.runtime.programs import ONCE_S
from cdmpp.data.measure.runtime.run import FORMAT
from cdmpp.data.measure.store import FIRST, Store, StoredMeasurement
from cdmpp.data.measure.timing import TimingSettings
from cdmpp.data.physics import UNSTABLE, uses_matrix_units, work
from cdmpp.data.records import Measurement, from_measurements, write_records
from cdmpp.data.summary import relative_spread
from cdmpp.data.table import make_block
from cdmpp.devices.registry import lookup
from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import CdmppError, DataError, InvalidDeviceError, UnknownDeviceError
from cdmpp.programs.operators import OperatorSpec, make_operator
from cdmpp.utils.writing import make_folder, replacing

UNMAPPED, HOST = "unmapped.parquet", "host.json"
LIBRARY_SOURCE = "cdmpp_kit_library"
LIBRARY_HOW = (
    "Library operators: PyTorch ran each as one call, after an untimed call, in the protocols eager, graph and kernel "
    "(docs/measuring.md). The label is the median of up to 5 repeats of as many runs as take 2 ms. A call of more "
    "than 0.1 s was run once. Inputs are random.",
    "Products of float32 ran without TF32. Convolutions of float32 ran with PyTorch's default, which allows TF32.",
)
_HOST_NOTE = f"`{HOST}` has the host's time per call by case, with an idle GPU and behind a busy one, in seconds."
#: Winograd's convolutions need fewer operations, up to this factor.
_WINOGRAD = 4.0


def library_rows(folder: Path, about: Mapping[str, Any], file: Results, device: DeviceSpec) -> list[Measurement]:
    """Return the records of operators that PyTorch ran as one call of its own choice, one for each protocol.

    Raises
    ------
    DataError
        An operator has neither times nor a failure.
    ImpossibleTimesError
        Operators are faster than the device's peak.
    """
    return [
        Measurement(
            program=json.dumps(spec.canonical()),
            program_kind="operator",
            program_hash=spec.hash(),
            device=device.name,
            latency_s=None if failure else float(np.median(repeats)),
            repeats_s=() if failure else repeats,
            backend="library",
            protocol=protocol,
            framework="pytorch",
            source=LIBRARY_SOURCE,
            excluded_reason=UNSTABLE if not failure and relative_spread(repeats) > TimingSettings().max_spread else "",
            failure=failure,
            provenance=_provenance(item, result, file),
        )
        for item, spec, result, protocol, repeats, failure in _times(folder, about, file, device)
        if spec is not None and _is_plain(item)
    ]


def write_unmapped(
    folder: Path, about: Mapping[str, Any], files: Sequence[tuple[Results, DeviceSpec]], out: Path
) -> list[str]:
    """Write :data:`UNMAPPED`: what records cannot describe yet. Returns sentences for the card.

    These are operators without a specification, composed and compiled implementations, and attention by a forced
    backend.
    """
    rows = [
        {
            "operator": json.dumps(item["operator"], sort_keys=True),
            "implementation": item["implementation"],
            "sdpa": item["sdpa"],
            "device": device.name,
            "protocol": protocol,
            "latency_s": None if failure else float(np.median(repeats)),
            "repeats_s": list(repeats),
            "failure": failure,
            "has_specification": spec is not None,
            **_provenance(item, result, file),
        }
        for file, device in files
        for item, spec, result, protocol, repeats, failure in _times(folder, about, file, device)
        if spec is None or not _is_plain(item)
    ]
    (out / UNMAPPED).unlink(missing_ok=True)
    if not rows:
        return []
    schema = {"latency_s": pa.float64(), "repeats_s": pa.list_(pa.float64()), "has_specification": pa.bool_()}
    table = pa.table({name: pa.array([row[name] for row in rows], schema.get(name, pa.string())) for name in rows[0]})
    with replacing(out / UNMAPPED) as aside:
        pq.write_table(table, aside, compression="zstd")
    return [
        f"`{UNMAPPED}` has {len(rows):,} measurements that records cannot describe yet: operators without a "
        "specification, composed and compiled implementations, and attention by a forced backend. Operators without "
        "a specification are not checked against the device's peak."
    ]


def write_host(
    folder: Path, about: Mapping[str, Any], files: Sequence[tuple[Results, DeviceSpec]], out: Path
) -> list[str]:
    """Write :data:`HOST`, the table of host times in seconds. Returns sentences for the card."""
    rows = []
    for file, device in files:
        items = _items(folder, about, file)
        for result in file.items:
            item, repeats = items[result["id"]], result["repeats_s"]
            rows.append(
                {
                    "case": item["case"],
                    "queue": item["queue"],
                    "nodes": item["nodes"],
                    "host_s": _median(repeats.get("host")),
                    "device_s": _median(repeats.get("device")),
                    "host_repeats_s": list(repeats.get("host", ())),
                    "device_repeats_s": list(repeats.get("device", ())),
                    "failure": result["failure"],
                    "device": device.name,
                    "measured_at": utc_text(result["at"]),
                }
            )
    machines = [machine for file, _ in files for machine in file.machines]
    with replacing(out / HOST) as aside:
        aside.write_text(json.dumps({"format": 1, "machines": machines, "rows": rows}, indent=1), encoding="utf-8")
    return [_HOST_NOTE]


def _items(folder: Path, about: Mapping[str, Any], file: Results) -> dict[str, dict[str, Any]]:
    part = read_part(folder / f"part-{file.head['part']:03d}.zip")
    if part.job != about["job"]:
        raise DataError(f"{part.path} belongs to another job", hint="export the job again")
    return {item["id"]: item for item in part.items}


def _times(
    folder: Path, about: Mapping[str, Any], file: Results, device: DeviceSpec
) -> Iterator[tuple[dict[str, Any], OperatorSpec | None, Mapping[str, Any], str, tuple[float, ...], str]]:
    """Yield item, specification, result, protocol, repeats and failure of each protocol of each item."""
    items = _items(folder, about, file)
    impossible: dict[str, str] = {}
    for result in file.items:
        item = items[result["id"]]
        spec = None if item["implementation"] == "extra" else make_operator(item["operator"])
        for protocol in item["protocols"]:
            repeats = result["repeats_s"].get(protocol, ())
            failure = "" if repeats else result["failure"] or result.get("failures", {}).get(protocol, "")
            if not repeats and not failure:
                raise DataError(
                    f"{file.path}: item {item['id']} has no times and no failure ({protocol})",
                    hint="run the part again",
                )
            if repeats and spec is not None:
                reason = _impossible_operator(spec, device, float(np.median(repeats)), protocol)
                impossible |= {item["id"]: reason} if reason else {}
            yield item, spec, result, protocol, repeats, failure
    if impossible:
        raise ImpossibleTimesError(file.path, impossible)


def _is_plain(item: Mapping[str, Any]) -> bool:
    return item["implementation"] == "library" and not item["sdpa"]


def _impossible_operator(spec: OperatorSpec, device: DeviceSpec, latency_s: float, protocol: str) -> str:
    """Return why the device cannot be so fast, or ""."""
    fields = spec.model_dump()
    sizes = {name: np.array([size]) for name, size in spec.sizes().items()}
    flags = {name: fields[name] for name in spec.structural_fields}
    block = make_block(spec.operator, spec.dtype, flags, sizes, np.arange(1))
    flops = float(work(block.operator, block.dtype, block.flags, block.sizes)[0][0])
    matrix = uses_matrix_units(spec.operator)
    peak = device.peak(spec.dtype, matrix=matrix)
    if spec.operator == "conv2d":
        peak = _WINOGRAD * max(peak, device.peak("tfloat32", matrix=True) if spec.dtype == "float32" else 0.0)
    least_s = flops / peak / PEAK_SLACK if matrix else 0.0
    if latency_s >= least_s:
        return ""
    return (
        f"({spec.text()}) took {latency_s:.3g} s ({protocol}) for {flops:.3g} operations; {device.name} needs at least "
        f"{least_s:.3g} s at its peak"
    )


def _provenance(item: Mapping[str, Any], result: Mapping[str, Any], file: Results) -> dict[str, str]:
    machine = file.machine(result)
    return {
        "origin": item["origin"],
        "measured_with": f"torch {machine.get('torch', '')}",
        "driver": str(machine.get("before", {}).get("driver_version", "")),
        "measured_at": utc_text(result["at"]),
    }


def _median(repeats: Sequence[float] | None) -> float | None:
    return float(np.median(repeats)) if repeats else None


#: Sentences for the card.
PROGRAMS_HOW = (
    "TVM generated the CUDA sources and launches, nvcc compiled them with TVM's flags on the machine with the GPU, and "
    "CUDA's driver launched them, without TVM's runtime. Inputs are random and equal for all schedules of a task.",
    "The results of each schedule were compared with those of the first schedule of its task that ran. A schedule that "
    "differs is a failed record.",
    "The label is the median of repeats with warm caches: events around a CUDA graph of as many runs as take 1 ms. "
    "Columns `flushed_s` and `flushed_repeats_s` have median and repeats of single runs between two events, each after "
    "a write of twice the L2 cache.",
    f"A program whose run took more than {ONCE_S:g} s was run once (column `timed`).",
)
#: A flushed run may read only a part of an input (a stride): its bytes at the memory's peak rate, divided by this.
_BYTES_SLACK = 4.0


def program_rows(folder: Path, about: Mapping[str, Any], file: Results, device: DeviceSpec) -> list[Measurement]:
    """Return the records of a result file of programs.

    Raises
    ------
    DataError
        A program is missing in ``home/``.
    ImpossibleTimesError
        Programs are faster than the device's peak.
    """
    facts = about["programs"]
    items = _items(folder, about, file)
    with Store(folder / HOME) as store:
        programs = {program.hash: program for program in store.all_programs()}
    results = [(result["id"], result) for result in file.items]
    if file.head["part"] == 0:  # programs that TVM could not build travel in no part
        results += [(name, {"failure": f"build: {why}"}) for name, why in facts["failures"].items()]
    rows = []
    impossible: dict[str, str] = {}
    for name, result in results:
        if name not in programs:
            raise DataError(f"{folder / HOME} has no program {name}", hint="use the folder that exported the parts")
        measurement = StoredMeasurement(name, device.name, FIRST, failure=result["failure"])
        flushed: Sequence[float] = ()
        if not result["failure"]:
            warm, flushed = (tuple(result["repeats_s"].get(protocol, ())) for protocol in ("warm", "flushed"))
            if not warm or not flushed:
                raise DataError(f"{file.path}: program {name} has no times and no failure", hint="run the part again")
            warm_s, flushed_s = float(np.median(warm)), float(np.median(flushed))
            reason = _impossible_program(items[name], device, warm_s, flushed_s)
            impossible |= {name: reason} if reason else {}
            measurement = replace(
                measurement,
                repeats_s=warm,
                latency_s=warm_s,
                spread=relative_spread(warm),
                once=bool(result.get("once")),
                measured_at=result["at"],
            )
        machine = file.machine(result) if "call" in result else {}
        conditions = {
            **{"target": facts["target"], "threads": facts["threads"], "affinity": "", "tvm": facts["tvm"]},
            "flushed_s": repr(float(np.median(flushed))) if flushed else "",
            "flushed_repeats_s": " ".join(repr(float(s)) for s in flushed),
            "driver": str(machine.get("before", {}).get("driver_version", "")),
            "nvcc": str(machine.get("nvcc", "")),
        }
        rows.append(program_record(programs[name], measurement, conditions, TimingSettings().max_spread))
    if impossible:
        raise ImpossibleTimesError(file.path, impossible)
    return rows


def _impossible_program(item: Mapping[str, Any], device: DeviceSpec, warm_s: float, flushed_s: float) -> str:
    """Return why the device cannot be so fast, or ""."""
    types = {dtype for _, dtype, _ in item["arguments"] if dtype.startswith(("float", "bfloat"))} or {"float32"}
    peak = max(device.peak(dtype, matrix=True) for dtype in types)
    least_s = item["flops"] / peak / PEAK_SLACK
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


#: Makes the records of a result file: (job folder, job.json, results, device).
Rows = Callable[[Path, Mapping[str, Any], Results, DeviceSpec], list[Measurement]]
#: Records and sentences for the card, by kind.
KINDS: dict[str, tuple[Rows, tuple[str, ...]]] = {
    "programs": (program_rows, PROGRAMS_HOW),
    "library": (library_rows, LIBRARY_HOW),
    "host": (lambda *_: [], ()),  # a host part has no programs
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
        with _of_this_job(file):
            _check(file, about)
    parts = [file.head["part"] for file in results]
    if len(set(parts)) < len(parts):
        twice = next(part for part in parts if parts.count(part) > 1)
        raise DataError(f"part {twice} is given twice", hint="name one result file for each part")
    rows: list[Measurement] = []
    devices = []
    for index, file in enumerate(results):
        with _of_this_job(file):
            device, make_rows = _device(file, about), KINDS[file.head["kind"]][0]
            devices.append(device)
            try:
                rows += make_rows(folder, about, file, device)
            except ImpossibleTimesError as error:
                if not drop_impossible:
                    raise
                results[index] = _without(file, error.reasons)
                rows += make_rows(folder, about, results[index], device)
    if not rows:
        raise DataError("the result files have no records", hint="import the host part together with the others")
    make_folder(result)
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


@contextmanager
def _of_this_job(file: Results) -> Iterator[None]:
    """Turn what a result with missing or strange fields raises into one error."""
    try:
        yield
    except CdmppError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise DataError(
            f"{file.path} does not fit the job: {error!r}", hint="copy the results and the job again"
        ) from None


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
