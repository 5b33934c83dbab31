"""``cdmpp probe``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cdmpp.cli.output import JsonOption, print_json, print_table
from cdmpp.cli.progress import steps
from cdmpp.utils.units import format_latency, format_si

if TYPE_CHECKING:
    from cdmpp.data.measure.probe import ProbeResult


def probe(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write.")],
    device: Annotated[str | None, typer.Option(metavar="NAME|FILE", help="The device, if it is not detected.")] = None,
    on: Annotated[
        str | None,
        typer.Option(
            metavar="cpu|cuda[:N]",
            help="Where PyTorch runs the programs.",
            show_default="by the device's kind, else cpu",
        ),
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads on a CPU.", show_default="all cores")] = None,
    protocol: Annotated[
        str,
        typer.Option(
            metavar="eager|graph|kernel",
            help="One call from the host; one of a CUDA graph's calls; the kernels alone (both CUDA only).",
        ),
    ] = "eager",
    json: JsonOption = False,
) -> None:
    """Measure some twenty micro-benchmarks: the ceilings of a device, and first records to adapt with.

    Writes DIR/records.parquet, for `cdmpp adapt --records DIR`, and DIR/device.toml: the specification with
    the rates that the device sustained, for --device. Takes less than two minutes, and at most 1 GiB
    or a 64th of a large board's memory.
    """
    from cdmpp.data.measure.library import LibraryTimer, find_timing_device, free_bytes, matrix_types
    from cdmpp.data.measure.probe import memory_limit, probe_programs
    from cdmpp.data.measure.probe import probe as run_probe
    from cdmpp.devices import load_device

    spec = None if device is None else load_device(device)
    where = on or ("cuda" if spec is not None and spec.kind == "gpu" else "cpu")
    timing_device = find_timing_device(where, spec, threads)
    timer = LibraryTimer(timing_device, protocol)
    limit = memory_limit(timing_device.device, free_bytes(timing_device))
    programs = probe_programs(timing_device.device, matrix_types(timing_device), limit)
    with timer.ready(), steps("micro-benchmarks", len(programs)) as step:
        result = run_probe(timing_device.device, programs, lambda spec: timer.record(spec, "probe"), step)
    _write(result, out)
    if json:
        print_json(_summary(result, out))
    else:
        _print(result, out)
    if all(record.failure for record in result.records):
        print("error: no program could be run", file=sys.stderr)
        raise typer.Exit(1)


def _write(result: ProbeResult, out: Path) -> None:
    from cdmpp.data.folder import DEVICE, RECORDS
    from cdmpp.data.records import from_measurements, write_records
    from cdmpp.devices.loading import specification_toml
    from cdmpp.utils.writing import make_folder, replacing

    make_folder(out)
    write_records(from_measurements(list(result.records)), out / RECORDS)
    with replacing(out / DEVICE) as aside:
        comment = "nominal figures, and what cdmpp probe measured"
        aside.write_text(specification_toml(result.device, comment), encoding="utf-8")


def _summary(result: ProbeResult, out: Path) -> dict[str, Any]:
    ceilings = result.device.sustained
    return {
        "device": result.device.name,
        "path": os.fspath(out),
        "programs": [
            {"program": r.program, "latency_s": r.latency_s, "repeats": len(r.repeats_s)}
            | {"excluded_reason": r.excluded_reason, "failure": r.failure}
            for r in result.records
        ],
        "sustained": ceilings.figures() if ceilings else {},
        "warnings": [{"code": w.code, "message": w.message} for w in result.warnings],
    }


def _print(result: ProbeResult, out: Path) -> None:
    rows = []
    for record in result.records:
        remark = record.failure or record.excluded_reason
        latency = "-" if record.latency_s is None else format_latency(record.latency_s)
        rows.append((record.program, latency, remark))
    print_table(("program", "latency", ""), rows, right=(1,))
    print()
    ceilings = result.device.sustained
    rows = []
    for name, value in (ceilings.figures() if ceilings else {}).items():
        if name.startswith("floor_"):
            rows.append((name, format_latency(value), ""))
        else:
            unit = "B/s" if name == "bytes_per_s" else "flop/s" if "flops" in name else "op/s"
            rows.append((name, format_si(value, unit), ""))
    print_table((f"sustained by {result.device.name}", "", ""), rows, right=(1,))
    for warning in result.warnings:
        print(f"warning: {warning.code}: {warning.message}")
    print(f"wrote {out / 'records.parquet'} and {out / 'device.toml'}")
