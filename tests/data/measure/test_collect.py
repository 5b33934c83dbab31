"""A complete collection of tiny programs, with failing programs and killed processes."""

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import typer

from cdmpp.cli.collect import exit_if_skipped
from cdmpp.data.load import load_table
from cdmpp.data.measure.collect import LOG, Collector, collect
from cdmpp.data.measure.pools import Outcome
from cdmpp.data.measure.sampling import SampledProgram
from cdmpp.data.measure.settings import CollectSettings
from cdmpp.data.measure.store import FILE, FIRST, Store, StoredMeasurement
from cdmpp.data.measure.targets import Configuration
from cdmpp.data.measure.timers import LocalTimers
from cdmpp.data.summary import info
from cdmpp.devices import load_device, lookup
from cdmpp.devices.loading import specification_toml
from cdmpp.errors import CdmppError, DataError, InvalidDeviceError, InvalidProgramError, MeasurementError
from cdmpp.programs.frontends.tasks import TaskList, TuningTask
from cdmpp.programs.program import TensorProgram
from tests.data.measure.bad_programs import bad_programs
from tests.data.measure.conftest import TINY, Fill
from tests.data.measure.networks import two_layers
from tests.waiting import PATIENCE_S, is_running, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.native]


class Steps:
    """Counts what was shown of the progress."""

    def __init__(self) -> None:
        self.phases: list[tuple[str, int, int]] = []
        self.steps: Counter[bool] = Counter()

    def phase(self, name: str, done: int, total: int) -> None:
        self.phases.append((name, done, total))

    def step(self, ok: bool) -> None:
        self.steps[ok] += 1


@dataclass(frozen=True)
class Collected:
    """A finished collection of the six tiny programs, and the progress that it showed."""

    folder: Path
    hashes: list[str]
    seen: Steps


@pytest.fixture(scope="module")
def collected(
    tmp_path_factory: pytest.TempPathFactory, fill: Fill, quick: CollectSettings, one_thread: Configuration
) -> Collected:
    folder, seen = tmp_path_factory.mktemp("collected"), Steps()
    hashes = fill(folder)
    collect([TINY], [one_thread], folder, quick, progress=seen, command="cdmpp collect ...")
    return Collected(folder, hashes, seen)


@pytest.fixture
def finished(collected: Collected, tmp_path: Path) -> Path:
    """A copy of the finished collection."""
    return Path(shutil.copytree(collected.folder, tmp_path / "finished"))


def refuse_timers(*_: object) -> LocalTimers:
    raise AssertionError("nothing is left to measure")


def test_collection_writes_records_repeats_and_card(collected: Collected) -> None:
    folder, hashes, seen = collected.folder, collected.hashes, collected.seen
    summary = info(folder)
    assert summary["records"] == summary["programs"] == summary["tasks"] == len(hashes) == 6
    assert summary["networks"] == [TINY] and summary["devices"] == ["test-cpu-1t"]
    assert summary["failed"] == summary["flagged"] == summary["duplicates"] == 0
    assert summary["repeats"] == 6 and 0 <= summary["noise_floor"] < 2
    table = load_table(folder)
    assert table.trainable.all() and set(table.program_hashes) == set(hashes)
    assert (table.latency_s > 0).all() and table.repeats_s.null_count == 0
    assert seen.phases == [("measuring", 0, 6), ("second measurements", 0, 6)]
    assert seen.steps == {True: 12}
    assert "cdmpp collect ..." in (folder / "README.md").read_text()
    left = {path.name for path in folder.iterdir()} - {LOG, "collect.lock", "collect.sqlite"}
    assert left == {"README.md", "device.toml", "records.parquet", "repeats.parquet"}
    assert load_device(str(folder / "device.toml")) == table.device_spec("test-cpu-1t")


def test_repeated_call_measures_nothing(finished: Path, quick: CollectSettings, one_thread: Configuration) -> None:
    first, seen = load_table(finished), Steps()
    collect([TINY], [one_thread], finished, quick, timers=refuse_timers, progress=seen)
    again = load_table(finished)
    assert again.latency_s.tolist() == first.latency_s.tolist()
    assert len(again) == 6
    assert seen.phases == [("measuring", 6, 6)] and not seen.steps


def test_failing_programs_do_not_affect_others(
    tmp_path: Path, fill: Fill, quick: CollectSettings, one_thread: Configuration
) -> None:
    good = fill(tmp_path)
    bad = {name: TensorProgram.from_tvm_json(text) for name, text in bad_programs().items()}
    hashes = {name: program.hash for name, program in bad.items()}
    tasks = tuple(TuningTask(name, p.hash, p.tvm_json or "", 1) for name, p in bad.items())
    with Store(tmp_path) as store:
        store.add_network("bad", TaskList("bad", tasks))
        for task in tasks:
            store.add_programs(task.hash, [SampledProgram(task.hash, task.tvm_json, "default")], 0)
    settings = quick.model_copy(update={"time_limit_s": 4.0, "memory_gib": 8.0, "repeat_share": 0.0})
    collect([TINY, "bad"], [one_thread], tmp_path, settings)
    with Store(tmp_path) as store:
        found = {m.program: m for m in store.measurements(FIRST)}
    assert {digest for digest, m in found.items() if not m.failure} == set(good)
    assert found[hashes["crashes"]].failure == "crash: the worker was ended by SIGSEGV"
    assert found[hashes["hangs"]].failure == "timeout: longer than 4 s"
    assert found[hashes["eats"]].failure == "memory: more than 8 GiB"
    summary = info(tmp_path)
    assert (summary["records"], summary["failed"]) == (6, 3)
    table = load_table(tmp_path)
    assert table.trainable.sum() == 6


def test_build_failures_on_a_full_disk_are_not_stored(
    tmp_path: Path, quick: CollectSettings, one_thread: Configuration, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store(tmp_path) as store:
        store.add_network("bad", TaskList("bad", (TuningTask("broken", "broken", "{}", 1),)))
        store.add_programs("broken", [SampledProgram("broken", "{}", "default")], 0)
    monkeypatch.setattr("cdmpp.data.measure.collect.is_disk_full", lambda folder: True)
    with pytest.raises(MeasurementError, match="no space left") as caught:
        collect(["bad"], [one_thread], tmp_path, quick)
    assert caught.value.transient
    with Store(tmp_path) as store:
        assert not list(store.measurements())


def test_configurations_measure_the_same_programs(
    tmp_path: Path, fill: Fill, quick: CollectSettings, one_thread: Configuration
) -> None:
    hashes = fill(tmp_path)
    other = other_level(one_thread, cores_per_unit=16, peak_flops_fp32=9.6e10)
    quick = quick.model_copy(update={"repeat_share": 0.0})
    collect([TINY], [one_thread, other], tmp_path, quick)
    table = load_table(tmp_path)
    rows = Counter(zip(table.device.array(), table.program_key.tolist(), strict=True))
    assert len(rows) == 2 * len(hashes) and set(rows.values()) == {1}
    assert {load_device(str(path)).name for path in tmp_path.glob("device-*.toml")} == set(table.device.used())
    targets = set(table.provenance["target"].array())
    assert {json.loads(text)["mcpu"] for text in targets} == {"x86-64-v2", "x86-64-v3"}


def test_lost_board_stops_the_collection_which_resumes_later(
    tmp_path: Path, fill: Fill, quick: CollectSettings, one_thread: Configuration
) -> None:
    fill(tmp_path)
    quick = quick.model_copy(update={"repeat_share": 0.0})

    class Away(LocalTimers):
        """Loses its device after two programs, as remote timers do, and for good."""

        left = 2

        def time(self, libraries):  # type: ignore[no-untyped-def]
            here, self.left = self.left, 0
            yield from super().time(libraries[:here])
            for _ in libraries[here:]:
                yield Outcome(failure="the session was lost", transient=True)

    with pytest.raises(MeasurementError, match=r"cannot be reached.*session was lost") as caught:
        collect([TINY], [one_thread], tmp_path, quick, timers=Away)
    assert "resume" in caught.value.hint
    # What was measured is in the records already, and the rest follows.
    before = info(tmp_path)["records"]
    assert before == 2
    collect([TINY], [one_thread], tmp_path, quick)
    assert info(tmp_path)["records"] == 6


def other_level(one_thread: Configuration, **changes: object) -> Configuration:
    device = one_thread.device.model_copy(update={"name": "test-cpu-1t-avx2", **changes})
    return replace(one_thread, target={**one_thread.target, "mcpu": "x86-64-v3"}, device=device)


def test_device_name_has_one_target(finished: Path, quick: CollectSettings, one_thread: Configuration) -> None:
    same_name = other_level(one_thread, name=one_thread.name)
    with pytest.raises(DataError, match=r"was measured in .* with target .*x86-64-v2"):
        collect([TINY], [same_name], finished, quick)


def test_folder_resumes_with_another_target_after_a_kill(
    finished: Path, collected: Collected, quick: CollectSettings, one_thread: Configuration
) -> None:
    for name in ("README.md", "records.parquet", "repeats.parquet"):  # killed before the records were written
        (finished / name).unlink()
    collect([TINY], [other_level(one_thread)], finished, quick.model_copy(update={"repeat_share": 0.0}))
    summary = info(finished)
    assert summary["devices"] == ["test-cpu-1t", "test-cpu-1t-avx2"]
    assert summary["records"] == 2 * len(collected.hashes)


def test_irregular_schedules_follow_the_default_of_each_task(
    tmp_path: Path, quick: CollectSettings, one_thread: Configuration
) -> None:
    settings = quick.model_copy(update={"irregular": 2})
    with Store(tmp_path / "irregular") as store:
        Collector(store, settings, [one_thread]).prepare(["elementwise:rows=3,columns=17"])
        origins: dict[str, list[str]] = {}
        for program in store.all_programs():
            origins.setdefault(program.task, []).append(program.origin)
    assert len(origins) == 8 and all(found == ["default", "irregular", "irregular"] for found in origins.values())


def test_duplicate_network_is_collected_once(tmp_path: Path, quick: CollectSettings, one_thread: Configuration) -> None:
    model = tmp_path / "model.onnx"
    model.write_bytes(two_layers())
    out = tmp_path / "out"
    settings = quick.model_copy(update={"schedules": 0, "repeat_share": 0.0})
    collect([str(model), f"{tmp_path}/./model.onnx"], [one_thread], out, settings)
    summary = info(out)
    assert summary["networks"] == ["model.onnx"] and summary["records"] == summary["programs"] == 2
    # Another model under the same name is not taken for this one.
    shutil.copy(Path("examples") / "transformer_block.onnx", model)
    with pytest.raises(DataError, match=r"started with file model\.onnx"):
        collect([str(model)], [one_thread], out, settings)


def test_second_measurement_waits_for_the_gap(
    tmp_path: Path, fill: Fill, quick: CollectSettings, one_thread: Configuration
) -> None:
    fill(tmp_path)
    later = quick.model_copy(update={"repeat_gap_s": 1000.0})
    other = other_level(one_thread)
    with Store(tmp_path) as store:
        collector = Collector(store, later, [one_thread, other])
        collector.prepare([TINY])
        for configuration, age_s in ((one_thread, 2000.0), (other, 1.0)):
            store.add_measurements(
                StoredMeasurement(
                    p.hash, configuration.name, FIRST, (1e-3,), 1e-3, 0.0, 1, measured_at=time.time() - age_s
                )
                for p in store.all_programs()
            )
        due = collector._due(time.time() - later.repeat_gap_s)
        assert {name for _, name in due} == {one_thread.name} and len(due) == 6


def test_refused_call_keeps_records_and_card(finished: Path, quick: CollectSettings, one_thread: Configuration) -> None:
    before = (finished / "README.md").read_text()
    flushing = quick.model_copy(update={"timing": quick.timing.model_copy(update={"flush_cache": True})})
    for settings, sources in ((flushing, [TINY]), (quick, [TINY, "no-such-network"])):
        with pytest.raises(CdmppError):
            collect(sources, [one_thread], finished, settings, command="the second")
    assert (finished / "README.md").read_text() == before and "cdmpp collect ..." in before
    assert info(finished)["records"] == 6


def test_refused_call_in_a_new_folder_does_not_fix_the_seed(
    tmp_path: Path, quick: CollectSettings, one_thread: Configuration
) -> None:
    for seed in (0, 1):
        with pytest.raises(InvalidProgramError, match="no-such-network"):
            collect(["no-such-network"], [one_thread], tmp_path, quick.model_copy(update={"seed": seed}))


def test_device_must_match_the_kind_of_the_target(one_thread: Configuration) -> None:
    with pytest.raises(InvalidDeviceError, match="t4 is a gpu"):
        replace(one_thread, device=lookup("t4"))


def test_cache_flush_is_refused_for_gpus(tmp_path: Path) -> None:
    gpu = Configuration({"kind": "cuda", "arch": "sm_80"}, 1, (), lookup("a100-pcie-40gb"))
    flushing = CollectSettings.model_validate({"timing": {"flush_cache": True}})
    with pytest.raises(DataError, match="caches"):
        collect([TINY], [gpu], tmp_path, flushing)


ROOT = Path(__file__).parents[3]


def _command(out: Path, device: Path, *options: str) -> list[str]:
    command = [sys.executable, "-m", "cdmpp.cli.main", "collect", "--network", TINY, "--target", "x86-64-v2@1"]
    return [*command, "--device", str(device), "--out", str(out), *options]


def test_killed_command_resumes_when_repeated(tmp_path: Path, fill: Fill, one_thread: Configuration) -> None:
    out, device = tmp_path / "out", tmp_path / "cpu.toml"
    hashes = fill(out)
    device.write_text(specification_toml(one_thread.device))
    command = _command(out, device, "--schedules", "0", "--repeat-gap-s", "0", "--json")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    killed = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        _wait_for_a_measurement(out, killed)
        workers = _children(killed.pid)
        assert workers
        killed.send_signal(signal.SIGKILL)
        killed.communicate(timeout=PATIENCE_S)
    finally:
        killed.kill()
    wait_until(lambda: not any(map(is_running, workers)), "the end of the workers")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["records"] == len(hashes) and summary["duplicates"] == summary["failed"] == 0
    assert not [p.name for p in out.iterdir() if p.name.endswith(".part") or p.name == "spool"]


def test_second_collector_is_refused(tmp_path: Path, fill: Fill, one_thread: Configuration) -> None:
    out, device = tmp_path / "out", tmp_path / "cpu.toml"
    fill(out)
    device.write_text(specification_toml(one_thread.device))
    with Store(out):
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = _command(out, device)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 1
    assert f"in use by process {os.getpid()}" in done.stderr and "Traceback" not in done.stderr


def _wait_for_a_measurement(out: Path, process: subprocess.Popen[bytes]) -> None:
    def is_stored() -> bool:
        assert process.poll() is None, f"no measurement was stored: {process.communicate()[1].decode()}"
        with sqlite3.connect(f"file:{out / FILE}?mode=ro", uri=True) as reader:
            return bool(reader.execute("SELECT COUNT(*) FROM measurements").fetchone()[0])

    wait_until(is_stored, "a stored measurement")


def _children(parent: int) -> list[int]:
    listed = Path(f"/proc/{parent}/task/{parent}/children")
    found = [int(pid) for pid in listed.read_text().split()] if listed.exists() else []
    for task in Path(f"/proc/{parent}/task").iterdir():
        found += [int(pid) for pid in (task / "children").read_text().split()]
    return sorted(set(found))


def onnx_file(folder: Path, name: str, operator: str) -> str:
    """An ONNX model of one operator on 16 x 16 numbers."""
    onnx = pytest.importorskip("onnx")
    from onnx import helper

    shape = [16, 16]
    sides = [helper.make_tensor_value_info(side, onnx.TensorProto.FLOAT, shape) for side in "xy"]
    graph = helper.make_graph([helper.make_node(operator, ["x"], ["y"])], "g", sides[:1], sides[1:])
    path = folder / name
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), path)
    return str(path)


def test_a_network_that_tvm_cannot_import_is_skipped(
    tmp_path: Path, quick: CollectSettings, one_thread: Configuration, capfd: pytest.CaptureFixture[str]
) -> None:
    files = [onnx_file(tmp_path, f"{name}.onnx", name) for name in ("Det", "Relu")]
    with Store(tmp_path / "out") as store:
        Collector(store, quick, [one_thread]).prepare(files)
        assert list(store.skipped()) == ["Det.onnx"] and "Det" in store.skipped()["Det.onnx"]
        assert list(store.tasks_by_network()) == ["Relu.onnx"] and store.count_programs() > 0
        Collector(store, quick, [one_thread]).prepare(files)  # it is tried again, and skipped again
        with pytest.raises(CdmppError, match="Det"):
            Collector(store, quick, [one_thread]).prepare(files[:1])
        with pytest.raises(InvalidProgramError, match="no such file"):
            Collector(store, quick, [one_thread]).prepare([*files, str(tmp_path / "typo.onnx")])
    with pytest.raises(typer.Exit) as ended:
        exit_if_skipped(tmp_path / "out", files, {})
    assert ended.value.exit_code == 1 and "skipped: 1 of 2 networks: Det.onnx" in capfd.readouterr().err
    exit_if_skipped(tmp_path / "out", files[1:], {})
