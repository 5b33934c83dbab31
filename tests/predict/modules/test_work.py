"""Kernels with work that their program does not have."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cdmpp.devices import known, lookup
from cdmpp.errors import DataError
from cdmpp.predict.modules.execution import host_profile, shipped_hosts
from cdmpp.predict.modules.work import seconds_of
from cdmpp.predict.predictor import LatencyPredictor
from cdmpp.programs.frontends.kernel_work import AttentionWork, ConvolutionWork, KernelWork
from cdmpp.programs.frontends.torch_module import list_module

CONVOLUTION = ConvolutionWork("float32", 1e5, 64, 64, 27.0, 1, 2.56e7, 2.56e7, 5.12e7, bias=True, plain=False)


class Calls(nn.Module):
    """A function of tensors."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = (function,)

    def forward(self, *tensors: Tensor) -> Any:
        return self.function[0](*tensors)


def test_kernel_is_as_slow_as_its_longest_bound() -> None:
    t4 = lookup("t4")
    assert seconds_of(KernelWork("", operations=1.0, cycles=1.0), 1e-5, t4) == 1e-5
    assert seconds_of(KernelWork("", cycles=t4.clock_hz), 1e-5, t4) == pytest.approx(1.0)
    crowded = KernelWork("", cycles=t4.clock_hz, blocks=6 * t4.compute_units, resident=2)
    assert seconds_of(crowded, 1e-5, t4) == pytest.approx(3.0)
    assert seconds_of(KernelWork("", steps=101, step_share=0.5), 1e-5, t4) == pytest.approx(51e-5)
    assert seconds_of(KernelWork("", cycles=1.59e3, replaces=True), 1.0, t4) == pytest.approx(1e-6)


@pytest.mark.parametrize("device", ["t4", "a100-sxm4-80gb", "h100-sxm", "mi300x"])
def test_larger_convolutions_take_longer(device: str) -> None:
    spec = lookup(device)
    before = seconds_of(CONVOLUTION, 1.0, spec)
    for change in ({"taps": 270.0}, {"c_in": 640}, {"places": 1e6}, {"groups": 8}, {"strides": 1.0, "y_bytes": 1e9}):
        assert seconds_of(replace(CONVOLUTION, **change), 1.0, spec) > before
    assert seconds_of(replace(CONVOLUTION, layout_bytes=0.0, bias=False), 1.0, spec) <= before


def test_flash_attention_is_as_long_as_its_tiles() -> None:
    spec = lookup("a100-sxm4-80gb")
    work = AttentionWork(512, 2048, 2048, 64, causal=False)
    before = seconds_of(work, 1.0, spec)
    flops = 4 * 512 * 2048**2 * 64
    assert 0.4 < flops / before / (spec.peak_flops_fp16_matrix or 0.0) < 0.9
    assert 0.5 < seconds_of(replace(work, causal=True), 1.0, spec) / before < 0.6
    # The last tile of a causal mask sees all keys; a single wave ends with it.
    single_head = replace(work, heads=1)
    causal = replace(single_head, causal=True)
    assert seconds_of(causal, 1.0, spec) == seconds_of(single_head, 1.0, spec)
    assert seconds_of(replace(work, head_dim=128), 1.0, spec) > 1.5 * before
    # Older devices have other kernels, which the tables know.
    assert seconds_of(work, 0.125, lookup("t4")) == seconds_of(work, 0.125, lookup("mi300x")) == 0.125


def test_tables_price_plain_convolutions_without_tensor_cores() -> None:
    plain = replace(CONVOLUTION, plain=True)
    assert seconds_of(replace(plain, bias=False), 0.125, lookup("t4")) == 0.125
    assert 0.125 < seconds_of(plain, 0.125, lookup("t4")) < 0.126  # PyTorch adds the bias in its own kernel
    half, brain = (seconds_of(replace(CONVOLUTION, dtype=name), 1.0, lookup("t4")) for name in ("float16", "bfloat16"))
    assert brain > 2 * half  # tensor cores of Turing do not have bfloat16
    assert seconds_of(plain, 0.125, lookup("a100-sxm4-80gb")) < 0.125


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Conv3d(4, 8, 3, stride=2), (2, 4, 9, 9, 9)),
        (nn.ConvTranspose3d(4, 8, 3, groups=2, output_padding=1, stride=2), (2, 4, 9, 9, 9)),
        (nn.MaxPool3d(2), (2, 4, 8, 8, 8)),
        (nn.AvgPool3d(2), (2, 4, 8, 8, 8)),
        (nn.AdaptiveAvgPool3d(2), (2, 4, 8, 8, 8)),
        (Calls(lambda x: torch.cumprod(x, 1)), (4, 64)),
        (Calls(torch.diag), (64,)),
        (Calls(lambda x: x.logsumexp(1)), (4, 64, 3)),
        (nn.Softmax(1), (4, 64, 3)),
        (nn.GroupNorm(2, 8), (2, 8, 16)),
        (nn.HuberLoss(), None),
        (nn.CrossEntropyLoss(), None),
        (nn.LSTM(8, 16, bidirectional=True), (5, 2, 8)),
        (nn.GRU(8, 256, 2), (5, 2, 8)),
        (nn.RNN(8, 16), (5, 2, 8)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_nothing_is_left_out(module: nn.Module, shape: tuple[int, ...] | None, predictor: LatencyPredictor) -> None:
    if shape is None:
        target = torch.empty(4, dtype=torch.int64) if isinstance(module, nn.CrossEntropyLoss) else torch.empty(4, 8)
        inputs: tuple[Tensor, ...] = (torch.empty(4, 8), target)
    else:
        inputs = (torch.empty(shape),)
    answer = predictor.predict_module(module, inputs, "t4", mode="forward")
    assert answer.latency_s is not None and not answer.lower_bound and answer.programs


def test_norm_of_few_rows_is_bound_by_its_block(predictor: LatencyPredictor) -> None:
    def busy_s(rows: int, cols: int) -> float:
        answer = predictor.predict_module(nn.LayerNorm(cols), torch.empty(rows, cols), "t4", execution="cuda-graph")
        assert answer.timeline is not None
        return answer.timeline.device_busy_s

    assert busy_s(2, 1 << 21) > 10 * busy_s(1 << 11, 1 << 11)
    assert busy_s(2, 1 << 21) == pytest.approx(busy_s(8, 1 << 21), rel=0.01)


def test_recurrent_network_is_a_product_and_steps() -> None:
    x = torch.empty(40, 2, 8)
    small, large = (list_module(nn.LSTM(8, hidden, 3), x) for hidden in (16, 512))
    for listing in (small, large):
        assert [(row.call, row.count) for row in listing.rows if row.call == "lstm_steps"] == [("lstm_steps", 3)]
        assert sum(row.count for row in listing.rows if row.call == "lstm") == 3
    assert [call.times for call in small.calls if call.name == "lstm_steps"] == [1, 1, 1]
    assert [call.times for call in large.calls if call.name == "lstm_steps"] == [40, 40, 40]
    trained = list_module(nn.LSTM(8, 16), x, mode="training")
    assert "lstm_backward_steps" in [row.call for row in trained.rows]


def test_attention_of_modules_is_fused() -> None:
    class Attention(nn.Module):
        def __init__(self, weights: bool) -> None:
            super().__init__()
            self.inner, self.weights = nn.MultiheadAttention(64, 4, batch_first=True), weights

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x, x, x, need_weights=self.weights)[0]

    x = torch.empty(2, 16, 64)
    before = torch.backends.mha.get_fastpath_enabled()
    calls = {weights: [row.call for row in list_module(Attention(weights), x).rows] for weights in (True, False)}
    assert "scaled_dot_product_attention" in calls[False] and "bmm" not in calls[False]
    assert "bmm" in calls[True]
    layer = nn.TransformerEncoderLayer(64, 4, batch_first=True)
    exported = torch.export.export(layer.eval(), (torch.zeros(2, 16, 64),))
    for rows in (list_module(layer, x).rows, list_module(exported, None).rows):
        assert "scaled_dot_product_attention" in [row.call for row in rows]
    assert torch.backends.mha.get_fastpath_enabled() is before


def test_items_are_assumed_and_waited_for(predictor: LatencyPredictor) -> None:
    answer = predictor.predict_module(Calls(lambda x: x * x.sum().item()), torch.empty(8, 8), "t4")
    assert answer.assumptions == ("Tensor.item() is 1 (1 x)",) and "assumed: Tensor.item()" in str(answer)


def test_profiles_of_hosts_are_chosen_by_the_device() -> None:
    assert host_profile(lookup("t4")).name == "turing" and host_profile(None).name == "pytorch"
    assert host_profile(lookup("mi300x")).name == "pytorch" and host_profile(lookup("t4"), "ada").name == "ada"
    with pytest.raises(DataError, match="host must be a name, a path, a dictionary or a HostProfile, not int"):
        host_profile(None, 5)
    [cpu] = [spec for spec in known() if spec.kind == "cpu"][:1]
    assert host_profile(cpu).name == "cpu" and seconds_of(KernelWork("", cycles=1e9, steps=3), 1.0, cpu) == 3.0
    for profile in shipped_hosts().values():
        assert profile.host.calls and profile.host.kinds and profile.residual > 0


def test_host_is_fitted_to_timings(predictor: LatencyPredictor, tmp_path: Path) -> None:
    net, x = nn.Sequential(*(nn.Linear(64, 64) for _ in range(20))), torch.empty(8, 64)
    slow = host_profile(lookup("t4"))
    slow = slow.model_copy(update={"host": slow.host.model_copy(update={"factor": 6.0})})
    measured = predictor.predict_module(net, x, "t4", host=slow).latency_s
    fitted = predictor.calibrate_host([(net, x, measured)], "t4")
    assert fitted.host.factor == pytest.approx(6.0, rel=0.05)
    fitted.write(tmp_path / "host.toml")
    again = predictor.predict_module(net, x, "t4", host=tmp_path / "host.toml").latency_s
    assert again == pytest.approx(measured, rel=0.05)
    with pytest.raises(DataError, match="at least one positive time"):
        predictor.calibrate_host([], "t4")
