"""Records of measured TVM programs, from a result file of the kit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cdmpp.data.measure.dataset import SOURCE
from cdmpp.data.measure.kit.limits import ImpossibleTimesError
from cdmpp.data.measure.kit.parts import HOME, read_part
from cdmpp.data.measure.kit.results import PEAK_SLACK, Results, moment
from cdmpp.data.measure.kit.runtime.programs import ONCE_S
from cdmpp.data.measure.store import Store
from cdmpp.data.measure.timing import TimingSettings
from cdmpp.data.noise import relative_spread
from cdmpp.data.physics import UNSTABLE
from cdmpp.data.records import Measurement
from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import DataError

#: Sentences for the card.
HOW = (
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
    part = read_part(folder / f"part-{file.head['part']:03d}.zip")
    if part.job != about["job"]:
        raise DataError(f"{part.path} belongs to another job", hint="export the job again")
    items = {item["id"]: item for item in part.items}
    with Store(folder / HOME) as store:
        programs = {program.hash: program for program in store.all_programs()}
    results = [(result["id"], result) for result in file.items]
    if file.head["part"] == 0:  # programs that TVM could not build travel in no part
        results += [(name, {"failure": f"build: {why}"}) for name, why in facts["failures"].items()]
    max_spread = TimingSettings().max_spread
    rows = []
    impossible: dict[str, str] = {}
    for name, result in results:
        if name not in programs:
            raise DataError(f"{folder / HOME} has no program {name}", hint="use the folder that exported the parts")
        program = programs[name]
        warm = result.get("repeats_s", {}).get("warm", ())
        flushed = result.get("repeats_s", {}).get("flushed", ())
        failure = result["failure"]
        if not failure:
            if not warm or not flushed:
                raise DataError(f"{file.path}: program {name} has no times and no failure", hint="run the part again")
            reason = _impossible(items[name], device, float(np.median(warm)), float(np.median(flushed)))
            if reason:
                impossible[name] = reason
        machine = file.machine(result) if "call" in result else {}
        once = bool(result.get("once"))
        rows.append(
            Measurement(
                program=program.tvm_json,
                program_kind="tvm_json",
                program_hash=name,
                task=program.task,
                device=device.name,
                backend="tvm",
                protocol="kernel",
                latency_s=None if failure else float(np.median(warm)),
                repeats_s=() if failure else tuple(warm),
                failure=failure,
                source=SOURCE,
                excluded_reason=UNSTABLE if not failure and relative_spread(warm) > max_spread else "",
                provenance={
                    "task_name": program.task_name,
                    "networks": ";".join(program.networks),
                    "origin": program.origin,
                    "target": facts["target"],
                    "threads": facts["threads"],
                    "affinity": "",
                    "timed": "" if failure else "once" if once else "repeatedly",
                    "tvm": facts["tvm"],
                    "measured_at": moment(result["at"]) if not failure else "",
                    "flushed_s": repr(float(np.median(flushed))) if not failure else "",
                    "flushed_repeats_s": " ".join(repr(float(s)) for s in flushed) if not failure else "",
                    "driver": str(machine.get("before", {}).get("driver_version", "")),
                    "nvcc": str(machine.get("nvcc", "")),
                },
            )
        )
    if impossible:
        raise ImpossibleTimesError(file.path, impossible)
    return rows


def _impossible(item: Mapping[str, Any], device: DeviceSpec, warm_s: float, flushed_s: float) -> str:
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
