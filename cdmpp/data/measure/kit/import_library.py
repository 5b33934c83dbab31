"""Records of library operators and the host table, from result files of the kit."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cdmpp.data.arrow import pa, pq
from cdmpp.data.measure.kit.limits import ImpossibleTimesError
from cdmpp.data.measure.kit.parts import read_part
from cdmpp.data.measure.kit.results import PEAK_SLACK, Results, moment
from cdmpp.data.measure.timing import TimingSettings
from cdmpp.data.noise import relative_spread
from cdmpp.data.physics import UNSTABLE, uses_matrix_units, work
from cdmpp.data.records import Measurement
from cdmpp.data.table import make_block
from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import DataError
from cdmpp.programs.operators import OperatorSpec, make_operator
from cdmpp.utils.writing import replacing

UNMAPPED, HOST = "unmapped.parquet", "host.json"
SOURCE = "cdmpp_kit_library"
HOW = (
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
            source=SOURCE,
            excluded_reason=UNSTABLE if not failure and relative_spread(repeats) > TimingSettings().max_spread else "",
            failure=failure,
            provenance=_provenance(item, result, file),
        )
        for item, spec, result, protocol, repeats, failure in _times(folder, about, file, device)
        if spec is not None and _is_plain(item)
    ]


def host_rows(folder: Path, about: Mapping[str, Any], file: Results, device: DeviceSpec) -> list[Measurement]:
    """Return no records: a host part has no programs (:func:`write_host`)."""
    return []


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
                    "measured_at": moment(result["at"]),
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
                reason = _impossible(spec, device, float(np.median(repeats)), protocol)
                impossible |= {item["id"]: reason} if reason else {}
            yield item, spec, result, protocol, repeats, failure
    if impossible:
        raise ImpossibleTimesError(file.path, impossible)


def _is_plain(item: Mapping[str, Any]) -> bool:
    return item["implementation"] == "library" and not item["sdpa"]


def _impossible(spec: OperatorSpec, device: DeviceSpec, latency_s: float, protocol: str) -> str:
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
        "measured_at": moment(result["at"]),
    }


def _median(repeats: Sequence[float] | None) -> float | None:
    return float(np.median(repeats)) if repeats else None
