"""Blocks that are not in the zoo, as ``.pt2`` files for ``cdmpp collect``.

``python -m benchmarks.schedules.blocks DIR`` writes them. Each block is a function of one input and its weights. Their
programs are part of ``data/cdmpp-measured``.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

Shapes = Sequence[tuple[int, ...]]
Function = Callable[..., Tensor]


class Block(nn.Module):
    """A function with random weights of the given shapes."""

    def __init__(self, function: Function, weights: Shapes) -> None:
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(s) / math.sqrt(s[-1])) for s in weights])

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.weights)


def edge_attention(x: Tensor, project: Tensor, score: Tensor) -> Tensor:
    """Graph attention over 16 neighbours of each node: a gather, a softmax of each neighbourhood."""
    nodes, y = x.shape[0], x @ project
    near = y[(torch.arange(nodes)[:, None] * 7 + torch.arange(16) * 13) % nodes]
    weight = torch.softmax(functional.leaky_relu(near @ score[:, 0] + (y @ score[:, 1])[:, None], 0.2), -1)
    return functional.elu((weight[:, :, None] * near).sum(1))


def spectral(x: Tensor, cosine: Tensor, sine: Tensor, real: Tensor, imaginary: Tensor) -> Tensor:
    """Fourier layer: a real transform to few modes, a complex product for each mode, and back."""
    a, b = torch.einsum("bcn,nk->bck", x, cosine), torch.einsum("bcn,nk->bck", x, sine)
    p = torch.einsum("bck,cdk->bdk", a, real) - torch.einsum("bck,cdk->bdk", b, imaginary)
    q = torch.einsum("bck,cdk->bdk", a, imaginary) + torch.einsum("bck,cdk->bdk", b, real)
    return functional.gelu(x + p @ cosine.T + q @ sine.T)


def detection(x: Tensor, lateral: Tensor, smooth: Tensor, head: Tensor) -> Tensor:
    """Head of a detector: a pyramid of two levels, three anchors a cell, boxes decoded."""
    low = functional.conv2d(functional.max_pool2d(x, 2), lateral)
    merged = functional.silu(
        functional.conv2d(
            functional.conv2d(x, lateral) + functional.interpolate(low, scale_factor=2.0), smooth, padding=1
        )
    )
    y = functional.conv2d(merged, head)
    batch, _, height, width = y.shape
    y = y.view(batch, 3, -1, height, width).permute(0, 1, 3, 4, 2)
    centre = (torch.sigmoid(y[..., :2]) * 2 - 0.5 + torch.arange(width)[:, None]) * 8.0
    return torch.cat((centre, torch.exp(y[..., 2:4].clamp(max=4)), torch.sigmoid(y[..., 4:])), -1).flatten(1, 3)


def chunked_scan(x: Tensor, decay: Tensor, key: Tensor, query: Tensor) -> Tensor:
    """State-space duality (Mamba-2): products inside chunks of 32 steps, a state carried from chunk to chunk."""
    batch, length, width = x.shape
    chunks = x.view(batch, length // 32, 32, width)
    steps = torch.ones(32, 32).tril() @ -functional.softplus(chunks @ decay)
    lower = torch.exp((steps - steps.transpose(2, 3)).tril()).tril()
    k, q = chunks @ key, chunks @ query
    inside = (q @ k.transpose(2, 3) * lower) @ chunks
    carried = (k * torch.exp(steps[:, :, -1:] - steps)).transpose(2, 3) @ chunks
    state, outside = torch.zeros_like(carried[:, 0]), []
    for i in range(length // 32):
        outside.append((q[:, i] * torch.exp(steps[:, i])) @ state)
        state = state * torch.exp(steps[:, i, -1:]) + carried[:, i]
    return (inside + torch.stack(outside, 1)).reshape(x.shape)


def diagonal_states(x: Tensor, rate: Tensor, phase: Tensor, out: Tensor) -> Tensor:
    """S4D: the kernel of a diagonal state space by its powers, then a causal convolution as a product."""
    time = torch.arange(x.shape[-1], dtype=torch.float32)
    kernel = torch.exp(-rate.abs()[:, :, None] * time) * torch.cos(phase[:, :, None] * time)
    kernel = (out[:, :, None] * kernel).sum(1)
    lag = torch.arange(x.shape[-1])[:, None] - torch.arange(x.shape[-1])
    toeplitz = torch.where(lag >= 0, kernel[:, lag.clamp(0, x.shape[-1])], 0.0)
    return functional.gelu(torch.einsum("cts,bcs->bct", toeplitz, x))


def triangle(x: Tensor, left: Tensor, right: Tensor, gate: Tensor) -> Tensor:
    """AlphaFold's triangle update of pairs."""
    y = functional.layer_norm(x, x.shape[-1:])
    a, b = torch.sigmoid(y @ gate) * (y @ left), torch.sigmoid(y @ gate) * (y @ right)
    return x + functional.layer_norm(torch.einsum("ikc,jkc->ijc", a, b), x.shape[-1:])


def messages(x: Tensor, project: Tensor, filters: Tensor) -> Tensor:
    """SchNet: distances of all pairs, radial functions, messages."""
    distance = ((x[:, None, :3] - x[None, :, :3]) ** 2).sum(-1).add(1e-6).sqrt()
    radial = torch.exp(-4.0 * (distance[:, :, None] - torch.arange(filters.shape[0]) * 0.25) ** 2)
    return functional.softplus(((radial @ filters) * (x @ project)[None]).sum(1)) - math.log(2.0)


def window_attention(x: Tensor, qkv: Tensor, out: Tensor) -> Tensor:
    """Attention in a sliding window of 32 steps with a linear bias (ALiBi), four heads."""
    length, width = x.shape
    q, k, v = (x @ qkv).view(length, 3, 4, width // 4).unbind(1)
    behind = torch.arange(length)[:, None] - torch.arange(length)
    score = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(width / 4) - 0.1 * behind
    score = torch.where((behind >= 0) & (behind < 32), score, -1e9)
    return torch.einsum("hqk,khd->qhd", torch.softmax(score, -1), v).reshape(length, width) @ out


def matching(x: Tensor, text: Tensor) -> Tensor:
    """CLIP's loss, and two rounds of Sinkhorn's normalisation of the similarities."""
    score = functional.normalize(x, dim=-1) @ functional.normalize(text, dim=-1).T * 10.0
    plan = score
    for _ in range(2):
        plan = plan - torch.exp(plan).sum(1, keepdim=True).log()
        plan = plan - torch.exp(plan).sum(0, keepdim=True).log()
    return torch.exp(plan) * (torch.log_softmax(score, 0) + torch.log_softmax(score, 1))


def attention_gates(x: Tensor, squeeze: Tensor, excite: Tensor, spatial: Tensor) -> Tensor:
    """CBAM: gates on channels, then on positions, and an instance normalisation."""
    pooled = torch.stack((x.mean((2, 3)), functional.max_pool2d(x, x.shape[2:])[:, :, 0, 0]))
    y = x * torch.sigmoid((functional.relu(pooled @ squeeze) @ excite).sum(0))[:, :, None, None]
    planes = torch.cat((y.mean(1, keepdim=True), y.max(1, keepdim=True).values), 1)
    return functional.instance_norm(y * torch.sigmoid(functional.conv2d(planes, spatial, padding=3)))


def stencil(x: Tensor, rate: Tensor) -> Tensor:
    """Two explicit steps of an advection and diffusion equation on a grid."""
    for _ in range(2):
        y = functional.pad(x, (1, 1, 1, 1), mode="replicate")
        middle, down, right = y[:, :, 1:-1, 1:-1], y[:, :, 2:, 1:-1], y[:, :, 1:-1, 2:]
        diffusion = down + right + y[:, :, :-2, 1:-1] + y[:, :, 1:-1, :-2] - 4 * middle
        x = middle + 0.1 * rate[:, None, None] * diffusion - 0.05 * middle * (down - middle)
    return x


def splines(x: Tensor, centres: Tensor, weights: Tensor) -> Tensor:
    """A layer of a Kolmogorov-Arnold network: radial functions of each input, their weighted sum."""
    basis = torch.exp(-((x[:, :, None] - centres) ** 2))
    return torch.einsum("nik,kio->no", basis, weights) + functional.silu(x) @ weights[0]


def _spectral(batch: int, width: int, length: int, modes: int) -> tuple[tuple[int, ...], Shapes]:
    return (batch, width, length), [(length, modes), (length, modes), (width, width, modes), (width, width, modes)]


#: File -> function, shape of its input, shapes of its weights.
BLOCKS: dict[str, tuple[Function, tuple[int, ...], Shapes]] = {
    "edge-attention-300": (edge_attention, (300, 72), [(72, 48), (48, 2)]),
    "edge-attention-1000": (edge_attention, (1000, 33), [(33, 20), (20, 2)]),
    "spectral-128": (spectral, *_spectral(4, 24, 128, 12)),
    "spectral-500": (spectral, *_spectral(1, 40, 500, 30)),
    "detection-40": (detection, (1, 48, 40, 40), [(64, 48, 1, 1), (64, 64, 3, 3), (255, 64, 1, 1)]),
    "detection-26": (detection, (2, 30, 26, 26), [(36, 30, 1, 1), (36, 36, 3, 3), (27, 36, 1, 1)]),
    "chunked-scan-128": (chunked_scan, (2, 128, 96), [(96, 1), (96, 24), (96, 24)]),
    "chunked-scan-192": (chunked_scan, (5, 192, 40), [(40, 1), (40, 64), (40, 64)]),
    "diagonal-states-100": (diagonal_states, (3, 24, 100), [(24, 16)] * 3),
    "triangle-40": (triangle, (40, 40, 48), [(48, 48)] * 3),
    "triangle-25": (triangle, (25, 25, 100), [(100, 100)] * 3),
    "messages-90": (messages, (90, 64), [(64, 64), (20, 64)]),
    "window-attention-200": (window_attention, (200, 144), [(144, 432), (144, 144)]),
    "window-attention-333": (window_attention, (333, 64), [(64, 192), (64, 64)]),
    "matching-150": (matching, (150, 120), [(150, 120)]),
    "attention-gates-28": (attention_gates, (2, 72, 28, 28), [(72, 9), (9, 72), (1, 2, 7, 7)]),
    "stencil-120": (stencil, (3, 4, 120, 120), [(4,)]),
    "splines-48": (splines, (100, 48), [(8,), (8, 48, 30)]),
}


def main(folder: str) -> None:
    """Write every block."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, (function, shape, weights) in BLOCKS.items():
        torch.manual_seed(0)
        exported = torch.export.export(Block(function, weights).eval(), (torch.randn(shape),))
        torch.export.save(exported, Path(folder) / f"{name}.pt2")


if __name__ == "__main__":
    main(*sys.argv[1:])
