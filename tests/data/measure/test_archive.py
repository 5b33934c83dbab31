"""Jobs: building on one machine, measuring on another."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cdmpp.data.load import load_table
from cdmpp.data.measure.archive import MANIFEST, finish, measure_job, read_job, write_job
from cdmpp.data.measure.building import Library
from cdmpp.data.measure.pools import Outcome
from cdmpp.data.measure.settings import CollectSettings
from cdmpp.data.measure.targets import Configuration
from cdmpp.data.measure.timing import TimedRun, Timing
from cdmpp.data.summary import info
from cdmpp.devices.registry import family, lookup
from cdmpp.errors import DataError, InvalidDeviceError, MeasurementError
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.tvm, pytest.mark.native]

TINY = "tiny"
PROGRAMS = 6


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, tiny_programs: list[str]) -> Iterator[Path]:
    """Where :func:`job` keeps the one job that is built."""
    yield tmp_path_factory.mktemp("archive") / "job"


@pytest.fixture
def job(
    built: Path, tmp_path: Path, fill: Callable[[Path], list[str]], quick: CollectSettings, one_thread: Configuration
) -> Path:
    """A complete job, each test with a copy of its own."""
    if not built.exists():
        fill(built / "work")
        write_job([TINY], [one_thread], built, quick)
    return Path(shutil.copytree(built, tmp_path / "job"))


class CountingTimers:
    """Times without running, until it is told that the device is gone."""

    timed = 0

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def __call__(self, configuration: Configuration, settings: CollectSettings) -> CountingTimers:
        return self

    def ready(self) -> None:
        pass

    def time(self, libraries: Sequence[Library]) -> Iterator[Outcome]:
        for library in libraries:
            assert Path(library.path).is_file()
            self.timed += 1
            if self.timed > self.limit:
                yield Outcome(failure="the board is gone", transient=True)
            else:
                yield Outcome(TimedRun(Timing((1e-6, 2e-6, 3e-6), 1), 0.1, 0.01))

    def close(self) -> None:
        pass


def test_manifest_lists_the_programs(job: Path, tiny_programs: list[str]) -> None:
    manifest = read_job(job)
    assert len(manifest.programs) == PROGRAMS
    assert manifest.configurations[0].device.name == "test-cpu-1t"
    first = manifest.programs[0]
    assert first.arguments == (((64, 32), "float32", False), ((64, 32), "float32", True))
    assert (job / first.file).read_bytes()[:4] == b"\x7fELF"
    assert not list(job.rglob("*.part*"))


def test_building_resumes_after_an_interruption(job: Path, quick: CollectSettings, one_thread: Configuration) -> None:
    before = {p.name: p.stat().st_mtime_ns for p in (job / "programs").iterdir()}
    with closing(sqlite3.connect(job / "work" / "collect.sqlite")) as db, db:
        db.execute("DELETE FROM built WHERE rowid > 4")  # as a kill leaves it
    (job / MANIFEST).unlink()
    with pytest.raises(DataError, match="not a complete job"):
        read_job(job)
    manifest = write_job([TINY], [one_thread], job, quick)
    assert len(manifest.programs) == PROGRAMS
    after = {p.name: p.stat().st_mtime_ns for p in (job / "programs").iterdir()}
    assert sorted(after) == sorted(before)
    assert sum(after[name] == before[name] for name in before) == 4


def test_file_names_depend_on_the_target_only(job: Path, quick: CollectSettings, one_thread: Configuration) -> None:
    left = job / "programs" / "program.so.7.part.so"
    left.write_text("half")  # as a kill leaves it
    before = {p.name: p.read_bytes() for p in (job / "programs").iterdir() if p != left}
    other = replace(
        one_thread,
        target={**one_thread.target, "mcpu": "x86-64-v3"},
        device=one_thread.device.model_copy(update={"name": "test-cpu-1t-avx2"}),
    )
    manifest = write_job([TINY], [other, one_thread], job, quick)
    after = {p.name: p.read_bytes() for p in (job / "programs").iterdir()}
    assert len(after) == len(manifest.programs) == 2 * PROGRAMS and left.name not in after
    assert {name: after[name] for name in before} == before
    assert len({program.file for program in manifest.programs}) == 2 * PROGRAMS


def test_cache_flush_is_refused_for_gpus(tmp_path: Path, one_thread: Configuration) -> None:
    gpu = replace(one_thread, target={"kind": "cuda", "arch": "sm_80"}, device=lookup("t4"))
    flushing = CollectSettings.model_validate({"timing": {"flush_cache": True}})
    with pytest.raises(DataError, match="caches"):
        write_job([TINY], [gpu], tmp_path / "job", flushing)


def test_search_is_refused_in_a_job(tmp_path: Path, one_thread: Configuration) -> None:
    with pytest.raises(MeasurementError, match="search"):
        write_job([TINY], [one_thread], tmp_path / "job", CollectSettings(tune=8))


def test_job_is_measured_without_compiler_torch_and_pyarrow(job: Path, tmp_path: Path) -> None:
    """TVM with its compiler library taken away; a folder of records where pyarrow is."""
    bare = tmp_path / "site"
    _runtime_only_tvm(bare)
    for name in ("torch", "pyarrow"):
        (bare / f"{name}.py").write_text(f"raise ModuleNotFoundError('no {name}', name='{name}')")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TVM_")} | {
        "PYTHONPATH": f"{bare}{os.pathsep}{Path(__file__).parents[3]}"
    }
    out = tmp_path / "result"
    command = [sys.executable, "-m", "cdmpp.cli.main", "measure", str(job), "--out", str(out), "--json"]
    check = "import tvm.base as b; assert b._RUNTIME_ONLY; import os; print(os.path.dirname(b.__file__))"
    where = subprocess.run([sys.executable, "-c", check], env=environment, capture_output=True, text=True)
    assert where.stdout.strip() == str(bare / "tvm"), where.stderr
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "'.[train]'" in done.stderr
    assert json.loads(done.stdout) == {"path": str(out), "dataset": False}
    assert not (out / "records.parquet").exists()
    # The same command, where pyarrow is; and where no device is needed any more.
    again = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    summary = json.loads(again.stdout)
    assert (summary["records"], summary["programs"], summary["failed"]) == (PROGRAMS, PROGRAMS, 0)
    assert summary["devices"] == ["test-cpu-1t"]
    assert summary["networks"] == [TINY]
    table = load_table(out / "records.parquet")
    assert len(table) == PROGRAMS
    assert (table.latency_s > 0).all()


def _runtime_only_tvm(folder: Path) -> None:
    import tvm

    installed = Path(tvm.__file__).parent
    (folder / "tvm" / "lib").mkdir(parents=True)
    for path in installed.iterdir():
        if path.name != "lib":
            (folder / "tvm" / path.name).symlink_to(path)
    for path in (installed / "lib").iterdir():
        if "compiler" not in path.name:
            (folder / "tvm" / "lib" / path.name).symlink_to(path)


def test_measuring_resumes_after_an_interruption(job: Path, tmp_path: Path) -> None:
    out = tmp_path / "result"
    broken = CountingTimers(limit=2)
    with pytest.raises(MeasurementError, match="the board is gone") as caught:
        measure_job(job, out, timers=broken)
    assert caught.value.transient
    assert "repeat the same command" in caught.value.hint
    healed = CountingTimers(limit=10**6)
    measure_job(job, out, timers=healed)
    assert healed.timed == PROGRAMS - 2 + PROGRAMS  # all of them a second time, for the noise floor
    summary = info(finish(job, out))
    assert (summary["records"], summary["duplicates"], summary["failed"]) == (PROGRAMS, 0, 0)
    idle = CountingTimers(limit=0)
    measure_job(job, out, timers=idle)
    assert idle.timed == 0


def test_provenance_has_the_tvm_version_of_the_build(job: Path, tmp_path: Path) -> None:
    manifest = json.loads((job / MANIFEST).read_text())
    manifest["tvm"] = "0.27.0.other"
    (job / MANIFEST).write_text(json.dumps(manifest))
    out = tmp_path / "result"
    measure_job(job, out, timers=CountingTimers(10**6))
    with sqlite3.connect(out / "collect.sqlite") as db:
        (text,) = db.execute("SELECT description FROM devices").fetchone()
    assert json.loads(text)["tvm"] == "0.27.0.other"


def test_damaged_job_is_refused(job: Path, tmp_path: Path) -> None:
    library = next((job / "programs").iterdir())
    library.write_bytes(library.read_bytes()[:-1])
    with pytest.raises(DataError, match=f"{library.name} is damaged"):
        measure_job(job, tmp_path / "result", timers=CountingTimers(10**6))
    library.unlink()
    with pytest.raises(DataError, match=library.name):
        read_job(job)


@pytest.mark.parametrize("content", ["", "[]", '{"format": 99}'])
def test_invalid_manifest_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / MANIFEST).write_text(content)
    with pytest.raises(DataError):
        read_job(tmp_path)


def test_first_measurement_settles_the_board_of_a_family(job: Path, tmp_path: Path) -> None:
    """The second call, where no GPU is, finds what the first one found."""
    boards = family("a100")
    manifest = json.loads((job / MANIFEST).read_text())
    manifest["configurations"][0] |= {
        "target": {**manifest["configurations"][0]["target"], "kind": "cuda"},
        "device": lookup(boards[0]).model_dump(mode="json"),
        "names": boards,
    }
    manifest["kind"] = "cuda"
    for entry in manifest["programs"]:
        entry["build_key"] = entry["build_key"].replace("llvm", "cuda")
    (job / MANIFEST).write_text(json.dumps(manifest))
    out = tmp_path / "result"
    # As the driver of the first machine said.
    measure_job(job, out, device=boards[-1], timers=CountingTimers(10**6))
    idle = CountingTimers(limit=0)
    measure_job(job, out, timers=idle)
    assert idle.timed == 0
    assert info(finish(job, out))["devices"] == [boards[-1]]


def test_job_of_another_cpu_is_refused(job: Path, tmp_path: Path) -> None:
    manifest = json.loads((job / MANIFEST).read_text())
    manifest["configurations"][0]["names"] = ["no-such-cpu-1t-sse42"]
    (job / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(InvalidDeviceError, match="names no-such-cpu-1t-sse42") as caught:
        measure_job(job, tmp_path / "result")
    assert "--device" in caught.value.hint


def test_threads_are_part_of_the_device(job: Path, tmp_path: Path) -> None:
    timers: dict[str, Any] = {"timers": CountingTimers(10**6)}
    with pytest.raises(InvalidDeviceError, match="1 threads, not 2"):
        measure_job(job, tmp_path / "result", threads=2, **timers)
    with pytest.raises(InvalidDeviceError, match="cores"):
        measure_job(job, tmp_path / "result", threads=100_000, device="xeon-platinum-8124m", **timers)


def test_results_of_different_jobs_are_not_mixed(job: Path, tmp_path: Path) -> None:
    out = tmp_path / "result"
    measure_job(job, out, timers=CountingTimers(10**6))
    manifest = json.loads((job / MANIFEST).read_text())
    manifest["settings"]["timing"]["repeat_s"] = 0.5
    (job / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(DataError, match="timing"):
        measure_job(job, out, timers=CountingTimers(10**6))


def test_results_in_the_job_folder_are_refused(job: Path) -> None:
    with pytest.raises(DataError, match="cannot be written into the job folder"):
        measure_job(job, job)


def test_missing_device_is_reported_first(job: Path, tmp_path: Path) -> None:
    (job / MANIFEST).write_text((job / MANIFEST).read_text().replace("llvm", "vulkan"))
    with pytest.raises(MeasurementError, match="vulkan"):
        measure_job(job, tmp_path / "result", device="t4")
    with sqlite3.connect(tmp_path / "result" / "collect.sqlite") as db:
        assert db.execute("SELECT COUNT(*) FROM measurements").fetchone() == (0,)


def test_cpu_job_is_refused_for_a_gpu(job: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidDeviceError, match="t4 is a gpu"):
        measure_job(job, tmp_path / "result", device="t4")
