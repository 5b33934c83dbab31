"""Reading traces: old and new forms, and files that cannot be used."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from cdmpp.errors import DataError
from cdmpp.simulate.traces import is_trace, read_trace, replay_trace
from cdmpp.simulate.traces.records import Arguments, CollectiveCall, dtype_name, kind_of
from cdmpp.simulate.traces.shapes import operators_of
from tests.simulate.traces.kineto import HOST, KinetoTrace, training_step


def write(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value))
    return path


def test_forms_of_a_trace_are_equal(tmp_path: Path) -> None:
    document = training_step(0, 1).document()
    expected = read_trace(write(tmp_path / "object.json", document)).events
    zipped = tmp_path / "trace.json.gz"
    zipped.write_bytes(gzip.compress(json.dumps(document, indent=2).encode()))
    unnamed = tmp_path / "unnamed"  # gzip without its ending
    unnamed.write_bytes(zipped.read_bytes())
    last = {key: value for key, value in document.items() if key != "traceEvents"}
    forms = [zipped, unnamed, write(tmp_path / "list.json", document["traceEvents"])]
    forms.append(write(tmp_path / "events_first.json", {"traceEvents": document["traceEvents"], **last}))
    for path in forms:
        assert is_trace(path)
        assert read_trace(path).events == expected


def test_long_events_are_read_across_chunks(tmp_path: Path) -> None:
    trace = KinetoTrace()
    trace.step(1, 0, 100)
    for k in range(40):
        trace.op("aten::" + "x" * 100_000, k, 1)
    path = trace.write(tmp_path / "long.json")
    assert len(read_trace(path).events) == 41


def test_old_categories_and_flows(tmp_path: Path) -> None:
    trace = KinetoTrace()
    trace.step(1, 0, 100)
    trace.op("aten::relu", 5, 20)
    trace.launch("relu_kernel", 10, 30, 20)
    names = {"cpu_op": "Operator", "kernel": "Kernel", "cuda_runtime": "Runtime", "user_annotation": "Operator"}
    for event in trace.events:
        event["cat"] = names.get(event["cat"], event["cat"])
        if "args" in event:
            event["args"].pop("correlation", None)
    answer = replay_trace(trace.write(tmp_path / "old.json"), remove=["aten::relu"])
    assert answer.graph.iterations == ("ProfilerStep#1",)
    # The arrow from the launch takes the place of the correlation id.
    assert answer.what_if[0].nodes == 4
    assert [node.role for node in answer.graph.nodes if node.cause == "launch"] == ["delay"]


def test_events_before_kineto_and_pairs_of_begin_and_end(tmp_path: Path) -> None:
    events = [
        {"name": "aten::mm", "ph": "X", "ts": 0, "dur": 50, "pid": "CPU functions", "tid": 1, "args": {}},
        {"name": "gemm", "ph": "X", "ts": 60, "dur": 30, "pid": "CUDA functions", "tid": "stream 7", "args": {}},
        {"name": "aten::add", "ph": "B", "cat": "cpu_op", "ts": 70, "pid": "CPU functions", "tid": 1},
        {"name": "aten::add", "ph": "E", "ts": 95, "pid": "CPU functions", "tid": 1},
    ]
    answer = replay_trace(write(tmp_path / "legacy.json", events))
    assert answer.measured_s == pytest.approx(95e-6) and answer.graph.iterations == ()
    assert any("no launches" in remark for remark in answer.graph.remarks)


def test_times_that_are_no_numbers_are_left_out(tmp_path: Path) -> None:
    document = training_step(0, 1).document()
    kernels = [event for event in document["traceEvents"] if event.get("cat") == "kernel"]
    kernels[0]["ts"], kernels[1]["dur"], kernels[2]["dur"] = float("nan"), float("inf"), str(kernels[2]["dur"])
    kernels[3]["args"]["External id"] = float("inf")
    document["baseTimeNanoseconds"] = float("nan")
    answer = replay_trace(write(tmp_path / "odd.json", document))
    assert answer.replayed_s == pytest.approx(answer.measured_s)
    assert any("without a time, which are left out: 1" in remark for remark in answer.graph.remarks)
    assert any("(kernel) without a duration, which count as 0 s: 1" in remark for remark in answer.graph.remarks)
    assert sum(row.calls for row in answer.kernels) == 5


@pytest.mark.parametrize("value", [None, True, "1_0", 1e300])
def test_durations_that_are_no_times_are_counted(tmp_path: Path, value: object) -> None:
    trace = training_step(0, 1)
    kernels = [event for event in trace.events if event.get("cat") == "kernel"]
    kernels[-1]["dur"] = value
    answer = replay_trace(trace.write(tmp_path / "odd.json"))
    assert any("(kernel) without a duration, which count as 0 s: 1" in remark for remark in answer.graph.remarks)


def test_events_that_are_not_read_are_counted(tmp_path: Path) -> None:
    trace = training_step(0, 1)
    trace.events[2]["dur"] = -5
    trace.add("python_function", "f", 1, 2, 1, 1)
    trace.add("", "MatMul", 1, 2, 1, 1)
    trace.events.append({"ph": "C", "name": "memory", "ts": 3, "pid": 1})
    answer = replay_trace(trace.write(tmp_path / "more.json"))
    remarks = " ".join(answer.to_dict()["remarks"])
    assert "with a negative duration, which count as 0 s: 1" in remarks and "left out" in remarks
    assert all(f"{kind} (1 x)" in remarks for kind in ("python_function", "without a category: MatMul", "counters"))
    assert remarks.split()[-1] in " ".join(str(table) for table in answer.tables())


def test_work_of_ascend_is_read(tmp_path: Path) -> None:
    kernel = {"ph": "X", "name": "MatMulV2", "pid": 2, "tid": 5, "ts": "1040.2", "dur": 150}
    kernel["args"] = {"Task Type": "AI_CORE", "Stream Id": 5}
    op = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": "1000.1", "dur": 60, "args": {}}
    answer = replay_trace(write(tmp_path / "npu.json", {"traceEvents": [op, kernel]}))
    assert answer.measured_s == pytest.approx(190.1e-6) and [row.name for row in answer.kernels] == ["MatMulV2"]


@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "-nan", "Inf"])
def test_numbers_that_json_lacks_are_read(tmp_path: Path, value: str) -> None:
    trace = training_step(0, 1)
    trace.add("cpu_op", 'aten::say "inf, nan" (inf)', 0, 1, 1, 1, bandwidth="BANDWIDTH")
    path = tmp_path / "inf.json"
    path.write_text(json.dumps(trace.document()).replace('"BANDWIDTH"', value))
    names = [event.name for event in read_trace(path).events]
    assert len(names) == len(read_trace(training_step(0, 1).write(tmp_path / "plain.json")).events) + 1
    assert 'aten::say "inf, nan" (inf)' in names


@pytest.mark.parametrize("schema", ["1.1.1-chakra.0.0.4", "1.0.1"])
def test_execution_traces_are_named(tmp_path: Path, schema: str) -> None:
    path = write(tmp_path / "et.json", {"schema": schema, "nodes": [{"id": 2, "name": "aten::mm", "ctrl_deps": 1}]})
    assert is_trace(path)
    with pytest.raises(DataError, match="execution trace of Chakra"):
        replay_trace(path)


def test_marks_of_one_step_on_two_threads_are_one_iteration(tmp_path: Path) -> None:
    trace = training_step(0, 1)
    mark = trace.events[-1]
    trace.events.append({**mark, "tid": 99})
    trace.events.append({**mark, "tid": 98, "ts": mark["ts"] + 1, "dur": mark["dur"] - 2})
    answer = replay_trace(trace.write(tmp_path / "twice.json"))
    assert answer.graph.count == 1 and answer.measured_s == pytest.approx(mark["dur"] * 1e-6)


@pytest.mark.parametrize("on_device", [True, False])
def test_several_ranks_in_a_file_are_refused(tmp_path: Path, on_device: bool) -> None:
    trace = training_step(0, 1)
    events = [e for e in trace.events if on_device or e.get("cat") in ("cpu_op", "user_annotation")]
    other = [{**e, "pid": {HOST: 77, 0: 1}.get(e["pid"], e["pid"])} for e in events]
    with pytest.raises(DataError, match=r"2 processes \(4242, 77\): several ranks in one file"):
        replay_trace(write(tmp_path / "merged.json", [*events, *other]))


def test_a_trace_without_shapes_says_so(tmp_path: Path) -> None:
    trace = KinetoTrace()
    trace.step(1, 0, 100)
    trace.op("aten::mm", 0, 50)
    answer = replay_trace(trace.write(tmp_path / "shapeless.json"))
    assert any("record_shapes=True" in remark for remark in answer.graph.remarks)


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("zipped", [False, True])
def test_cut_files_are_refused(tmp_path: Path, share: float, zipped: bool) -> None:
    text = json.dumps(training_step(0, 1).document()).encode()
    text = gzip.compress(text) if zipped else text
    path = tmp_path / ("cut.json.gz" if zipped else "cut.json")
    path.write_bytes(text[: int(share * len(text))])
    with pytest.raises(DataError, match="is cut") as error:
        replay_trace(path)
    assert "copy the whole file" in error.value.hint


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "empty"),
        ("hello", "begins with 'h'"),
        ('{"nodes": []}', "without traceEvents"),
        ('{"traceEvents": 3}', "not a list"),
        ('{"traceEvents": []}', "the trace is empty"),
        ('{"traceEvents": [1]}', "event 0 is '1'"),
        ('{"traceEvents": [{"ph": "X" "name": 3}, {"ph": "X", "name": "a long enough text behind it"}]}', "not JSON"),
        ('[{"ph": "X", "cat": "blink.user_timing", "name": "a", "ts": 0, "dur": 1, "pid": 1, "tid": 1}]', "'blink"),
        ('{"traceEvents": [{"ph": "X", "cat": "user_annotation", "name": "a", "ts": 0, "dur": 1}]}', "no operator"),
    ],
)
def test_foreign_files_are_refused(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "foreign.json"
    path.write_text(text)
    with pytest.raises(DataError, match=says):
        replay_trace(path)


@pytest.mark.timeout(60)
def test_blanks_and_unpacking_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(b'{"traceEvents": [' + b" " * 100_000_000, compresslevel=1))
    with pytest.raises(DataError, match="blanks in a row"):
        read_trace(path)
    path.write_bytes(gzip.compress(b'{"traceEvents": [' + b"{}," * 1_000_000))
    monkeypatch.setattr("cdmpp.utils.files._UNPACKED_BYTES", 0)
    with pytest.raises(DataError, match="unpacks to more than"):
        read_trace(path)


def test_missing_files_and_unexported_reports_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        replay_trace(tmp_path / "nowhere.json")
    with pytest.raises(DataError, match="report of Nsight") as error:
        replay_trace(tmp_path / "report.nsys-rep")
    assert "nsys export --type sqlite" in error.value.hint
    with pytest.raises(DataError, match="no trace"):
        replay_trace()


def test_files_that_are_no_traces(tmp_path: Path) -> None:
    assert not is_trace(tmp_path / "nowhere.json")
    for text in ("[1]", '{"nodes": []}', "x", ""):
        path = tmp_path / "other.json"
        path.write_text(text)
        assert not is_trace(path)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all_reduce"),
        ("ncclKernel_AllGather_RING_LL_Sum_int8_t", "all_gather"),
        ("_reduce_scatter_base", "reduce_scatter"),
        ("ncclDevKernel_SendRecv", "send_recv"),
        ("alltoallv", "all_to_all"),
        ("gloo:broadcast", "broadcast"),
    ],
)
def test_kinds_of_collectives(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_sizes_of_collectives(tmp_path: Path) -> None:
    trace = read_trace(training_step(0, 2).write(tmp_path / "two.json"))
    (call,) = [e.detail for e in trace.events if e.kind == "kernel" and isinstance(e.detail, CollectiveCall)]
    assert call == CollectiveCall("all_reduce", 2097152.0, 2, "0 [0, 1]", "float16")


@pytest.mark.parametrize(
    ("text", "name"), [("c10::BFloat16", "bfloat16"), ("float", "float32"), ("long int", "int64"), ("Scalar", "")]
)
def test_names_of_element_types(text: str, name: str) -> None:
    assert dtype_name(text) == name


H = "c10::Half"


@pytest.mark.parametrize(
    ("name", "dims", "types", "concrete", "expected"),
    [
        ("aten::mm", ((64, 32), (32, 16)), (H, H), (), "linear:m=64,n=16,k=32"),
        ("aten::addmm", ((16,), (64, 32), (32, 16)), (H,) * 3, (), "linear:m=64,n=16,k=32,bias=true"),
        ("aten::bmm", ((4, 64, 32), (4, 32, 16)), (H, H), (), "bmm:batch=4,m=64,n=16,k=32"),
        ("aten::_softmax", ((8, 64, 64), (), ()), (H, "Scalar", "Scalar"), ("", "-1", "False"), "softmax:rows=512"),
        ("aten::native_layer_norm", ((64, 32), (), (32,)), (H, "", H), (), "layernorm:rows=64,cols=32"),
        (
            "aten::_scaled_dot_product_flash_attention",
            ((2, 8, 128, 64), (2, 8, 128, 64), (2, 8, 128, 64), (), (), ()),
            (H, H, H, "Scalar", "Scalar", "Scalar"),
            ("", "", "", "0.", "True", "False"),
            "attention_prefill:batch=2,q_len=128",
        ),
        (
            "aten::convolution",
            ((2, 8, 32, 32), (16, 8, 3, 3), (16,), (), (), (), (), (), ()),
            (H, H, H, *["ScalarList"] * 3, "Scalar", "ScalarList", "Scalar"),
            ("", "", "", "[1, 1]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1"),
            "conv2d:n=2,c_in=8",
        ),
    ],
)
def test_recorded_shapes_become_operators(name: str, dims: Any, types: Any, concrete: Any, expected: str) -> None:
    operators, reason = operators_of(name, Arguments(dims, types, concrete))
    assert reason == "" and len(operators) == 1
    kind, _, fields = expected.partition(":")
    found = operators[0].canonical()
    assert found["operator"] == kind and found["dtype"] == "float16"
    for field in fields.split(","):
        key, _, value = field.partition("=")
        assert str(found[key]).casefold() == value


@pytest.mark.parametrize("name", ["aten::add_", "aten::sum", "aten::relu", "aten::cat", "aten::copy_"])
def test_operators_that_stream_memory_are_predicted(name: str) -> None:
    lists = name == "aten::cat"
    dims: Any = (((64, 32), (64, 32)), ()) if lists else ((64, 32), (64, 32))
    types, concrete = (("TensorList", "Scalar") if lists else (H, H)), (("", "0") if lists else ())
    if name == "aten::sum":
        dims, types, concrete = ((64, 32), ()), (H, "ScalarList"), ("", "[0]")
    operators, reason = operators_of(name, Arguments(dims, types, concrete))
    assert len(operators) == 1 and reason == ""


def test_unknown_and_incomplete_operators_have_a_reason() -> None:
    for name, dims, types in (
        ("aten::_foreach_add_", ((4,),), (H,)),
        ("aten::mm", ((64, 32),), (H,)),
        ("aten::mm", ((64, 32), (32, 16)), ("double", "double")),
        ("aten::convolution", ((2, 8, 32, 32), (16, 8, 3, 3)), (H, H)),
    ):
        operators, reason = operators_of(name, Arguments(dims, types))
        assert operators == () and reason
