"""Library kernels as PyTorch calls: shapes and values of the results, and timing on this CPU, and on a GPU if there
is one.
"""

from pathlib import Path
from typing import get_args

import pytest
import torch

from cdmpp.data.measure import call_problems, library_calls
from cdmpp.data.measure.library import LibraryTimer, TimingDevice, find_timing_device, free_bytes
from cdmpp.data.measure.library_calls import CallError, Tensors, make_call, precision
from cdmpp.data.measure.timing import TimingSettings
from cdmpp.data.physics import needed_bytes
from cdmpp.data.records import from_measurements, read_records, write_records
from cdmpp.devices import lookup
from cdmpp.devices.host import this_cpu
from cdmpp.errors import InvalidDeviceError, MeasurementError
from cdmpp.programs.operators import OperatorSpec, lowered_operators, parse_operator
from tests.data.test_device_specs import cpu

QUICK = TimingSettings(repeat_s=1e-4, total_s=1e-3)


@pytest.fixture
def timing_device() -> TimingDevice:
    return find_timing_device("cpu", cpu("mine"), threads=1)


def test_larger_program_takes_longer(timing_device: TimingDevice) -> None:
    with LibraryTimer(timing_device, "eager", QUICK).ready() as timer:
        small, large = (timer.time(parse_operator(f"linear:m={m},n=256,k=256")) for m in (4, 1024))
    assert 0 < small.latency_s < large.latency_s < 1
    assert len(small.repeats_s) >= 3


def test_record_round_trip(timing_device: TimingDevice, tmp_path: Path) -> None:
    specs = [parse_operator(t) for t in ("softmax:rows=8,cols=16", "softmax:rows=8,cols=16,dtype=int8")]
    with LibraryTimer(timing_device, "eager", QUICK).ready() as timer:
        rows = [timer.record(spec, "probe") for spec in specs]
    write_records(from_measurements(rows), tmp_path / "records.parquet")
    table = read_records(tmp_path / "records.parquet")
    assert table.device.used() == ("mine",) and table.device_spec("mine") == cpu("mine")
    assert (table.protocol[0], table.framework[0], table.backend[0]) == ("eager", "pytorch", "library")
    assert table.latency_s[0] == rows[0].latency_s
    assert table.failed.tolist() == [False, True]
    assert "int8" in table.failure[1]  # type: ignore[index]
    assert table.program_hashes[table.program_key[0]] == specs[0].hash()


def test_pytorch_settings_are_restored(timing_device: TimingDevice) -> None:
    before = torch.get_num_threads()
    with pytest.raises(ZeroDivisionError), LibraryTimer(timing_device, "eager", QUICK).ready():
        assert torch.get_num_threads() == 1
        1 / 0  # noqa: B018
    assert torch.get_num_threads() == before and not torch.is_inference_mode_enabled()


def test_memory_is_checked_before_allocation(timing_device: TimingDevice) -> None:
    timer = LibraryTimer(timing_device, "eager", QUICK)
    with pytest.raises(MeasurementError, match="GiB may be used"):
        timer.time(parse_operator("relu:rows=1000000,cols=1000000"))
    small = LibraryTimer(timing_device, "eager", QUICK, memory_bytes=1e4)
    with pytest.raises(MeasurementError, match="needs"):
        small.time(parse_operator("relu:rows=100,cols=100"))
    assert free_bytes(timing_device) > 1e7


def test_pytorch_errors_become_measurement_errors(timing_device: TimingDevice) -> None:
    with (
        LibraryTimer(timing_device, "eager", QUICK).ready() as timer,
        pytest.raises(MeasurementError, match="PyTorch cannot run max_pool2d"),
    ):
        timer.time(parse_operator("max_pool2d:n=1,c=1,h=8,w=8,kh=2,kw=2,pad_h=2,pad_w=2"))


@pytest.mark.parametrize("protocol", ["kernel", "graph", "cuda"])
def test_gpu_protocols_are_refused_on_a_cpu(timing_device: TimingDevice, protocol: str) -> None:
    with pytest.raises(MeasurementError, match=protocol):
        LibraryTimer(timing_device, protocol)


def test_missing_devices_are_refused() -> None:
    with pytest.raises(MeasurementError, match="cannot measure on 'tpu'"):
        find_timing_device("tpu")
    with pytest.raises(InvalidDeviceError, match="not a CPU"):
        find_timing_device("cpu", "t4")
    with pytest.raises(MeasurementError, match="threads"):
        find_timing_device("cpu", cpu("mine"), threads=99_999)
    with pytest.raises(InvalidDeviceError, match="not xeon-phi-7250"):
        find_timing_device("cpu", "xeon-phi-7250")
    if not torch.cuda.is_available():
        with pytest.raises(MeasurementError, match="finds 0 CUDA devices"):
            find_timing_device("cuda:0", "t4")


def test_driver_identifies_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "Tesla T4")
    assert find_timing_device("cuda").device == lookup("t4")
    with pytest.raises(InvalidDeviceError, match="is a t4, not a l4"):
        find_timing_device("cuda:0", "l4")
    with pytest.raises(MeasurementError, match="there is no number 1"):
        find_timing_device("cuda:1")


def test_cpu_name_has_the_widest_instruction_set() -> None:
    try:
        found = this_cpu(1)
    except InvalidDeviceError:
        pytest.skip("a CPU that cdmpp cannot describe")
    assert found.kind == "cpu" and found.compute_units == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_gpu_protocols_are_ordered() -> None:
    timing_device = find_timing_device("cuda")
    spec = parse_operator("relu:rows=128,cols=128")
    figures = {}
    for protocol in ("kernel", "graph", "eager"):
        with LibraryTimer(timing_device, protocol, TimingSettings()).ready() as timer:
            figures[protocol] = timer.time(spec).latency_s
    assert 1e-7 < figures["kernel"] < 1.1 * figures["graph"] < 1.2 * figures["eager"]


CPU = torch.device("cpu")
#: Operators that only serving libraries have as one kernel.
WITHOUT_CALL = {
    *("attention_backward", "attention_mixed", "fused_add_rms_norm", "grouped_gemm", "kv_cache_save"),
    *("layernorm_backward", "mla_decode", "mla_prefill", "moe", "moe_gating", "moe_shuffle", "moe_w13"),
    *("rmsnorm_backward", "rotary_embedding", "softmax_cross_entropy"),
}
#: A small program of every other operator, and the shape of what it gives.
SMALL = {
    "linear:m=3,n=5,k=7,bias=true": (3, 5),
    "linear:m=32,n=16,k=32,dtype=int8": (32, 16),
    "linear:m=32,n=16,k=32,dtype=tfloat32": (32, 16),
    "linear:m=32,n=16,k=32,dtype=fp8": (32, 16),
    "linear:m=32,n=16,k=32,dtype=fp8,scaling=tensor": (32, 16),
    "bmm:batch=2,m=3,n=4,k=5,dtype=bfloat16": (2, 3, 4),
    "conv2d:n=2,c_in=4,h=9,w=7,c_out=6,kh=3,kw=2,stride_h=2,pad_h=1,dil_w=2,groups=2,bias=true": (2, 6, 5, 5),
    "conv2d:n=1,c_in=3,h=8,w=8,c_out=4,kh=3,kw=3,direction=bwd_data": (1, 3, 8, 8),
    "conv2d:n=1,c_in=3,h=8,w=8,c_out=4,kh=3,kw=3,direction=bwd_weight": (4, 3, 3, 3),
    "silu_and_mul:rows=4,cols=6": (4, 6),
    "copy:rows=4,cols=6": (4, 6),
    "copy:rows=4,cols=6,transposed=true": (6, 4),
    "embedding:rows=5,cols=3,table_rows=11": (5, 3),
    "max_pool2d:n=1,c=2,h=6,w=6,kh=3,kw=3,stride_h=2,stride_w=2,pad_h=1,pad_w=1": (1, 2, 3, 3),
    "avg_pool2d:n=1,c=2,h=6,w=6,kh=2,kw=2,stride_h=2,stride_w=2": (1, 2, 3, 3),
    "batch_norm:n=1,c=2,h=6,w=6": (1, 2, 6, 6),
    "reduce_mean:rows=4,cols=6": (4,),
    "argmax:rows=4,cols=6": (4,),
    "attention_prefill:batch=1,q_len=4,heads=2,kv_heads=2,head_dim=8": (1, 2, 4, 8),
    "attention_prefill:batch=1,q_len=4,past_len=3,heads=4,kv_heads=2,head_dim=8": (1, 4, 4, 8),
    "attention_decode:batch=3,past_len=9,heads=4,kv_heads=1,head_dim=8": (3, 4, 1, 8),
    "attention_encoder:batch=1,q_len=4,heads=2,kv_heads=2,head_dim=8": (1, 2, 4, 8),
    **{
        f"{name}:rows=4,cols=6": (4, 6)
        for name, kind in lowered_operators().items()
        if {"rows", "cols"} == {n for n, i in kind.model_fields.items() if i.is_required()} - {"operator"}
        and name not in ("reduce_mean", "silu_and_mul", "copy", "argmax", *WITHOUT_CALL)
    },
}


def test_all_operators_are_covered() -> None:
    assert {text.partition(":")[0] for text in SMALL} | WITHOUT_CALL == set(lowered_operators())
    assert set(get_args(lowered_operators()["relu"].model_fields["operator"].annotation)) <= {
        text.partition(":")[0] for text in SMALL
    }


@pytest.mark.parametrize("text", SMALL)
def test_results_have_the_right_shape_and_are_finite(text: str) -> None:
    spec = parse_operator(text)
    result = make_call(spec.canonical(), Tensors(CPU))()
    if isinstance(result, tuple):  # a backward convolution gives the three gradients, but for the unwanted
        (result,) = (part for part in result if part is not None)
    assert tuple(result.shape) == SMALL[text]
    assert torch.isfinite(result.float()).all()
    assert result.float().abs().max() > 0
    assert needed_bytes(spec) >= result.numel() * result.element_size()


def test_last_query_of_prefill_attends_to_all_keys() -> None:
    spec = parse_operator("attention_prefill:batch=1,q_len=2,past_len=2,heads=1,kv_heads=1,head_dim=8")
    both = parse_operator("attention_encoder:batch=1,q_len=2,heads=1,kv_heads=1,head_dim=8")
    tensors = Tensors(CPU)
    q, k, v = (tensors.floats((1, 1, 2, 8), "float32"), *(tensors.floats((1, 1, 4, 8), "float32") for _ in range(2)))
    scores = (q @ k.transpose(-1, -2)) / 8**0.5
    scores[0, 0, 0, 3] = float("-inf")  # the first of two queries does not see the last of four keys
    expected = torch.softmax(scores, -1) @ v
    torch.testing.assert_close(make_call(spec.canonical(), Tensors(CPU))(), expected)
    assert make_call(both.canonical(), Tensors(CPU))().shape == (1, 1, 2, 8)


def test_only_tfloat32_allows_tf32() -> None:
    allowed = {}
    for dtype in ("tfloat32", "float32"):
        with precision({"dtype": dtype}):
            allowed[dtype] = torch.get_float32_matmul_precision()
    assert allowed == {"tfloat32": "high", "float32": "highest"}
    assert torch.get_float32_matmul_precision() == "highest"


def test_three_inputs_give_a_chain() -> None:
    result = make_call(parse_operator("add:rows=4,cols=6,inputs=3").canonical(), Tensors(CPU, seed=1))()
    tensors = Tensors(CPU, seed=1)
    torch.testing.assert_close(result, sum(tensors.floats((4, 6), "float32") for _ in range(3)))


@pytest.mark.parametrize(
    "text",
    [
        "softmax:rows=4,cols=6,dtype=int8",
        "linear:m=32,n=32,k=32,dtype=int8,bias=true",
        "attention_encoder:batch=1,q_len=4,heads=3,kv_heads=2,head_dim=8",
        "attention_encoder:batch=1,q_len=4,heads=2,kv_heads=2,head_dim=8,dtype=float16,kv_dtype=int8",
        "linear:m=32,n=32,k=32,dtype=bfloat16,weight_dtype=int8",
        "linear:m=32,n=32,k=32,dtype=int8,scaling=channel",
        "linear:m=32,n=32,k=32,dtype=float64",
        "linear:m=32,n=30,k=32,dtype=fp8",
        "bmm:batch=2,m=32,n=32,k=32,dtype=float16,layout=tt",
        "kv_cache_save:rows=4,cols=6",
        "moe:tokens=4,hidden=8,intermediate=8,experts=2,topk=1",
    ],
)
def test_missing_kernels_are_reported(text: str) -> None:
    with pytest.raises(CallError, match="PyTorch"):
        make_call(parse_operator(text).canonical(), Tensors(CPU))


def test_every_operator_states_its_tensors() -> None:
    class Nameless(OperatorSpec):
        """An operator without a rule."""

    with pytest.raises(TypeError, match="tensor_bytes"):
        Nameless.model_validate({"operator": "nameless"})


def test_operators_and_types_with_a_call_are_those_that_are_stated_without_torch() -> None:
    assert set(library_calls._MAKERS) == call_problems.OPERATORS
    assert set(library_calls._TORCH) == set(call_problems.TYPES)
