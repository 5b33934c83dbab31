"""Folders of programs to measure (writing, editing, resumed measuring), and choice of schedules from a pool."""

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from cdmpp.data.load import load_table
from cdmpp.data.measure import choosing
from cdmpp.data.measure.choosing import Array, EnsembleChooser
from cdmpp.data.measure.sampling import SampledProgram
from cdmpp.data.measure.todo import Todo, is_todo, measure_programs, read_todo, records_path, write_todo
from cdmpp.data.physics import UNSTABLE
from cdmpp.data.records import Measurement, as_device
from cdmpp.devices import load_device, lookup
from cdmpp.errors import DataError
from cdmpp.features.encode import EncodedPrograms
from cdmpp.programs.operators import OperatorSpec, parse_operator
from tests.data.test_device_specs import cpu

PROGRAMS = tuple(map(parse_operator, ("linear:m=8,n=8,k=8", "relu:rows=1,cols=1", "softmax:rows=4,cols=4")))


def todo() -> Todo:
    about = {"model": "models/base", "k": 3}
    return Todo(PROGRAMS, (1e-3, 2e-5, 3e-5), cpu("mine"), "eager", "pytorch", about, 12.3)


def measure(spec: OperatorSpec) -> Measurement:
    return Measurement(
        spec.text(), "operator", "mine", 1e-3, program_hash=spec.hash(), protocol="eager", device_spec=cpu("mine")
    )


def test_todo_round_trip(tmp_path: Path) -> None:
    folder = tmp_path / "todo"
    write_todo(todo(), folder)
    assert is_todo(folder) and read_todo(folder) == todo()
    assert load_device(str(folder / "device.toml")) == cpu("mine")
    readme = (folder / "README.md").read_text()
    assert f"cdmpp measure {folder} --on cpu" in readme and "about 12.3 s" in readme
    assert f"--device {folder / 'device.toml'}" in readme
    known = Todo(PROGRAMS, (1, 1, 1), lookup("t4"), "kernel", "", {}, 1.0)
    write_todo(known, tmp_path / "t4")
    assert "--on cuda:0" in (tmp_path / "t4" / "README.md").read_text()
    assert "--device" not in (tmp_path / "t4" / "README.md").read_text()


def test_nonempty_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "programs.csv").write_text("mine")
    with pytest.raises(DataError, match="not empty"):
        write_todo(todo(), tmp_path)
    with pytest.raises(DataError, match="not empty"):
        write_todo(todo(), tmp_path / "programs.csv")
    assert (tmp_path / "programs.csv").read_text() == "mine"


def test_entered_latencies_become_records(tmp_path: Path) -> None:
    write_todo(todo(), tmp_path / "todo")
    path = tmp_path / "todo" / "programs.csv"
    rows = list(csv.DictReader(path.read_text().splitlines()))
    rows[0]["latency_us"], rows[2]["latency_us"] = "120", "7.5"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    table = as_device(load_table(path), cpu("mine"))
    assert table.latency_s[[0, 2]].tolist() == pytest.approx([1.2e-4, 7.5e-6])
    assert table.trainable.tolist() == [True, False, True]
    assert table.protocol.used() == ("eager",) and table.framework.used() == ("pytorch",)


def test_edited_folders_are_read_or_refused(tmp_path: Path) -> None:
    write_todo(todo(), tmp_path / "todo")
    path = tmp_path / "todo" / "programs.csv"
    whole = path.read_text()
    path.write_text("program\nrelu:\n")
    with pytest.raises(DataError, match="row 1: relu"):
        read_todo(tmp_path / "todo")
    path.write_text('program\n"relu:rows=2,cols=2"\n')
    assert [s.text() for s in read_todo(tmp_path / "todo").programs] == ["relu:dtype=float32,rows=2,cols=2"]
    path.write_text("program\n")
    with pytest.raises(DataError, match="no programs"):
        read_todo(tmp_path / "todo")
    path.write_text(whole)
    (tmp_path / "todo" / "select.json").write_text("{}")
    with pytest.raises(DataError, match="not a folder of cdmpp select"):
        read_todo(tmp_path / "todo")


def test_interrupted_run_resumes(tmp_path: Path) -> None:
    path = records_path(None, tmp_path)
    seen: list[str] = []

    def stops(spec: OperatorSpec) -> Measurement:
        if spec.operator == "softmax":
            raise KeyboardInterrupt
        seen.append(spec.operator)
        return measure(spec)

    with pytest.raises(KeyboardInterrupt):
        measure_programs(PROGRAMS, stops, path, device="mine", protocol="eager")
    assert len(load_table(path)) == 2
    steps: list[None] = []
    done = measure_programs(PROGRAMS, measure, path, device="mine", protocol="eager", step=lambda: steps.append(None))
    assert (done.records, done.new, done.failed, len(steps)) == (3, 1, {}, 3)
    assert load_table(path).op.array().tolist() == ["linear", "relu", "softmax"]
    assert load_table(path).device_spec("mine") == cpu("mine")
    again = measure_programs(PROGRAMS, stops, path, device="mine", protocol="eager")
    assert again.new == 0 and seen == ["linear", "relu"]


def test_failed_programs_are_retried(tmp_path: Path) -> None:
    def fails(spec: OperatorSpec) -> Measurement:
        if spec.operator == "relu":
            return Measurement(spec.text(), "operator", "mine", None, protocol="eager", failure="no kernel")
        return measure(spec)

    path = records_path(tmp_path / "out", tmp_path)
    first = measure_programs(PROGRAMS, fails, path, device="mine", protocol="eager")
    assert (first.records, first.failed) == (2, {PROGRAMS[1].text(): "no kernel"})
    second = measure_programs(PROGRAMS, measure, path, device="mine", protocol="eager")
    assert (second.records, second.new, second.failed) == (3, 1, {})
    assert len(load_table(path)) == 3


def test_noisy_programs_are_measured_twice(tmp_path: Path) -> None:
    from dataclasses import replace

    noisy = replace(measure(PROGRAMS[0]), excluded_reason=UNSTABLE)
    answers = [noisy, replace(noisy, excluded_reason="", latency_s=2e-3)]
    path = records_path(tmp_path / "a.parquet", tmp_path)
    measure_programs(PROGRAMS[:1], lambda _: answers.pop(0), path, device="mine", protocol="eager")
    assert load_table(path).latency_s.tolist() == [2e-3] and path == tmp_path / "a.parquet"


def test_records_of_other_devices_or_protocols_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "records.parquet"
    measure_programs(PROGRAMS, measure, path, device="mine", protocol="eager")
    for device, protocol, what in (("t4", "eager", "device mine"), ("mine", "graph", "protocol eager")):
        with pytest.raises(DataError, match=f"of the {what}"):
            measure_programs(PROGRAMS, measure, path, device=device, protocol=protocol)


CHOICES = [SampledProgram(str(i), str(i), "sampled" if i else "default") for i in range(8)]


@pytest.fixture(autouse=True)
def numbers_as_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program's text is its only feature; "5" cannot be encoded."""

    def encode(program: SampledProgram) -> EncodedPrograms | None:
        leaves = np.full((1, 1, 2), float(program.tvm_json), dtype=np.float32)
        text = program.tvm_json
        return None if text == "5" else EncodedPrograms(leaves, np.zeros(1), np.zeros((1, 6)), "float32", "tir")

    monkeypatch.setattr(choosing, "_encode", encode)


def member(latencies: dict[int, float]) -> choosing.Member:
    """Log seconds by number; 0 elsewhere."""

    def predict(encoded: Sequence[EncodedPrograms]) -> Array:
        return np.array([latencies.get(int(e.leaves[0, 0, 0]), 0.0) for e in encoded])

    return predict


def test_default_good_random_and_active_schedules_take_turns() -> None:
    members = [member({3: -2.0, 6: 1.0, 7: 0.1}), member({3: -2.0, 6: -0.5, 7: -0.1})]
    chooser = EnsembleChooser(members, pool=7, good=1, active=2, names=("a", "b"))
    chosen = chooser(CHOICES, 2)
    assert [(p.hash, p.origin) for p in chosen] == [
        ("0", "default"),
        ("3", "good"),
        ("1", "sampled"),
        ("6", "active"),  # on which the members disagree
        ("2", "sampled"),
        ("7", "active"),
    ]
    assert chooser.description == {"pool": 7, "good": 1, "active": 2, "models": ["a", "b"]}


def test_members_that_agree_leave_the_choice_to_the_distance() -> None:
    chooser = EnsembleChooser([member({1: -1.0})] * 2, pool=7, good=1, active=1, names=("a", "a"))
    assert [p.hash for p in chooser(CHOICES, 0)] == ["0", "1", "7"]


def test_a_small_pool_is_taken_whole() -> None:
    chooser = EnsembleChooser([member({})] * 2, pool=7, good=3, active=3, names=("a", "a"))
    assert [p.hash for p in chooser(CHOICES[:2], 3)] == ["0", "1"]
    assert len(chooser(CHOICES[:4], 1)) == 4


def test_active_choice_needs_two_members() -> None:
    with pytest.raises(DataError, match="1 models cannot choose 1 good and 2 active"):
        EnsembleChooser([member({})], pool=7, good=1, active=2, names=("a",))
