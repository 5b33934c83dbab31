"""The lowered operators compute what their names say: compiled by TVM, run here, compared with torch."""

import numpy as np
import pytest
import torch

from cdmpp.programs.operators import OperatorSpec, parse_operator

pytest.importorskip("tvm")

import tvm

from cdmpp.programs.lowering import lower

pytestmark = [pytest.mark.slow, pytest.mark.tvm]


def run(spec: OperatorSpec, *inputs: np.ndarray, output: tuple[int, ...]) -> np.ndarray:
    """Compile the lowered operator for this CPU and run it."""
    return run_all(spec, *inputs, outputs=[output])[0]


def run_all(spec: OperatorSpec, *inputs: np.ndarray, outputs: list[tuple[int, ...]]) -> list[np.ndarray]:
    """As :func:`run`, for several results."""
    module = tvm.compile(lower(spec), target=tvm.target.Target({"kind": "llvm"}))
    device = tvm.cpu()
    arguments = [tvm.runtime.tensor(np.ascontiguousarray(x), device) for x in inputs]
    results = [tvm.runtime.tensor(np.zeros(shape, dtype=inputs[0].dtype), device) for shape in outputs]
    module["main"](*arguments, *results)
    return [result.numpy() for result in results]


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def test_linear_with_bias() -> None:
    x, w, b = random(5, 7), random(6, 7), random(6)
    got = run(parse_operator("linear:m=5,n=6,k=7,bias=true"), x, w, b, output=(5, 6))
    np.testing.assert_allclose(got, x @ w.T + b, rtol=1e-5, atol=1e-5)


def test_bmm() -> None:
    a, b = random(3, 5, 7), random(3, 7, 6)
    got = run(parse_operator("bmm:batch=3,m=5,n=6,k=7"), a, b, output=(3, 5, 6))
    np.testing.assert_allclose(got, a @ b, rtol=1e-5, atol=1e-5)


CONVOLUTIONS = [
    "n=2,c_in=4,h=9,w=8,c_out=6,kh=3,kw=2,stride_h=2,stride_w=1,pad_h=1,pad_w=0,dil_h=1,dil_w=2",
    "n=1,c_in=4,h=7,w=7,c_out=8,kh=3,kw=3,pad_h=1,pad_w=1,groups=2",
    "n=2,c_in=6,h=6,w=5,c_out=6,kh=3,kw=3,stride_h=2,stride_w=2,pad_h=2,pad_w=1,groups=6",
    "n=2,c_in=3,h=5,w=5,c_out=4,kh=1,kw=1",
]


@pytest.mark.parametrize("sizes", CONVOLUTIONS)
@pytest.mark.parametrize("direction", ["fwd", "bwd_data", "bwd_weight"])
def test_convolution_and_its_gradients(sizes: str, direction: str) -> None:
    spec = parse_operator(f"conv2d:{sizes},direction={direction}")
    s = spec.sizes()
    x = torch.from_numpy(random(s["n"], s["c_in"], s["h"], s["w"])).requires_grad_()
    w = torch.from_numpy(random(s["c_out"], s["c_in"] // s["groups"], s["kh"], s["kw"])).requires_grad_()
    y = torch.nn.functional.conv2d(
        x, w, None, (s["stride_h"], s["stride_w"]), (s["pad_h"], s["pad_w"]), (s["dil_h"], s["dil_w"]), s["groups"]
    )
    dy = torch.from_numpy(random(*y.shape))
    y.backward(dy)
    assert x.grad is not None and w.grad is not None
    arrays = [t.detach().numpy() for t in (x, w, dy)]
    inputs, expected = {
        "fwd": ((arrays[0], arrays[1]), y.detach().numpy()),
        "bwd_data": ((arrays[2], arrays[1]), x.grad.numpy()),
        "bwd_weight": ((arrays[2], arrays[0]), w.grad.numpy()),
    }[direction]
    got = run(spec, *inputs, output=expected.shape)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("operator", "heads", "kv_heads", "q_len", "past_len"),
    [
        ("attention_encoder", 2, 2, 5, 0),
        ("attention_prefill", 4, 2, 5, 0),
        ("attention_prefill", 4, 1, 3, 4),
        ("attention_decode", 4, 2, 1, 6),
    ],
)
def test_attention(operator: str, heads: int, kv_heads: int, q_len: int, past_len: int) -> None:
    spec = parse_operator(
        f"{operator}:batch=2,q_len={q_len},past_len={past_len},heads={heads},kv_heads={kv_heads},head_dim=64"
    )
    q, k = random(2, q_len, heads, 64), random(2, q_len + past_len, kv_heads, 64)
    v = k[::-1].copy()
    tq, tk, tv = (torch.from_numpy(t).transpose(1, 2) for t in (q, k, v))
    mask = torch.ones(q_len, q_len + past_len, dtype=torch.bool)
    if operator == "attention_prefill":
        mask = mask.tril(past_len)
    expected = torch.nn.functional.scaled_dot_product_attention(tq, tk, tv, attn_mask=mask, enable_gqa=True)
    got = run(spec, q, k, v, output=(2, q_len, heads, 64))
    if operator == "attention_prefill" and q_len > 1:
        # The template masks with -1 instead of -inf: no feature reads the constant. Compare the last
        # query, which sees every key.
        got, expected = got[:, -1:], expected[:, :, -1:]
    np.testing.assert_allclose(got, expected.transpose(1, 2).numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kv_heads", "causal"), [(4, True), (2, False), (2, True), (1, True)])
def test_attention_backward(kv_heads: int, causal: bool) -> None:
    q, k, v, dout = random(2, 5, 4, 64), random(2, 5, kv_heads, 64) / 2, random(2, 5, kv_heads, 8), random(2, 5, 4, 8)
    leaves = [torch.from_numpy(x).requires_grad_() for x in (q, k, v)]
    tq, tk, tv = (x.transpose(1, 2) for x in leaves)
    scores = tq @ tk.repeat_interleave(4 // kv_heads, 1).transpose(2, 3) / 8
    if causal:
        scores = scores.masked_fill(~torch.ones(5, 5, dtype=torch.bool).tril(), float("-inf"))
    out = (scores.softmax(3) @ tv.repeat_interleave(4 // kv_heads, 1)).transpose(1, 2)
    out.backward(torch.from_numpy(dout))
    spec = parse_operator(
        f"attention_backward:batch=2,q_len=5,heads=4,kv_heads={kv_heads},head_dim=64,v_dim=8,causal={causal}"
    )
    inputs = (q, k, v, out.detach().numpy(), dout, torch.logsumexp(scores, 3).detach().numpy())
    for got, leaf in zip(run_all(spec, *inputs, outputs=[q.shape, k.shape, v.shape]), leaves, strict=True):
        np.testing.assert_allclose(got, leaf.grad.numpy(), rtol=1e-4, atol=1e-4)


#: Constants of the templates: 1 / cols of eight columns, and the same as epsilon.
EPSILON = 0.125


@pytest.mark.parametrize("layer", [False, True])
def test_norm_backward(layer: bool) -> None:
    x, dy, gamma, beta = random(5, 8), random(8, 5).reshape(5, 8), random(8) + 1, random(8)
    leaves = [torch.from_numpy(a).requires_grad_() for a in ((gamma, beta, x) if layer else (gamma, x))]
    mean = x.mean(1) if layer else np.zeros(5, dtype=np.float32)
    scale = ((x - mean[:, None]) ** 2).mean(1)
    scale = (1 / np.sqrt(scale + EPSILON)).astype(np.float32)
    if layer:
        y = torch.nn.functional.layer_norm(leaves[2], (8,), leaves[0], leaves[1], EPSILON)
    else:
        y = torch.nn.functional.rms_norm(leaves[1], (8,), leaves[0], EPSILON)
    y.backward(torch.from_numpy(dy))
    spec = parse_operator(f"{'layernorm' if layer else 'rmsnorm'}_backward:rows=5,cols=8")
    kept = (mean, scale) if layer else (scale,)
    got = run_all(spec, dy, x, gamma, *kept, outputs=[tuple(leaf.shape) for leaf in leaves])
    for result, leaf in zip(got, leaves, strict=True):
        np.testing.assert_allclose(result, leaf.grad.numpy(), rtol=1e-4, atol=1e-5)


def test_fused_add_rms_norm() -> None:
    x, residual, gamma = random(5, 8), random(8, 5).reshape(5, 8), random(8)
    total, y = run_all(parse_operator("fused_add_rms_norm:rows=5,cols=8"), x, residual, gamma, outputs=[(5, 8)] * 2)
    np.testing.assert_allclose(total, x + residual, rtol=1e-6)
    expected = torch.nn.functional.rms_norm(torch.from_numpy(total), (8,), torch.from_numpy(gamma), EPSILON)
    np.testing.assert_allclose(y, expected.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("direction", ["fwd", "bwd", "fwd_bwd"])
def test_softmax_cross_entropy(direction: str) -> None:
    x, target = random(8, 6), np.arange(8, dtype=np.int32) % 6
    leaf = torch.from_numpy(x).requires_grad_()
    loss = torch.nn.functional.cross_entropy(leaf, torch.from_numpy(target).long(), reduction="none")
    loss.mean().backward()  # 1 / 8, the constant of the template
    assert leaf.grad is not None
    log_sum = torch.logsumexp(leaf, 1).detach().numpy()
    kept = (log_sum, np.full(8, 0.125, dtype=np.float32)) if direction == "bwd" else ()
    expected = {"fwd": [loss], "bwd": [leaf.grad], "fwd_bwd": [loss, leaf.grad]}[direction]
    spec = parse_operator(f"softmax_cross_entropy:rows=8,cols=6,direction={direction}")
    got = run_all(spec, x, target, *kept, outputs=[tuple(e.shape) for e in expected])
    for result, wanted in zip(got, expected, strict=True):
        np.testing.assert_allclose(result, wanted.detach().numpy(), rtol=1e-4, atol=1e-5)


def test_softmax_relu_and_gated_unit() -> None:
    x = random(4, 6)
    np.testing.assert_allclose(
        run(parse_operator("softmax:rows=4,cols=6"), x, output=(4, 6)), torch.softmax(torch.from_numpy(x), 1), rtol=1e-5
    )
    np.testing.assert_allclose(run(parse_operator("relu:rows=4,cols=6"), x, output=(4, 6)), np.maximum(x, 0))
    gate, up = torch.from_numpy(x).chunk(2, dim=1)
    np.testing.assert_allclose(
        run(parse_operator("silu_and_mul:rows=4,cols=3"), x, output=(4, 3)),
        (torch.nn.functional.silu(gate) * up).numpy(),
        rtol=1e-5,
    )


def test_max_pool_matches_torch_inside() -> None:
    x = np.abs(random(1, 2, 7, 7))  # positive: the template pads with 0
    expected = torch.nn.functional.max_pool2d(torch.from_numpy(x), 3, 2, 1).numpy()
    got = run(
        parse_operator("max_pool2d:n=1,c=2,h=7,w=7,kh=3,kw=3,stride_h=2,stride_w=2,pad_h=1,pad_w=1"),
        x,
        output=expected.shape,
    )
    np.testing.assert_allclose(got, expected, rtol=1e-6)


@pytest.mark.native
def test_lowered_operator_links_into_a_shared_library(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """Lowered operators can be built, exported, loaded and run."""
    x, w = random(5, 7), random(6, 7)
    module = lower(parse_operator("linear:m=5,n=6,k=7"))
    built = tvm.compile(module, target=tvm.target.Target({"kind": "llvm"}))
    built.export_library(str(tmp_path / "linear.so"))
    loaded = tvm.runtime.load_module(str(tmp_path / "linear.so"))
    result = tvm.runtime.tensor(np.zeros((5, 6), dtype="float32"), tvm.cpu())
    loaded["main"](*(tvm.runtime.tensor(a, tvm.cpu()) for a in (x, w)), result)
    np.testing.assert_allclose(result.numpy(), x @ w.T, rtol=1e-5, atol=1e-5)
