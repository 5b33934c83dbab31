"""Measuring jobs: programs are built on one machine and timed on another, which needs no compiler.

A job folder has ``manifest.json`` (built programs, timing settings, a checksum of every file),
``programs.sqlite`` (tasks and programs), ``programs/PROGRAM-TARGET.so`` (a library per pair, by hash) and
``work/`` (files of the builder, needed to resume building, not to measure).
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from cdmpp.data.folder import STORE
from cdmpp.data.measure.building import Library, build_program, check_toolchain
from cdmpp.data.measure.collect import Collector, check_settings
from cdmpp.data.measure.pools import Outcome
from cdmpp.data.measure.settings import CollectSettings, ProgressListener
from cdmpp.data.measure.store import Store, StoredProgram, disk_errors, disk_full_error, is_disk_full
from cdmpp.data.measure.targets import Configuration, describe, pinned_cores
from cdmpp.data.measure.timers import LocalTimers, Timers, on_this_machine
from cdmpp.devices.loading import from_mapping, load_device
from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import DataError, InvalidDeviceError
from cdmpp.utils.files import MAX_REQUEST_BYTES, open_file, read_json
from cdmpp.utils.writing import write_text

FORMAT = 1
MANIFEST, PROGRAMS, LIBRARIES = "manifest.json", "programs.sqlite", "programs"
WORK = "work"
_COPY_AGAIN = "copy the job again"


class JobProgram(BaseModel):
    """A program of a job, built for a target, or the reason why it could not be built."""

    hash: str
    build_key: str
    failure: str = ""
    file: str = ""
    sha256: str = ""
    arguments: tuple[tuple[tuple[int, ...], str, bool], ...] = ()
    build_s: float = 0.0

    def stored(self) -> dict[str, Any]:
        """Return the fields as JSON values, without those that are empty."""
        return self.model_dump(mode="json", exclude_defaults=True)


class JobConfiguration(BaseModel):
    """The device and target of a job, as of :class:`~cdmpp.data.measure.targets.Configuration`."""

    target: dict[str, Any]
    threads: int
    device: DeviceSpec
    names: tuple[str, ...] = ()


class Manifest(BaseModel):
    """Content of ``manifest.json``."""

    format: int
    tvm: str
    kind: str
    settings: CollectSettings
    configurations: tuple[JobConfiguration, ...] = Field(min_length=1)
    files: dict[str, str]
    programs: tuple[JobProgram, ...]

    def text(self) -> str:
        """Return the manifest as JSON; programs leave out what they do not have."""
        programs = [program.stored() for program in self.programs]
        return json.dumps(self.model_dump(mode="json", exclude={"programs"}) | {"programs": programs}, indent=1)

    def libraries(self, folder: Path) -> dict[tuple[str, str], Outcome]:
        """Return the libraries, or why there are none, by build key and program."""
        return {
            (p.build_key, p.hash): Outcome(failure=p.failure)
            if p.failure
            else Outcome(Library(str((folder / p.file).resolve()), p.arguments, p.build_s))
            for p in self.programs
        }


def write_job(
    sources: Sequence[str],
    configurations: Sequence[Configuration],
    out: str | Path,
    settings: CollectSettings | None = None,
    *,
    progress: ProgressListener | None = None,
    dims: Mapping[str, int] | None = None,
) -> Manifest:
    """Lower, sample and build, without running programs; a repeated call resumes.

    The parameters are those of :func:`cdmpp.data.measure.collect.collect`; the settings become part of the job, and may
    not request a search, which needs measurements. The folder is complete once it has its manifest, which is written
    last.
    """
    settings = settings or CollectSettings()
    check_settings(settings, configurations, measures=False)
    for configuration in configurations:
        check_toolchain(configuration.target)
    folder = Path(out)
    with Store(folder / WORK) as store:
        writer = _Writer(store, settings, configurations, progress=progress)
        writer.prepare(sources, dims)
        with disk_errors(folder / PROGRAMS):
            programs = writer.build(folder)
            aside = folder / f"{WORK}.part"
            aside.unlink(missing_ok=True)
            with closing(sqlite3.connect(store.folder / STORE)) as db:
                db.execute("VACUUM INTO ?", (str(aside),))  # a compact copy of the open store
            os.replace(aside, folder / PROGRAMS)
            manifest = Manifest(
                format=FORMAT,
                tvm=version("apache-tvm"),
                kind=configurations[0].kind,
                settings=settings,
                configurations=tuple(
                    JobConfiguration(target=dict(c.target), threads=c.threads, device=c.device, names=c.names)
                    for c in configurations
                ),
                files={PROGRAMS: _sha256(folder / PROGRAMS)},
                programs=programs,
            )
            write_text(folder / MANIFEST, manifest.text())
    return manifest


def read_job(job: str | Path) -> Manifest:
    """Return the manifest of a job, after checking every file against its checksum."""
    folder = Path(job)
    path = folder / MANIFEST
    if not os.path.lexists(path):
        raise DataError(f"{folder} is not a complete job", hint="cdmpp collect ... --build-only --out JOB writes one")
    content = read_json(path, _COPY_AGAIN, max_bytes=MAX_REQUEST_BYTES)
    if not isinstance(content, dict):
        raise DataError(f"{path} is not a JSON object", hint=_COPY_AGAIN)
    if content.get("format") != FORMAT:
        raise DataError(
            f"{folder} has format {content.get('format')}, not {FORMAT}", hint="use the cdmpp that wrote it"
        )
    try:
        manifest = Manifest.model_validate(content)
        checksums = {PROGRAMS: manifest.files[PROGRAMS]}
        if any("kind" not in configuration.target for configuration in manifest.configurations):
            raise ValueError("a target without a kind")
    except (KeyError, ValueError) as error:
        raise DataError(f"{path} is not the manifest of a job: {error!r}", hint=_COPY_AGAIN) from None
    checksums |= {program.file: program.sha256 for program in manifest.programs if not program.failure}
    for name, digest in checksums.items():
        if not (folder / name).resolve().is_relative_to(folder.resolve()):
            raise DataError(f"{path}: {name[:200]!r} is outside of the job", hint=_COPY_AGAIN)
        try:
            actual = _sha256(folder / name)
        except OSError as error:
            raise DataError(f"{folder / name}: {error.strerror}", hint=_COPY_AGAIN) from None
        if actual != digest:
            raise DataError(f"{folder / name} is damaged", hint=_COPY_AGAIN)
    return manifest


def measure_job(
    job: str | Path,
    out: str | Path,
    *,
    device: str | None = None,
    threads: int | None = None,
    timers: Callable[[Configuration, CollectSettings], Timers] = LocalTimers,
    progress: ProgressListener | None = None,
) -> Path:
    """Time every program of a job, or resume an interrupted measurement; returns ``out``, a folder as of ``cdmpp
    collect``.

    It needs TVM's runtime, numpy and pebble; no compiler, torch or pyarrow. The measurements are in ``collect.sqlite``
    of the result. :func:`finish` converts them to a dataset, on a machine with pyarrow. ``device`` names this machine's
    device, or its specification file, if it differs from the job's; it is required if ``threads`` differ. If the device
    is lost, the measurements stay.
    """
    folder, result = Path(job), Path(out)
    manifest = read_job(folder)
    if result.resolve() == folder.resolve():
        raise DataError("the results cannot be written into the job folder", hint="choose another --out")
    settings = manifest.settings
    with Store(result) as store:
        store.settle({"seed": settings.seed, "target_kind": manifest.kind, "timing": settings.timing.model_dump()})
        store.take_programs(folder / PROGRAMS)
        configurations = _here(manifest, device, threads, store.devices())
        libraries = manifest.libraries(folder)

        def collector() -> _Collector:
            collector = _Collector(store, settings, configurations, timers=timers, progress=progress)
            collector.libraries = libraries
            return collector

        if collector().is_complete():  # needs neither TVM nor a device
            return result
        if timers is LocalTimers:
            configurations = [on_this_machine(c, settings) for c in configurations]
        described = {c.name: {**describe(c), "tvm": manifest.tvm} for c in configurations}
        store.remember_devices(described)
        collector().measure()
    return result


def finish(job: str | Path, out: str | Path) -> Path:
    """Write ``records.parquet``, ``repeats.parquet`` and the card of the measurements; needs pyarrow."""
    from cdmpp.data.measure.dataset import write_dataset

    timing = read_job(job).settings.timing
    with Store(Path(out)) as store:
        return write_dataset(store, (), timing)


class _Writer(Collector):
    """A collector that stores the built programs and times none."""

    def build(self, folder: Path) -> tuple[JobProgram, ...]:
        """Build missing programs; return all programs for each target."""
        (folder / LIBRARIES).mkdir(exist_ok=True)
        for left in (folder / LIBRARIES).glob("*.part.*"):  # left by a killed process
            left.unlink()
        targets: dict[str, dict[str, Any]] = {}
        for configuration in self.configurations:
            targets.setdefault(configuration.build_key, dict(configuration.target))

        def file(program: StoredProgram, key: str) -> str:
            return f"{LIBRARIES}/{program.hash}-{hashlib.sha256(key.encode()).hexdigest()[:8]}.so"

        def facts(program: StoredProgram, key: str, outcome: Outcome) -> tuple[dict[str, Any], bytes]:
            built = JobProgram(hash=program.hash, build_key=key, failure=outcome.failure)
            if not outcome.failure:
                name, library = file(program, key), outcome.value
                about = {"file": name, "sha256": _sha256(folder / name), "arguments": library.arguments}
                built = built.model_copy(update={**about, "build_s": round(library.build_s, 4)})
            elif is_disk_full(folder):
                raise disk_full_error(folder)
            return built.stored(), b""

        pairs = [(program, key) for program in self.store.all_programs() for key in targets]
        built = self._build_for_export(
            pairs, build_program, lambda p, key: (p.tvm_json, targets[key], str(folder / file(p, key))), facts
        )
        return tuple(JobProgram.model_validate(built[p.hash, key][0]) for p, key in pairs)


class _Collector(Collector):
    """A collector whose programs are already built: ``libraries`` by build key and program."""

    libraries: Mapping[tuple[str, str], Outcome]

    def is_complete(self) -> bool:
        """Whether everything is measured; a missing program that is not part of this job is an error."""
        names = [c.name for c in self.configurations]
        missing = self.store.missing(names, self.store.count_programs())
        due = self._due()
        needed = {program.hash for program in missing} | {program for program, _ in due}
        if any((c.build_key, digest) not in self.libraries for digest in needed for c in self.configurations):
            raise DataError(f"{self.store.folder} has programs of another job", hint="choose another --out")
        return not needed

    def _build(
        self, wanted: dict[str, list[StoredProgram]], chosen: Sequence[Configuration]
    ) -> dict[tuple[str, str], Outcome]:
        pairs = [(c.build_key, program.hash) for c in chosen for program in wanted[c.name]]
        return {pair: self.libraries[pair] for pair in pairs}


def _here(
    manifest: Manifest, device: str | None, threads: int | None, known: Mapping[str, Mapping[str, Any]]
) -> list[Configuration]:
    """Return the job's configurations for this machine; ``known`` has the devices of earlier calls."""
    entries = manifest.configurations
    if len(entries) > 1 and (device is not None or threads is not None):
        raise InvalidDeviceError(f"the job is for {len(entries)} configurations", hint="omit --device and --threads")
    configurations = []
    for entry in entries:
        spec, names = (entry.device, entry.names) if device is None else (load_device(device), ())
        if entry.target["kind"] != "llvm":
            before = [from_mapping(known[name]["device_spec"]) for name in names if name in known]
            if len(names) > 1 and before:  # an earlier call has identified the board
                spec, names = before[0], (before[0].name,)
            configurations.append(Configuration(entry.target, 1, (), spec, names))
            continue
        used = threads or entry.threads
        if used != entry.threads and device is None:
            raise InvalidDeviceError(
                f"{spec.name} is a device of {entry.threads} threads, not {used}",
                hint="name this machine's device: --device NAME or FILE.toml",
            )
        cores = pinned_cores(used, "choose other values with --threads and --device")
        configurations.append(Configuration(entry.target, used, cores, spec, names))
    return configurations


def _sha256(path: Path) -> str:
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
