"""Export of a collector's store to records, repeats and a dataset card."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from cdmpp.data.card import write_card
from cdmpp.data.folder import DEVICE, RECORDS, REPEATS
from cdmpp.data.measure.store import FIRST, SECOND, Store, StoredMeasurement, StoredProgram
from cdmpp.data.measure.targets import Configuration, describe
from cdmpp.data.measure.timing import TimingSettings
from cdmpp.data.physics import UNSTABLE
from cdmpp.data.records import Measurement, from_measurements, write_records
from cdmpp.devices.loading import from_mapping, specification_toml
from cdmpp.devices.spec import DeviceSpec
from cdmpp.utils.writing import write_text

#: Name of the source in error tables.
SOURCE = "cdmpp_collect"


def write_dataset(
    store: Store, configurations: Sequence[Configuration], timing: TimingSettings, command: str = ""
) -> Path:
    """Write the content of a store as records, devices and a card; each file is replaced atomically. Returns the
    folder.

    Measurements of other devices in the store keep their earlier description. Records with a spread above the limit of
    ``timing`` are flagged. ``command`` reproduces the data, for the card.
    """
    # The first description is kept, because a measured bandwidth varies by a few per cent.
    store.remember_devices({c.name: describe(c) for c in configurations})
    described = store.devices()
    specs = {name: from_mapping(about["device_spec"]) for name, about in described.items()}
    # The version that built the programs: an archive records it, else this installation.
    conditions = {
        name: {key: about[key] for key in ("target", "threads", "affinity")}
        | {"tvm": about.get("tvm") or version("apache-tvm")}
        for name, about in described.items()
    }
    programs = {program.hash: program for program in store.all_programs()}
    order = {digest: i for i, digest in enumerate(programs)}
    for name, turn in ((RECORDS, FIRST), (REPEATS, SECOND)):
        measurements = sorted(store.measurements(turn), key=lambda m: (order[m.program], m.device))
        if not measurements and turn == SECOND:
            continue
        rows = [
            program_record(programs[m.program], m, conditions[m.device], timing.max_spread, specs[m.device])
            for m in measurements
        ]
        write_records(from_measurements(rows), store.folder / name)
    for name, spec in specs.items():
        file = DEVICE if len(described) == 1 else "device-" + re.sub(r"[^\w.-]+", "-", name) + ".toml"
        write_text(store.folder / file, specification_toml(spec, f"device of {RECORDS}"))
    local_cpu = any(c.kind == "llvm" and c.cores for c in configurations)
    missing = store.count_programs() * len(described) - len(store.measured(list(described), FIRST))
    faults = [f"Not finished: {missing:,} measurements are missing."] if missing else []
    faults += [f"Not collected: {name}: {what}: {why}" for name, what, why in store.left_out()]
    write_card(store.folder, command=command, notes=how_measured(timing, local_cpu), faults=faults)
    return store.folder


def how_measured(timing: TimingSettings, local_cpu: bool) -> tuple[str, ...]:
    """Describe the timing protocol in sentences, for a dataset card; only local CPUs are checked for other work."""
    checked = local_cpu and timing.patience_s > 0
    return (
        "TVM compiled the programs. Its `time_evaluator` timed them in a worker process with pinned threads, "
        "after a warm-up run, on random inputs"
        + (
            ". All arguments but the first were flushed from the CPU's caches before every run."
            if timing.flush_cache
            else " with warm caches."
        ),
        f"A repeat is as many runs as take {timing.repeat_s * 1e3:g} ms. There are {timing.min_repeats} to "
        f"{timing.max_repeats} repeats within about {timing.total_s * 1e3:g} ms. Programs are timed in groups, "
        f"{'once on a quiet CPU, otherwise ' if checked else ''}in {timing.passes} to {timing.max_passes} passes, "
        f"until the two fastest passes of a program differ by at most {100 * timing.agreement:g} %. "
        "The label is the median of the repeats of the fastest pass.",
        f"A record whose interquartile range / median exceeded {100 * timing.max_spread:g} % was timed again, and "
        "the round with the smaller spread was kept. If its spread, or the difference of the two fastest passes, "
        "exceeded the limit too, the record is flagged.",
        f"A program whose run took more than {timing.once_s:g} s was run once after a warm-up run (column `timed`).",
        "No program was compiled while others were timed.",
        *(
            (
                "Runs began when a small matrix product on each core took at most "
                f"{100 * timing.quiet_tolerance:g} % longer than at best, and were repeated if it did not after them, "
                f"for at most {timing.patience_s:g} s per pass.",
            )
            if checked
            else ()
        ),
    )


def program_record(
    program: StoredProgram,
    m: StoredMeasurement,
    conditions: Mapping[str, str],
    max_spread: float,
    device_spec: DeviceSpec | None = None,
) -> Measurement:
    """Return the record of a measured TVM program.

    ``conditions`` are further provenance: target, threads, affinity, versions. A record with a spread above
    ``max_spread`` is flagged. ``device_spec`` is required if cdmpp does not know the device's name.
    """
    return Measurement(
        program=program.tvm_json,
        program_kind="tvm_json",
        program_hash=program.hash,
        task=program.task,
        device=m.device,
        device_spec=device_spec,
        backend="tvm",
        protocol="kernel",
        latency_s=m.latency_s,
        repeats_s=m.repeats_s,
        failure=m.failure,
        source=SOURCE,
        excluded_reason=UNSTABLE if m.spread is not None and m.spread > max_spread else "",
        provenance={
            "task_name": program.task_name,
            "networks": ";".join(program.networks),
            "origin": program.origin,
            "timed": "once" if m.once else "repeatedly" if not m.failure else "",
            "measured_at": utc_text(m.measured_at) if not m.failure else "",
            **conditions,
        },
    )


def utc_text(seconds: float) -> str:
    """Return a time in seconds since 1970 as UTC text."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
