"""Eager torch modules as the kernels that they launch."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from cdmpp.errors import InvalidProgramError
from cdmpp.programs.frontends.eager_rules import AtenCall, outcome, size_bytes
from cdmpp.programs.frontends.graph import NoRuleError
from cdmpp.programs.frontends.torch_eager import EagerTrace, eager_trace


def texts(trace: EagerTrace, phase: str) -> list[str]:
    return [launch.spec.text() for launch in trace.launches if launch.phase == phase]


def test_a_linear_layer_has_one_product_forward_and_two_backward() -> None:
    trace = eager_trace(nn.Linear(64, 32), [torch.empty(8, 64, requires_grad=True)], backward=True)
    assert texts(trace, "forward") == ["linear:dtype=float32,m=8,n=32,k=64,bias=true"]
    assert texts(trace, "backward") == [
        "linear:dtype=float32,m=8,n=64,k=32",  # of the input
        "linear:dtype=float32,m=32,n=64,k=8",  # of the weight
        "relu:dtype=float32,rows=5,cols=32",  # of the bias: 8 x 32 elements read, 32 written
    ]
    assert trace.unsupported == ()


def test_a_convolution_with_its_surrounding_calls() -> None:
    net = nn.Sequential(
        nn.Conv2d(4, 8, 3, stride=2, padding=1, groups=2, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    ).eval()
    trace = eager_trace(net, [torch.empty(2, 4, 16, 16)])
    assert [launch.call for launch in trace.launches] == [
        "convolution",
        "native_batch_norm",
        "relu",
        "max_pool2d_with_indices",
        "mean",
        "addmm",
    ]
    first = trace.launches[0]
    wanted = "conv2d:dtype=float32,n=2,c_in=4,h=16,w=16,c_out=8,kh=3,kw=3,stride_h=2,stride_w=2"
    assert first.spec.text() == wanted + ",pad_h=1,pad_w=1,groups=2"
    assert (first.module, trace.gradients) == ("0", ())
    assert trace.launches[1].remark.startswith("one pass")


def test_backward_calls_name_the_differentiated_module() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    trace = eager_trace(net, [torch.empty(2, 4)], backward=True)
    modules = [launch.module for launch in trace.of("backward")]
    assert list(dict.fromkeys(modules)) == ["2", "1", "0"]
    names, launches = zip(*trace.gradients, strict=True)
    assert {*names[:2]} == {"2.weight", "2.bias"} and {*names[2:]} == {"0.weight", "0.bias"}
    # The last layer's gradients are there before the activation's; the first layer's at the end.
    before = [launch.module for launch in trace.launches[: launches[1]] if launch.phase == "backward"]
    assert set(before) == {"2"} and launches[-1] == len(trace.launches)


def test_gradients_that_are_there_are_added_to() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    once, again = (eager_trace(net, [torch.empty(2, 4)], backward=True, accumulate=more) for more in (False, True))
    extra = Counter(launch.call for launch in again.launches) - Counter(launch.call for launch in once.launches)
    assert extra == {"add_": 4}


def test_the_module_is_left_alone() -> None:
    net = nn.Linear(4, 4)
    weight = net.weight
    eager_trace(net, [torch.empty(2, 4)], backward=True, accumulate=True)
    assert net.weight is weight and weight.device.type == "cpu" and weight.grad is None
    assert not net._forward_hooks and not net._forward_pre_hooks


def test_tied_weights_stay_one() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
            self.head.weight = self.words.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.words(x))

    calls = [launch.call for launch in eager_trace(Tied(), [torch.zeros(3, dtype=torch.int64)], backward=True).launches]
    # The table's gradient is made twice and added once.
    assert calls == ["embedding", "mm", "mm", "mm", "embedding_dense_backward", "embedding_dense_backward", "add"]


def test_dropout_and_attention_are_one_kernel_each() -> None:
    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = nn.functional.dropout(x, 0.1, self.training)
            return nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)

    trace = eager_trace(Net().train(), [torch.empty(2, 3, 5, 8)])
    assert [launch.call for launch in trace.launches] == ["native_dropout", "scaled_dot_product_attention"]
    assert trace.launches[1].spec.text() == (
        "attention_prefill:dtype=float32,batch=2,q_len=5,heads=3,kv_heads=3,head_dim=8"
    )
    *_, masked = eager_trace(Masked(), [torch.empty(2, 3, 5, 8)]).launches
    assert masked.spec.text() == "attention_encoder:dtype=float32,batch=2,q_len=5,heads=3,kv_heads=3,head_dim=8"
    assert "mask" in masked.remark


class Masked(nn.Module):
    """Attention with a mask, which operators of attention do not read."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=torch.zeros(5, 5))


def test_autocast_multiplies_in_half_and_normalises_in_float() -> None:
    net = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16))
    trace = eager_trace(net.eval(), [torch.empty(4, 16)], autocast=torch.float16)
    result = [(launch.call, launch.spec.dtype) for launch in trace.launches if launch.call != "_to_copy"]
    assert result == [("addmm", "float16"), ("native_layer_norm", "float32"), ("addmm", "float16")]
    # Casts: the input, two weights and two biases, the layer norm's input, its output.
    assert sum(launch.call == "_to_copy" for launch in trace.launches) == 7


def test_streaming_calls_move_the_same_number_of_bytes() -> None:
    x, mask = torch.empty(4, 1024, device="meta"), torch.empty(4, 1024, dtype=torch.bool, device="meta")
    result = outcome(AtenCall("native_dropout", (x, 0.1, True), {}, (x, mask)))
    assert [launch["operator"] for launch in result.launches] == ["relu"]
    rows, cols = result.launches[0]["rows"], result.launches[0]["cols"]
    assert 2 * 4 * rows * cols == pytest.approx(4 * 1024 * (4 + 4 + 1), rel=0.2)  # whole rows
    assert "same bytes" in result.remark
    assert size_bytes(x[:1].expand(4, 1024)) == 4 * 1024  # a broadcast axis is read once


def test_passes_in_16_bit_are_those_of_float32_over_the_same_bytes() -> None:
    x = torch.empty(8, 64, dtype=torch.float16, device="meta")
    for call in (AtenCall("add", (x, x), {}, x), AtenCall("cat", ([x, x],), {}, torch.cat([x, x]))):
        (fields,) = outcome(call).launches
        moved = sum(size_bytes(t) for t in (*call.tensors, *call.results))
        assert (fields["operator"], fields["dtype"]) == ("relu", "float32")
        assert 2 * 4 * fields["rows"] * fields["cols"] == moved
    # Added to a float32 tensor, the 16-bit one is read at its own size.
    wide = torch.empty(8, 64, device="meta")
    (fields,) = outcome(AtenCall("add", (wide, x), {}, wide)).launches
    assert 2 * 4 * fields["rows"] * fields["cols"] == 8 * 64 * (4 + 2 + 4)


def test_unknown_calls_are_named() -> None:
    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.inv(x) + torch.linalg.inv(x)

    trace = eager_trace(Net(), [torch.empty(3, 3)])
    assert [(launch.operator, launch.count) for launch in trace.unsupported] == [("aten.linalg_inv_ex", 2)]
    x = torch.empty(3, device="meta")
    with pytest.raises(NoRuleError):
        outcome(AtenCall("no_such_call", (x,), {}, x))


def test_modules_that_look_at_values_are_refused() -> None:
    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(InvalidProgramError, match="without data"):
        eager_trace(Net(), [torch.empty(3)])
    with pytest.raises(InvalidProgramError, match="gradient"):
        eager_trace(nn.ReLU(), [torch.empty(3)], backward=True)
