"""Sequence models beside decoders: recurrent cells, state spaces, convolutions over time, cross-attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cdmpp.programs.zoo.layers import RMSNorm, attend, check_divides, merge_heads, split_heads
from cdmpp.programs.zoo.registry import network


class _Recurrent(nn.Module):
    """Two LSTM steps and a GRU step, their gates written out."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.x, self.h = nn.Linear(inputs, 4 * width), nn.Linear(width, 4 * width, bias=False)
        self.gru_x, self.gru_h = nn.Linear(width, 3 * width), nn.Linear(width, 3 * width)

    def forward(self, steps: Tensor, h: Tensor, c: Tensor) -> Tensor:
        for step in range(steps.shape[0]):
            i, f, g, o = (self.x(steps[step]) + self.h(h)).chunk(4, -1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
        (r, z, n), (hr, hz, hn) = self.gru_x(h).chunk(3, -1), self.gru_h(c).chunk(3, -1)
        update = torch.sigmoid(z + hz)
        return (1 - update) * torch.tanh(n + torch.sigmoid(r + hr) * hn) + update * h


@network("recurrent")
def _recurrent(batch: int = 16, inputs: int = 128, width: int = 256) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Steps of an LSTM and of a GRU on ``batch`` sequences."""
    state = torch.randn(batch, width)
    return _Recurrent(inputs, width), (torch.randn(2, batch, inputs), state, state.clone())


class _WaveNet(nn.Module):
    """Gated dilated causal convolutions with residual and skip outputs."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.stem = nn.Conv1d(1, width, 1)
        self.gates = nn.ModuleList(nn.Conv1d(width, 2 * width, 2, dilation=1 << i) for i in range(layers))
        self.out = nn.ModuleList(nn.Conv1d(width, 2 * width, 1) for _ in range(layers))
        self.head = nn.Conv1d(width, 256, 1)

    def forward(self, x: Tensor) -> Tensor:
        x, skips = self.stem(x), []
        for i, (gate, out) in enumerate(zip(self.gates, self.out, strict=True)):
            a, b = gate(nn.functional.pad(x, (1 << i, 0))).chunk(2, 1)
            residual, skip = out(torch.tanh(a) * torch.sigmoid(b)).chunk(2, 1)
            x = x + residual
            skips.append(skip)
        y: Tensor = torch.log_softmax(self.head(torch.relu(sum(skips, start=skips[0] * 0))), 1)
        return y


@network("wavenet")
def _wavenet(
    batch: int = 1, length: int = 512, width: int = 64, layers: int = 4
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """WaveNet: dilated causal convolutions over ``length`` samples."""
    return _WaveNet(width, layers), (torch.randn(batch, 1, length),)


@network("wav2vec")
def _wav2vec(batch: int = 1, length: int = 4000, width: int = 128) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The convolutions of wav2vec 2.0: strided over raw samples, group normalisation, GELU."""
    body: list[nn.Module] = [nn.Conv1d(1, width, 10, 5, bias=False), nn.GroupNorm(8, width), nn.GELU()]
    for kernel in (3, 3, 2):
        body += [nn.Conv1d(width, width, kernel, 2), nn.GELU()]
    body += [nn.Conv1d(width, width, 9, padding=4, groups=8), nn.BatchNorm1d(width), nn.ELU()]
    return nn.Sequential(*body), (torch.randn(batch, 1, length),)


class _StateSpace(nn.Module):
    """Mamba's block for one token: input projection, convolution window, selective state update, gate."""

    def __init__(self, width: int, state: int, rank: int) -> None:
        super().__init__()
        self.width, self.state, self.rank = width, state, rank
        self.norm, self.into = RMSNorm(width), nn.Linear(width, 4 * width, bias=False)
        self.taps = nn.Parameter(torch.randn(2 * width, 4))
        self.select = nn.Linear(2 * width, rank + 2 * state, bias=False)
        self.step = nn.Linear(rank, 2 * width)
        self.decay = nn.Parameter(torch.rand(2 * width, state))
        self.skip = nn.Parameter(torch.randn(2 * width))
        self.out = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor, window: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        y, gate = self.into(self.norm(x)).chunk(2, -1)
        window = torch.cat((window[..., 1:], y[..., None]), -1)
        y = nn.functional.silu((window * self.taps).sum(-1))
        step, b, c = self.select(y).split((self.rank, self.state, self.state), -1)
        step = nn.functional.softplus(self.step(step))
        decay = torch.exp(step[..., None] * -torch.exp(self.decay))
        state = decay * state + step[..., None] * b[:, None] * y[..., None]
        y = (state * c[:, None]).sum(-1) + self.skip * y
        return x + self.out(y * nn.functional.silu(gate)), state


@network("mamba")
def _mamba(batch: int = 4, width: int = 256, state: int = 16, rank: int = 16) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Mamba's selective state space, one token of ``batch`` sequences."""
    inputs = torch.randn(batch, width), torch.randn(batch, 2 * width, 4), torch.randn(batch, 2 * width, state)
    return _StateSpace(width, state, rank), inputs


class _LinearAttention(nn.Module):
    """Attention without a softmax over keys: keys and values are contracted first."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.mix = nn.Parameter(torch.rand(width))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        before = torch.cat((x[:, :1] * 0, x[:, :-1]), 1)
        mixed = x * self.mix + before * (1 - self.mix)  # RWKV's shift by a token
        q, k, v = (split_heads(part(mixed), self.heads) for part in (self.q, self.k, self.v))
        q, k = nn.functional.elu(q) + 1, nn.functional.elu(k) + 1
        context = torch.matmul(k.transpose(-1, -2), v)
        scale = 1 / (torch.matmul(q, k.sum(-2)[..., None]) + 1e-6)
        y: Tensor = x + self.out(merge_heads(torch.matmul(q, context) * scale))
        return y


@network("linear-attention")
def _linear_attention(
    batch: int = 1, seq: int = 256, width: int = 256, heads: int = 4
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A block with linear attention and a shift by one token."""
    check_divides(heads, width, "linear-attention: heads")
    return _LinearAttention(width, heads), (torch.randn(batch, seq, width),)


class _CrossBlock(nn.Module):
    """T5's decoder layer: attention to itself with a relative bias, attention to the encoder, gated GELU."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2, self.norm3 = RMSNorm(width), RMSNorm(width), RMSNorm(width)
        self.qkv, self.out1 = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.q, self.kv = nn.Linear(width, width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.out2 = nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor, encoded: Tensor, bias: Tensor) -> Tensor:
        q, k, v = (split_heads(part, self.heads) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out1(merge_heads(attend(q, k, v, bias)))
        k, v = (split_heads(part, self.heads) for part in self.kv(encoded).chunk(2, -1))
        x = x + self.out2(merge_heads(attend(split_heads(self.q(self.norm2(x)), self.heads), k, v)))
        y = self.norm3(x)
        z: Tensor = x + self.down(nn.functional.gelu(self.gate(y)) * self.up(y))
        return z


@network("t5-decoder")
def _t5(
    batch: int = 1, seq: int = 32, encoder: int = 96, width: int = 320, heads: int = 5
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """T5's decoder layer on ``seq`` tokens that attend to ``encoder`` encoded ones."""
    check_divides(heads, width, "t5-decoder: heads")
    inputs = torch.randn(batch, seq, width), torch.randn(batch, encoder, width), torch.randn(heads, seq, seq)
    return _CrossBlock(width, heads), inputs
