"""From a collector's store to the files that others read: records, repeats, card."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cdmpp.data.records import Measurement, from_measurements, write_records
from cdmpp.measure.store import FIRST, SECOND, Store, StoredMeasurement, StoredProgram
from cdmpp.measure.targets import Configuration, describe

RECORDS, REPEATS = "records.parquet", "repeats.parquet"
#: A record whose repeats disagree by more than the stated spread: kept, flagged, not trained on.
UNSTABLE = "unstable"
#: Name of the source in every table of errors.
SOURCE = "cdmpp_collect"


def write_dataset(store: Store, configurations: Sequence[Configuration], max_spread: float) -> Path:
    """Write what a store holds as project records, each file aside first.

    Parameters
    ----------
    store : Store
    configurations : sequence of Configuration
        Measurements of other devices in the store are written with what an earlier call said of them.
    max_spread : float
        Interquartile range / median above which a record is flagged.

    Returns
    -------
    Path
        The folder.
    """
    # The first description stays: a bandwidth that is measured anew varies by some per cent.
    described = {**{c.name: describe(c) for c in configurations}, **store.devices()}
    store.remember_devices(described)
    programs = {program.hash: program for program in store.all_programs()}
    order = {digest: i for i, digest in enumerate(programs)}
    for name, turn in ((RECORDS, FIRST), (REPEATS, SECOND)):
        found = sorted(store.measurements(turn), key=lambda m: (order[m.program], m.device))
        if not found and turn == SECOND:
            continue
        rows = list(_rows(found, programs, described, max_spread))
        write_records(from_measurements(rows), store.folder / name)
    return store.folder


def _rows(
    found: Sequence[StoredMeasurement],
    programs: dict[str, StoredProgram],
    described: dict[str, dict[str, Any]],
    max_spread: float,
) -> Iterator[Measurement]:
    from importlib.metadata import version

    from cdmpp.devices.loading import from_mapping

    specs = {name: from_mapping(entry["device_spec"]) for name, entry in described.items()}
    for m in found:
        program, about = programs[m.program], described[m.device]
        moment = datetime.datetime.fromtimestamp(m.measured_at, datetime.UTC)
        unstable = m.spread is not None and m.spread > max_spread
        yield Measurement(
            program=program.tvm_json,
            program_kind="tvm_json",
            program_hash=program.hash,
            task=program.task,
            device=m.device,
            device_spec=specs[m.device],
            backend="tvm",
            protocol="kernel",
            latency_s=m.latency_s,
            repeats_s=m.repeats_s,
            failure=m.failure,
            source=SOURCE,
            excluded_reason=UNSTABLE if unstable else "",
            provenance={
                "task_name": program.task_name,
                "networks": ";".join(program.networks),
                "origin": program.origin,
                "target": about["target"],
                "threads": about["threads"],
                "affinity": about["affinity"],
                "timed": "once" if m.once else "repeatedly" if not m.failure else "",
                # An archive says which TVM built it; here the one at work did.
                "tvm": about.get("tvm") or version("apache-tvm"),
                "measured_at": moment.strftime("%Y-%m-%dT%H:%M:%SZ") if not m.failure else "",
            },
        )
