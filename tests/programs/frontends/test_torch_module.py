"""Torch modules as programs, in inference and training."""

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cdmpp.errors import CdmppError, DataError, InvalidProgramError
from cdmpp.programs.frontends.eager_rules import BLOCKS, CHUNK, AtenCall, foreach, outcome, size_bytes
from cdmpp.programs.frontends.graph import NoRuleError
from cdmpp.programs.frontends.torch_eager import eager_trace
from cdmpp.programs.frontends.torch_module import ModuleListing, list_module, paths_text

TOKENS = torch.zeros(2, 8, dtype=torch.int64)
X, GROWN = torch.empty(8, 64), torch.empty(8, 64, requires_grad=True)


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32))


def lines(listing: ModuleListing, phase: str = "forward") -> list[tuple[str, str, int]]:
    return [(r.module, listing.programs[r.program].name, r.count) for r in listing.rows if r.phase == phase]


FORWARD = [
    ("0", "linear:dtype=float32,m=8,n=128,k=64,bias=true", 1),
    ("1", "relu:dtype=float32,rows=8,cols=128", 1),
    ("2", "linear:dtype=float32,m=8,n=32,k=128,bias=true", 1),
]


def test_two_layers_are_two_products_and_an_activation() -> None:
    listing = list_module(two_layers(), X)
    assert lines(listing) == FORWARD
    assert (listing.name, listing.phases, listing.left_out) == ("Sequential", ("forward",), ())


def test_training_has_the_products_of_both_gradients() -> None:
    listing = list_module(two_layers(), (X,), mode="training")
    assert lines(listing) == FORWARD and listing.phases == ("forward", "backward")
    products = [line for line in lines(listing, "backward") if line[1].startswith("linear")]
    assert products == [
        ("2", "linear:dtype=float32,m=8,n=128,k=32", 1),  # of the activation
        ("2", "linear:dtype=float32,m=32,n=128,k=8", 1),  # of the second weight
        ("0", "linear:dtype=float32,m=128,n=64,k=8", 1),  # of the first; the input needs no gradient
    ]
    assert len(lines(listing, "backward")) == 6  # two biases, and the activation


def test_every_kind_of_inputs_is_listed_alike() -> None:
    net = two_layers()
    alike = [list_module(net, inputs).rows for inputs in (X, (X,), [X], {"input": X})]
    assert alike[1:] == alike[:1] * 3


def test_modules_on_meta_are_listed_like_those_with_data() -> None:
    with torch.device("meta"):
        empty = two_layers()
    for mode in ("inference", "training"):
        assert list_module(empty, X, mode=mode) == list_module(two_layers(), X, mode=mode)


def test_dtype_casts_parameters_buffers_and_inputs() -> None:
    net = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128))
    for dtype in ("bfloat16", torch.bfloat16):
        listing = list_module(net, X, dtype=dtype)
        assert lines(listing)[0][1] == "linear:dtype=bfloat16,m=8,n=128,k=64,bias=true"
        assert listing.dtype == "bfloat16"
    assert next(net.parameters()).dtype == torch.float32
    embedding = list_module(nn.Embedding(10, 4), TOKENS, dtype="float16")  # integers stay
    assert lines(embedding)[0][1] == "embedding:dtype=float16,rows=16,cols=4,table_rows=10"


def test_autocast_casts_products_alone() -> None:
    volume = list_module(nn.Conv3d(2, 2, 3), torch.empty(1, 2, 8, 8, 8), autocast="float16")
    assert any(name.startswith("conv2d:dtype=float16") for _, name, _ in lines(volume))
    listing = list_module(nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)), X, autocast="bfloat16")
    names = [name for _, name, _ in lines(listing)]
    assert any(name.startswith("linear:dtype=bfloat16") for name in names)
    assert any(name.startswith("layernorm:dtype=float32") for name in names)


def test_modes_are_eval_and_train_and_the_module_keeps_its_own() -> None:
    net = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5)).train()
    assert len(lines(list_module(net, X))) == 1
    assert net.training and net[1].training
    assert len(lines(list_module(net.eval(), X, mode="training"))) == 2
    assert not net.training


def test_shared_parameters_and_modules_are_counted_as_often_as_they_run() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(10, 64), nn.Linear(64, 10, bias=False)
            self.head.weight = self.words.weight
            self.block = nn.Linear(64, 64, bias=False)
            self.again = self.block

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.again(self.block(self.words(tokens))))

    listing = list_module(Shared(), TOKENS, mode="training", optimizer="sgd")
    assert lines(listing)[1] == ("block", "linear:dtype=float32,m=16,n=64,k=64", 2)
    # The update moves two weights, the shared one once: parameter read, gradient read, parameter written.
    [(_, _, count)] = lines(listing, "optimizer")
    assert count == 1


class Answer(nn.Module):
    """Returns what a function makes of its output."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.make = nn.Linear(64, 16), make

    def forward(self, x: Tensor) -> Any:
        return self.make(self.layer(x))


@dataclass
class Output:
    logits: Tensor
    state: None = None


@pytest.mark.parametrize(
    "make",
    [
        lambda y: y,
        lambda y: {"logits": y, "cache": None, "rest": [1, (y.detach(),)]},
        lambda y: (None, {"logits": [y]}),
        lambda y: Output(y),
    ],
)
def test_the_backward_pass_starts_at_tensors_in_any_structure(make: Callable[[Tensor], Any]) -> None:
    plain = list_module(nn.Sequential(nn.Linear(64, 16)), X, mode="training")
    rows = lines(list_module(Answer(make), X, mode="training"), "backward")
    assert [row[1:] for row in rows] == [row[1:] for row in lines(plain, "backward")]


def test_the_backward_pass_starts_at_the_loss_where_there_is_one() -> None:
    with_loss = list_module(Answer(lambda y: {"loss": y.sum(), "logits": y}), X, mode="training")
    alone = list_module(Answer(lambda y: y.sum()), X, mode="training")
    assert lines(with_loss, "backward") == lines(alone, "backward")


def test_equal_layers_share_a_row() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(two_layers() for _ in range(3))

        def forward(self, x: Tensor) -> list[Tensor]:
            return [layer(x) for layer in self.layers]

    listing = list_module(Net(), X)
    assert [(module, count) for module, _, count in lines(listing)] == [
        ("layers.0-2.0", 3),
        ("layers.0-2.1", 3),
        ("layers.0-2.2", 3),
    ]
    assert listing.rows[0].modules == ("layers.0.0", "layers.1.0", "layers.2.0")
    assert paths_text(["a.0.b", "a.3.b", "a.4.b"]) == "a.0,3-4.b"
    assert paths_text([""]) == ""


@pytest.mark.parametrize(("name", "passes"), [("sgd", 1), ("adam", 8), ("adamw", 8)])
def test_an_optimizer_adds_its_passes(name: str, passes: int) -> None:
    listing = list_module(two_layers(), X, mode="training", optimizer=name)
    assert listing.phases == ("forward", "backward", "optimizer")
    counts = [count for _, _, count in lines(listing, "optimizer")]
    assert abs(sum(counts) - passes) <= 1  # AdamW decays the weights in a pass of its own
    assert all(module == "" for module, _, _ in lines(listing, "optimizer"))


def test_an_optimizer_may_be_a_callable() -> None:
    listing = list_module(
        two_layers(), X, mode="training", optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True)
    )
    # Momentum is decayed and added to, then the weights are updated.
    assert sum(count for _, _, count in lines(listing, "optimizer")) == 3


def test_a_call_on_lists_is_as_many_launches_as_pytorch_makes() -> None:
    def launches(*sizes: int) -> list[float]:
        tensors = [torch.empty(size, device="meta") for size in sizes]
        result = foreach(AtenCall("_foreach_mul_", (tensors, 2.0), {}, None))
        return [f["rows"] * f["cols"] * 8 for f in result.launches]

    full = BLOCKS * CHUNK
    assert launches(100, 200) == [2 * 4 * 300]  # read and written once
    assert launches(*[2048] * 111) == [2 * 4 * 2048 * 110, 2 * 4 * 2048]
    assert launches(3 * full) == [2 * 4 * full] * 3
    assert foreach(AtenCall("_foreach_add_", ([torch.zeros(())], 1), {}, None)).launches == ()  # counters of the host


def test_attention_in_training_is_fused_both_ways() -> None:
    class Attention(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)

    x = torch.empty(2, 3, 16, 8, dtype=torch.float16, requires_grad=True)
    trace = eager_trace(Attention(), [x], backward=True)
    fused = "attention_prefill:dtype=float16,batch=2,q_len=16,heads=3,kv_heads=3,head_dim=8"
    assert [launch.spec.text() for launch in trace.of("forward")] == [fused]
    backward = [launch for launch in trace.of("backward") if launch.call.startswith("scaled")]
    assert [launch.spec.text() for launch in backward] == [fused] * 3 and "three" in backward[0].remark


@pytest.mark.filterwarnings("ignore:The tensor attributes")  # of the export of a recurrent network
def test_compiled_and_exported_modules_are_listed() -> None:
    net = two_layers().eval()
    compiled = nn.Module()  # torch.compile wraps a module like this
    compiled._orig_mod = net
    assert lines(list_module(compiled, X)) == FORWARD
    exported = list_module(torch.export.export(net, (X,)), None)
    assert [name for _, name, _ in lines(exported)] == [name for _, name, _ in FORWARD]
    # An exported recurrent network makes its first state on the device of its export.
    gru = nn.GRU(16, 32, batch_first=True).eval()
    x = torch.zeros(2, 8, 16)
    assert lines(list_module(torch.export.export(gru, (x,)), None)) == lines(list_module(gru, x))


def test_tensors_that_are_not_registered_go_to_meta_too() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.ones(64)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    assert len(lines(list_module(Plain(), X))) == 1


class Cyclic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(64, 64))
        self.block.append(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)


class Choosing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


class Moving(nn.Module):
    """Adds a tensor on a device that it names."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.ones(64, device=self.device)


class Uncopied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


@pytest.mark.parametrize(
    ("module", "inputs", "options", "message"),
    [
        (Cyclic(), X, {}, "the module Cyclic contains itself as block.1"),
        (nn.Sequential(Choosing()), X, {}, "Sequential, 0: does not run without data: .*item"),
        (Uncopied(), X, {}, "cannot be copied"),
        (Moving("cpu"), X, {}, "Moving: names a device: .*cpu"),
        (Moving("cuda"), X, {}, "Moving: names a device: .*CUDA"),
        (nn.Sequential(nn.LazyLinear(8)), X, {}, "0 .LazyLinear. has parameters without shapes"),
        (nn.Tanh(), GROWN, {"mode": "training", "optimizer": "sgd"}, "no parameter has a gradient"),
        (two_layers(), (), {}, "the inputs do not fit: .*missing 1 required"),
        (two_layers(), {"images": X}, {}, "the inputs do not fit: .*images"),
        (two_layers(), torch.empty(8, 65), {}, "does not run on these inputs: .*dim"),
        (two_layers(), "x", {}, "example_inputs must be inputs of the module, not str"),
        (two_layers(), None, {}, "example_inputs must be inputs of the module, not NoneType"),
        (two_layers(), {1: X}, {}, "must be inputs of the module, not dict with keys 1"),
        (two_layers(), torch.empty(0, 64), {}, r"example_inputs have no elements: \(0, 64\)"),
        (two_layers().half(), X, {}, "0: addmm of tensors of different types: float16, float32"),
        ("net", X, {}, "str is not a torch module"),
        (nn.ReLU, X, {}, "ReLU is not a torch module"),
        (nn.Identity(), X, {}, "launches no kernel"),
        (nn.ReLU(), X, {"mode": "training"}, "requires a gradient"),
        (two_layers(), X, {"mode": "both"}, "mode 'both' is not known"),
        (two_layers(), X, {"dtype": "int4"}, "dtype 'int4' is not supported"),
        (two_layers(), X, {"autocast": "float32"}, "autocast 'float32' is not supported"),
        (two_layers(), X, {"optimizer": "adam"}, "no gradients in mode inference"),
        (two_layers(), X, {"mode": "training", "optimizer": "lion"}, "optimizer 'lion' is not known"),
    ],
)
def test_mistakes_have_a_clear_error(module: Any, inputs: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((InvalidProgramError, DataError), match=message) as raised:
        list_module(module, inputs, **options)
    assert isinstance(raised.value, CdmppError) and raised.value.hint


def moved_bytes(listing: ModuleListing, phase: str = "forward") -> list[int]:
    """Bytes of the passes of a phase, which ``relu`` of float32 reads and writes."""
    sizes = []
    for row in listing.rows:
        operator = listing.programs[row.program].operator
        if row.phase == phase and operator is not None and operator.operator == "relu":
            sizes.append(8 * operator.rows * operator.cols * row.count)  # type: ignore[attr-defined]
    return sizes


def test_group_norms_read_twice_and_write_once() -> None:
    x = torch.empty(2, 16, 32, 32)
    assert moved_bytes(list_module(nn.GroupNorm(4, 16), x)) == [4 * x.numel(), 2 * 4 * x.numel()]


@pytest.mark.parametrize("layer", [nn.Mish(), nn.Softplus(), nn.PReLU(), nn.CELU(), nn.GLU()])
def test_element_wise_calls_without_an_operator_of_their_own_stream_their_tensors(layer: nn.Module) -> None:
    x = torch.empty(64, 1024)
    listing = list_module(layer, x)
    assert listing.left_out == ()
    written = 0.5 if isinstance(layer, nn.GLU) else 1.0
    assert sum(moved_bytes(listing)) == pytest.approx((1 + written) * 4 * x.numel(), rel=0.02)


def test_products_of_experts_are_grouped() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(4, 64, 32, dtype=torch.bfloat16))

        def forward(self, x: Tensor, ends: Tensor) -> Tensor:
            return torch.nn.functional.grouped_mm(x, self.weight, offs=ends)

    inputs = torch.empty(128, 64, dtype=torch.bfloat16, requires_grad=True), torch.zeros(4, dtype=torch.int32)
    listing = list_module(Experts(), inputs, mode="training")
    names = [(phase, name) for phase in listing.phases for _, name, _ in lines(listing, phase) if "grouped" in name]
    assert [name.partition(":")[0] for _, name in names] == ["grouped_gemm"] * len(names)
    assert [phase for phase, _ in names][:2] == ["forward", "backward"]
    assert "groups=4,rows=128,n=32,k=64" in names[0][1]
    assert listing.left_out == ()


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
