"""Calls whose sizes are values, experts in loops, and a program or a reason for every call."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from cdmpp.errors import InvalidProgramError
from cdmpp.programs.frontends.torch_module import ModuleListing, list_module

EXPERTS, CHOSEN, HIDDEN, COLUMNS = 8, 2, 64, 128
X, INDEX = torch.empty(64, 128), torch.zeros(64, 128, dtype=torch.int64)
ROWS = INDEX[:, 0]


class Calling(nn.Module):
    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self, *inputs: Tensor) -> Any:
        return self.call(*inputs)


def calls(listing: ModuleListing) -> dict[str, str]:
    return {row.call: listing.programs[row.program].name for row in listing.rows}


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(HIDDEN, COLUMNS, bias=False), nn.Linear(HIDDEN, COLUMNS, bias=False)
        self.w2 = nn.Linear(COLUMNS, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class Mixture(nn.Module):
    """Mixtral's block as transformers 4.40 ("all"), 4.57 ("hit") and 5.0 ("stacked") have it."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.gate = form, nn.Linear(HIDDEN, EXPERTS, bias=False)
        if form == "stacked":
            self.gate_up = nn.Parameter(torch.empty(EXPERTS, 2 * COLUMNS, HIDDEN))
            self.down = nn.Parameter(torch.empty(EXPERTS, HIDDEN, COLUMNS))
        else:
            self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, hidden: Tensor) -> Tensor:
        x = hidden.view(-1, HIDDEN)
        weights, chosen = torch.topk(functional.softmax(self.gate(x), dim=1, dtype=torch.float), CHOSEN, dim=-1)
        weights = (weights / weights.sum(dim=-1, keepdim=True)).to(x.dtype)
        result = torch.zeros_like(x)
        # transformers 5 has a class for tokens of other ranks.
        classes = EXPERTS + (self.form == "stacked")
        mask = functional.one_hot(chosen, num_classes=classes).permute(2, 1, 0)
        hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero() if self.form != "all" else range(EXPERTS)
        for expert in hit:
            if self.form == "stacked":
                expert = expert[0]
                if expert == EXPERTS:
                    continue
            place, token = torch.where(mask[expert].squeeze(0))
            state = x[None, token].reshape(-1, HIDDEN)
            if self.form == "stacked":
                gate, up = functional.linear(state, self.gate_up[expert]).chunk(2, dim=-1)
                state = functional.linear(functional.silu(gate) * up, self.down[expert])
            else:
                state = self.experts[expert](state)
            result.index_add_(0, token, (state * weights[token, place, None]).to(x.dtype))
        return result.view(hidden.shape)


@pytest.mark.parametrize("form", ["all", "hit", "stacked"])
@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize(("tokens", "rows"), [(64, {16: 8}), (37, {9: 6, 10: 2}), (1, {1: 2})])
def test_loops_over_experts_have_the_expected_loads(form: str, mode: Any, tokens: int, rows: dict[int, int]) -> None:
    listing = list_module(Mixture(form), torch.empty(1, tokens, HIDDEN), mode=mode)
    assert listing.left_out == ()
    loads: dict[int, int] = {}
    for row in listing.rows:
        sizes = listing.programs[row.program].operator
        if sizes is not None and row.phase == "forward" and sizes.text().endswith(f"n={HIDDEN},k={COLUMNS}"):
            loads[sizes.sizes()["m"]] = row.count
    assert loads == rows
    assert any("every expert has as many tokens" in text for text in listing.assumptions)


def test_experts_in_one_call_and_autocast_that_is_turned_off() -> None:
    def call(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):  # as transformers 4 does
            return functional.grouped_mm(x, weights, offs=ends)

    inputs = (torch.empty(64, 32), torch.empty(4, 32, 16), torch.empty(4, dtype=torch.int32))
    listing = list_module(Calling(call), inputs)
    assert calls(listing)["_grouped_mm"] == "grouped_gemm:dtype=float32,groups=4,rows=64,n=16,k=32"


def _set(x: Tensor) -> Tensor:
    y = x.clone()
    y[y > 0.5] = x[x > 0.5]
    return y


def _while(x: Tensor) -> Any:
    from torch._higher_order_ops.while_loop import while_loop

    start = torch.zeros((), dtype=torch.int64)
    return while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y @ y.T @ y), (start, x))


def _scan(x: Tensor) -> Any:
    from torch._higher_order_ops.scan import scan

    return scan(lambda carry, row: (carry + row, carry * row), x[0], x)


#: Call -> a program whose name it starts with.
PRICED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "sort": (lambda x: x.sort(), "relu"),
    "histc": (lambda x: torch.histc(x, 10), "relu"),
    "nonzero": (lambda x: x[x.nonzero()[:, 0]], "relu"),
    "masked_select": (lambda x: x.masked_select(x > 0), "relu"),
    "index": (lambda x: x[x > 0], "relu:dtype=float32,rows=1,cols=8192"),
    "index_put_": (_set, "relu"),
    "_unique2": (lambda x: x.unique(), "relu"),
    "bincount": (lambda x: torch.bincount(x.long().flatten()), "relu"),
    "kthvalue": (lambda x: x.kthvalue(3), "relu"),
    "median": (lambda x: x.median(), "relu"),
    "searchsorted": (lambda x: torch.searchsorted(x, x), "relu"),
    "topk": (lambda x: x.topk(5), "relu"),
    "scatter_reduce": (lambda x: x.scatter_reduce(1, INDEX.to("meta"), x, "sum"), "relu"),
    "index_add": (lambda x: x.index_add(0, ROWS.to("meta"), x), "relu"),
    "grid_sampler_2d": (lambda x: functional.grid_sample(x[None, None], torch.zeros(1, 8, 8, 2)), "relu"),
    "reflection_pad1d": (lambda x: functional.pad(x, (2, 2), mode="reflect"), "relu"),
    "quantize_per_tensor": (lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), "relu"),
    "_int_mm": (lambda x: torch._int_mm(x.to(torch.int8), x.to(torch.int8).T), "linear:dtype=int8,m=64,n=64,k=128"),
}


@pytest.mark.parametrize("call", PRICED)
def test_calls_are_priced(call: str) -> None:
    function, program = PRICED[call]
    listing = list_module(Calling(function), X)
    assert listing.left_out == ()
    assert calls(listing)[call].startswith(program)


def test_a_long_row_is_sorted_in_passes() -> None:
    def elements(shape: tuple[int, int]) -> int:
        listing = list_module(Calling(lambda x: x.sort(dim=-1)), torch.empty(shape))
        return listing.programs[listing.rows[0].program].operator.sizes()["rows"]  # type: ignore[union-attr]

    assert elements((1, 2**20)) * 2**20 > 4 * elements((2**10, 2**10)) * 2**10


#: Calls without a program, and the reason.
LEFT_OUT: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "aten._fft_r2c": (torch.fft.fft, "Fourier"),
    "aten._linalg_svd": (torch.linalg.svd, "factorisations"),
    "aten.linalg_inv_ex": (lambda x: torch.linalg.inv(x @ x.T), "factorisations"),
    "aten.linalg_qr": (torch.linalg.qr, "factorisations"),
    "aten._linalg_eigh": (lambda x: torch.linalg.eigh(x @ x.T), "factorisations"),
    "aten.mm": (lambda x: x.double() @ x.double().T, "elements of type float64"),
    "aten._pdist_forward": (functional.pdist, "no operator describes its kernel"),
}


@pytest.mark.parametrize("call", LEFT_OUT)
def test_calls_without_a_program_have_a_reason_of_one_sentence(call: str) -> None:
    function, reason = LEFT_OUT[call]
    listing = list_module(Calling(function), X)
    [entry] = [entry for entry in listing.left_out if entry.operator == call]
    assert reason in entry.reason and "\n" not in entry.reason and ". " not in entry.reason


def _flex(x: Tensor) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    heads = x.reshape(1, 4, 32, 64)
    return flex_attention(heads, heads, heads)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (_while, "while_loop, cond, scan and map depends on values$"),
        (lambda x: torch.cond(x.sum() > 0, lambda x: x @ x.T, lambda x: x @ x.T, (x,)), "map depends on values$"),
        (_scan, "map depends on values$"),
        (_flex, "flex attention is compiled for the mask"),
        (lambda x: x.to_sparse(), "an operator gives no shapes without data: aten::_to_sparse"),
        (lambda x: torch.histogram(x, 10), "an operator gives no shapes without data: aten::histogram"),
        (lambda x: x if torch.equal(x, x) else -x, "an operator gives no shapes without data: aten::equal"),
        (lambda x: x.repeat_interleave(ROWS.to("meta"), 0), "does not run without data: cannot repeat_interleave"),
        (lambda x: x if torch.allclose(x, x) else -x, "does not run without data: Tensor.item"),
        (lambda x: x if x.sum() > 0 else -x, "does not run without data: Tensor.item"),
    ],
)
def test_modules_that_cannot_be_listed_say_why_in_one_sentence(function: Any, message: str) -> None:
    with pytest.raises(InvalidProgramError, match=message) as caught:
        list_module(Calling(function), X)
    assert "\n" not in caught.value.message and ". " not in caught.value.message


def packed(lengths: list[int], mode: str, compiled: bool = False, dtype: torch.dtype = torch.float16) -> ModuleListing:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    starts, tokens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32), torch.empty(sum(lengths), 3, 4, 64)

    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))
            self.register_buffer("starts", starts)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (x * self.scale).unbind(1)
            return varlen.varlen_attn(q, k, v, self.starts, self.starts, max(lengths), max(lengths))

    return list_module(Packed(), tokens, mode=mode, dtype=dtype, compiled=compiled)


@pytest.mark.parametrize("compiled", [False, True])
def test_packed_attention_of_equal_lengths_is_one_batch(compiled: bool) -> None:
    listing = packed([100, 100, 100], "training", compiled)
    named = [row for row in listing.rows if "varlen" in row.call]
    program = "attention_encoder:dtype=float16,batch=3,q_len=100,heads=4,kv_heads=4,head_dim=64"
    assert [listing.programs[row.program].name for row in named] == [program] * 2
    assert [(row.phase, row.count) for row in named] == [("forward", 1), ("backward", 3)]
    assert not listing.left_out


def test_packed_attention_has_the_tokens_and_the_pairs_of_its_sequences() -> None:
    lengths = [512 - 24 * i for i in range(16)]
    listing = packed(lengths, "inference")
    [spec] = [listing.programs[row.program].operator for row in listing.rows if row.call == "_varlen_attn"]
    assert spec is not None
    sizes = spec.sizes()
    tokens, pairs = sizes["batch"] * sizes["q_len"], sizes["batch"] * sizes["q_len"] ** 2
    assert tokens == pytest.approx(sum(lengths), rel=0.05)
    # The mean of the squares is taken from the mean and the longest of the lengths.
    assert pairs == pytest.approx(sum(n * n for n in lengths), rel=0.05)


def test_packed_attention_to_a_cache_is_left_out() -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    starts = torch.tensor([0, 5, 8], dtype=torch.int32)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return varlen.varlen_attn(q, k, v, starts.to("meta"), starts.to("meta"), 5, 5)

    inputs = (torch.empty(8, 4, 64), torch.empty(30, 4, 64), torch.empty(30, 4, 64))
    [left_out] = list_module(Calling(attend), inputs, dtype=torch.float16).left_out
    assert "other tokens" in left_out.reason
