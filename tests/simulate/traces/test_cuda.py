"""Traces with CUDA work: streams, launches, synchronisation, NCCL kernels, and what-ifs on kernels."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cdmpp import LatencyPredictor, make_plan
from cdmpp.errors import FieldError, UnknownDeviceError
from cdmpp.simulate.traces import replay_trace
from tests.simulate.traces.kineto import COMM_STREAM, HOST, KinetoTrace, training_step

US = 1e-6
GEMM = "linear:m=512,n=1024,k=1024,dtype=float16"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cuda")


@pytest.fixture(scope="module")
def single(folder: Path) -> Path:
    return training_step(0, 1).write(folder / "single.json")


@pytest.fixture(scope="module")
def pair(folder: Path) -> list[Path]:
    """Two ranks on clocks 7 s apart; the second is 50 µs late for the all-reduce."""
    first, second = training_step(0, 2), training_step(1, 2, late=50, clock_us=7e6)
    return [first.write(folder / "rank0.json.gz"), second.write(folder / "rank1.json")]


def test_idle_time_has_causes(single: Path) -> None:
    (row,) = replay_trace(single).idle
    assert row.lane == "rank0 gpu0 stream 7" and row.busy_s == pytest.approx(400 * US)
    # Until the first kernel and after the synchronisation; until the all-reduce has ended; the end of the call.
    assert row.idle_s["host"] == pytest.approx(40 * US)
    assert row.idle_s["communication"] == pytest.approx(104 * US)
    assert row.idle_s["synchronisation"] == pytest.approx(7 * US)
    assert row.exposed_comm_s == pytest.approx(104 * US)


def test_kernels_have_the_operators_that_launched_them(single: Path) -> None:
    rows = {row.name.split("(")[0]: row for row in replay_trace(single).kernels}
    gemm = rows["ampere_fp16_s16816gemm_fp16_128x128_ldg8_f2f_stages_64x3_tn"]
    assert gemm.operator == "aten::mm" and gemm.calls == 3 and gemm.seconds == pytest.approx(300 * US)
    assert rows["my_custom_kernel"].operator == ""


def test_ranks_wait_for_the_last_one(pair: list[Path]) -> None:
    answer = replay_trace(*pair)
    comm = [node for node in answer.graph.nodes if node.role == "comm"]
    assert [node.duration_s for node in comm] == pytest.approx([200 * US] * 2)
    # The late rank delays both: a faster product on it alone brings both forward.
    late = replay_trace(*pair, speed_up=[("aten::mm", 1e6)]).what_if[0]
    assert late.saving_s > 100 * US
    assert max(answer.graph.begins_s.values()) < 1e-3


def test_kernels_wait_for_their_launch(folder: Path) -> None:
    trace = KinetoTrace()
    trace.step(1, 0, 200)
    trace.op("aten::relu", 10, 20)
    trace.launch("relu_kernel", 20, 30, 10)
    trace.op("aten::relu", 100, 20)
    trace.launch("relu_kernel", 110, 120, 10)
    trace.runtime("cudaStreamSynchronize", 122, 10)
    path = trace.write(folder / "bound.json")
    answer = replay_trace(path, speed_up=[("relu_kernel", 10)])
    (row,) = answer.idle
    assert row.idle_s["host"] == pytest.approx(178 * US)  # but for the end of the synchronisation
    assert answer.what_if[0].saving_s == pytest.approx(8 * US)  # of the last kernel, until the call: launches decide


def test_reported_events_connect_streams(folder: Path) -> None:
    def recorded(reported: bool) -> Path:
        trace = KinetoTrace()
        trace.step(1, 0, 400)
        trace.launch("producer", 10, 20, 200)
        record = trace.runtime("cudaEventRecord", 20, 2)
        wait = trace.runtime("cudaStreamWaitEvent", 30, 2)
        trace.launch("consumer", 40, 240, 50, COMM_STREAM)
        trace.runtime("cudaDeviceSynchronize", 60, 235)
        if reported:
            trace.add(
                "cuda_sync",
                "Stream Wait Event",
                30,
                0,
                0,
                COMM_STREAM,
                cuda_sync_kind="Stream Wait Event",
                stream=COMM_STREAM,
                correlation=wait,
                wait_on_stream=7,
                wait_on_cuda_event_record_corr_id=record,
            )
        return trace.write(folder / f"events{reported}.json")

    # The consumer starts 20 µs after the producer: too late to be inferred from times.
    known = replay_trace(recorded(True), speed_up=[("producer", 2)])
    unknown = replay_trace(recorded(False), speed_up=[("producer", 2)])
    assert known.what_if[0].saving_s == pytest.approx(100 * US)
    assert unknown.what_if[0].saving_s == pytest.approx(0)
    assert known.idle[0].idle_s.keys() >= {"dependency"}


def test_a_copy_that_blocks_the_host_ends_before_its_call(folder: Path) -> None:
    trace = KinetoTrace()
    trace.step(1, 0, 300)
    trace.launch("kernel", 10, 20, 100)
    copy = "Memcpy DtoH (Device -> Pageable)"
    trace.launch(copy, 30, 120, 60, category="gpu_memcpy", call_us=160, call="cudaMemcpyAsync", bytes=4096)
    answer = replay_trace(trace.write(folder / "copy.json"), speed_up=[("^kernel$", 2)])
    assert answer.what_if[0].saving_s == pytest.approx(50 * US)


def test_work_of_earlier_iterations_holds_the_stream(folder: Path) -> None:
    trace = KinetoTrace()
    trace.step(1, 0, 100)
    trace.launch("slow", 20, 30, 200)
    trace.step(2, 100, 100)
    trace.launch("fast", 120, 231, 10)
    answer = replay_trace(trace.write(folder / "earlier.json"), iteration=2)
    assert answer.measured_s == pytest.approx(100 * US)
    assert [node.role for node in answer.graph.nodes if "gpu" in node.device] == ["earlier", "gap", "kernel"]
    assert replay_trace(folder / "earlier.json").measured_s == pytest.approx(211 * US / 2)


@pytest.mark.parametrize(
    ("kernel", "length", "target", "dtypes"),
    [
        ("ampere_sgemm_128x64_tn", 58.0, "h100-sxm", ("tfloat32", "tfloat32")),  # 37 Tflop/s: above the float32 peak
        ("ampere_sgemm_128x64_tn", 150.0, "h100-sxm", ("float32", "float32")),
        ("cutlass_80_tensorop_s1688gemm_128x128_tn", 150.0, "h100-sxm", ("tfloat32", "tfloat32")),
        ("sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n", 150.0, "v100-sxm2-16gb", ("tfloat32", "float32")),
    ],
)
def test_products_that_ran_as_tf32_are_predicted_so(
    folder: Path, predictor: LatencyPredictor, kernel: str, length: float, target: str, dtypes: tuple[str, str]
) -> None:
    trace = KinetoTrace()
    trace.step(1, 0, 400)
    trace.op("aten::mm", 10, 30, [[1024, 1024], [1024, 1024]], ["float", "float"])
    trace.launch(kernel, 20, 30, length)
    trace.runtime("cudaDeviceSynchronize", 42, length)
    answer = replay_trace(trace.write(folder / "tf32.json"), device=target, predictor=predictor)
    old, new = (
        predictor.predict([f"linear:m=1024,n=1024,k=1024,dtype={dtype}"], device)[0].latency_s
        for dtype, device in zip(dtypes, ("a100-sxm4-80gb", target), strict=True)
    )
    assert old is not None and new is not None
    assert answer.what_if[0].saving_s == pytest.approx(length * US * (1 - new / old), rel=0.02, abs=1e-6)
    assert any("ran as TF32" in remark for remark in answer.graph.remarks) == (dtypes[0] == "tfloat32")


def test_device_scales_kernels_by_predictions_and_others_by_bandwidth(
    single: Path, predictor: LatencyPredictor
) -> None:
    answer = replay_trace(single, device="h100-sxm", predictor=predictor)
    (row,) = answer.what_if
    old, new = (predictor.predict([GEMM], name)[0].latency_s for name in ("a100-sxm4-80gb", "h100-sxm"))
    assert old is not None and new is not None
    assert row.name == "device a100-sxm4-80gb -> h100-sxm"
    shares = {"predicted": 360 / 600, "roofline": 40 / 600, "kept": 200 / 600}
    assert row.shares == pytest.approx(shares)
    assert row.reasons == {
        "all_reduce: its size or number of ranks is not recorded": 1,
        "no operator in the trace launched it": 1,
    }
    assert row.seconds < answer.replayed_s
    plain = replay_trace(single, speed_up=[("gemm", old / new)]).what_if[0]
    assert row.seconds < plain.seconds  # the other kernels become faster too


def test_more_ranks_and_another_link_scale_collectives(pair: list[Path], predictor: LatencyPredictor) -> None:
    ranks, link, both = replay_trace(*pair, ranks=8, link="pcie4-x16", predictor=predictor).what_if
    assert ranks.nodes == link.nodes == 2 and both.name == "all together"
    assert ranks.saving_s < 0 and link.saving_s < 0 and link.shares == {"predicted": 1.0}


def test_a_removed_operator_takes_its_launches_with_it(single: Path) -> None:
    answer = replay_trace(single, remove=["aten::add_"])
    assert answer.what_if[0].nodes == 4 and answer.what_if[0].saving_s == pytest.approx(60 * US)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"remove": ["("]}, FieldError, "not a regular expression"),
        ({"speed_up": [("nothing", 2.0)]}, FieldError, "matches no kernel"),
        ({"speed_up": [("gemm", 0.0)]}, FieldError, "by 0.0"),
        ({"device": "no-such-gpu"}, UnknownDeviceError, "no-such-gpu"),
        ({"ranks": 1}, FieldError, "ranks is 1"),
        ({"from_device": "t4"}, FieldError, "nothing that depends on it"),
        ({"link": "string"}, FieldError, "link 'string'"),
    ],
)
def test_wrong_what_ifs_name_the_problem(
    single: Path, predictor: LatencyPredictor, options: dict, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        replay_trace(single, predictor=predictor, **options)


def test_a_trace_without_a_device_needs_its_name(folder: Path, predictor: LatencyPredictor) -> None:
    trace = training_step(0, 1)
    document = trace.document()
    document["deviceProperties"] = []
    path = folder / "nameless.json"
    path.write_text(json.dumps(document))
    with pytest.raises(FieldError, match="not known") as problem:
        replay_trace(path, device="t4", predictor=predictor)
    assert "--from" in problem.value.hint
    assert replay_trace(path, device="t4", from_device="a100", predictor=predictor).what_if[0].saving_s < 0


def test_the_graph_replays_as_a_request(pair: list[Path]) -> None:
    answer = replay_trace(*pair)
    plan = make_plan("replay", {**answer.to_request(), "overrides": [{"class": "comm", "ratio": 0.5}]})
    assert plan["makespan_s"] == pytest.approx(answer.timeline.makespan_s)
    assert plan["what_if"][0]["saving_s"] == pytest.approx(100 * US)


def test_launches_of_other_threads_follow_the_thread_with_the_marks(folder: Path) -> None:
    trace = KinetoTrace()
    trace.step(1, 0, 300)
    trace.op("aten::mm", 10, 40)
    trace.events.append(
        {"ph": "X", "cat": "cpu_op", "name": "MmBackward0", "pid": HOST, "tid": 99, "ts": 60, "dur": 150, "args": {}}
    )
    trace.op("aten::add_", 220, 20)
    answer = replay_trace(trace.write(folder / "threads.json"), remove=["aten::mm", "MmBackward0"])
    first, backward, _ = answer.what_if
    assert first.saving_s == pytest.approx(40 * US) and backward.saving_s == pytest.approx(150 * US)
