"""Other sequence models: recurrent cells, state spaces, convolutions over time, video, audio, mixtures of experts.

In a mixture of experts, which token goes to which expert is drawn once, so that shapes are static: an expert's program
has as many rows as the histogram gives it. Loads are uneven, as a trained router's are.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from cdmpp.errors import InvalidProgramError
from cdmpp.programs.zoo.layers import (
    Built,
    RMSNorm,
    SwiGLU,
    attend,
    check_divides,
    merge_heads,
    modulate,
    rotary_tables,
    rotate,
    split_heads,
)
from cdmpp.programs.zoo.registry import network
from cdmpp.programs.zoo.transformers import PreNormLayer, feed_forward


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
def _recurrent(batch: int = 16, inputs: int = 128, width: int = 256) -> Built:
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
        return torch.log_softmax(self.head(torch.relu(sum(skips, start=skips[0] * 0))), 1)


@network("wavenet")
def _wavenet(batch: int = 1, length: int = 512, width: int = 64, layers: int = 4) -> Built:
    """WaveNet: dilated causal convolutions over ``length`` samples."""
    return _WaveNet(width, layers), (torch.randn(batch, 1, length),)


@network("wav2vec")
def _wav2vec(batch: int = 1, length: int = 4000, width: int = 128) -> Built:
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
def _mamba(batch: int = 4, width: int = 256, state: int = 16, rank: int = 16) -> Built:
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
        return x + self.out(merge_heads(torch.matmul(q, context) * scale))


@network("linear-attention")
def _linear_attention(batch: int = 1, seq: int = 256, width: int = 256, heads: int = 4) -> Built:
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
        return x + self.down(nn.functional.gelu(self.gate(y)) * self.up(y))


@network("t5-decoder")
def _t5(batch: int = 1, seq: int = 32, encoder: int = 96, width: int = 320, heads: int = 5) -> Built:
    """T5's decoder layer on ``seq`` tokens that attend to ``encoder`` encoded ones."""
    check_divides(heads, width, "t5-decoder: heads")
    inputs = torch.randn(batch, seq, width), torch.randn(batch, encoder, width), torch.randn(heads, seq, seq)
    return _CrossBlock(width, heads), inputs


class _Dit3d(nn.Module):
    """Attention over all tokens of all frames, then over the text, then a feed-forward network."""

    def __init__(self, frames: int, side: int, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.modulation = nn.Linear(width, 6 * width)
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.q_norm, self.k_norm = RMSNorm(width // heads), RMSNorm(width // heads)
        self.cross_q, self.cross_kv = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.cross_out, self.mlp = nn.Linear(width, width), feed_forward(width, 4 * width)
        cosine, sine = rotary_tables(frames, side, side, dim=width // heads)
        self.register_buffer("cosine", cosine)
        self.register_buffer("sine", sine)

    def forward(self, x: Tensor, text: Tensor, condition: Tensor) -> Tensor:
        parts = self.modulation(nn.functional.silu(condition))[:, None].chunk(6, -1)
        joint = self.qkv(modulate(self.norm(x), parts[0], parts[1]))
        q, k, v = (split_heads(part, self.heads) for part in joint.chunk(3, -1))
        q = rotate(self.q_norm(q), self.cosine, self.sine)  # type: ignore[arg-type]
        k = rotate(self.k_norm(k), self.cosine, self.sine)  # type: ignore[arg-type]
        x = x + parts[2] * self.out(merge_heads(attend(q, k, v)))
        k, v = (split_heads(part, self.heads) for part in self.cross_kv(text).chunk(2, -1))
        x = x + self.cross_out(merge_heads(attend(split_heads(self.cross_q(x), self.heads), k, v)))
        return x + parts[5] * self.mlp(modulate(self.norm(x), parts[3], parts[4]))


@network("dit-3d")
def _dit_3d(batch: int = 1, frames: int = 4, side: int = 8, text: int = 32, width: int = 384, heads: int = 6) -> Built:
    """Step-Video's DiT block on ``frames`` x ``side`` x ``side`` tokens."""
    check_divides(heads, width, "dit-3d: heads and width")
    tokens = torch.randn(batch, frames * side * side, width)
    return _Dit3d(frames, side, width, heads), (tokens, torch.randn(batch, text, width), torch.randn(batch, width))


class _CausalConv3d(nn.Module):
    """3x3x3 convolution that sees earlier frames only."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv3d(inputs, outputs, 3, stride, (0, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(nn.functional.pad(x, (0, 0, 0, 0, 2, 0)))


class _VaeStage(nn.Module):
    """Residual block, then half the frames and half the side; the shortcut averages."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(8, width), _CausalConv3d(width, width)
        self.norm2, self.conv2 = nn.GroupNorm(8, width), _CausalConv3d(width, width)
        self.down, self.shortcut = _CausalConv3d(width, 2 * width, 2), nn.Conv3d(width, 2 * width, 1)
        self.pool, self.act = nn.AvgPool3d(2, 2), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(self.act(self.norm1(x)))
        x = x + self.conv2(self.act(self.norm2(y)))
        return self.down(x) + self.shortcut(self.pool(x))


@network("vae-3d")
def _vae_3d(batch: int = 1, frames: int = 4, image: int = 32, width: int = 32) -> Built:
    """A stage of Step-Video's VAE: causal conv3d; ``frames`` and ``image`` are even."""
    check_divides(2, frames, "vae-3d: frames")
    check_divides(2, image, "vae-3d: image")
    check_divides(8, width, "vae-3d: groups and width")
    return _VaeStage(width), (torch.randn(batch, width, frames, image, image),)


class _BlockSparse(nn.Module):
    """Each block of queries attends to the key blocks that were chosen for it."""

    def __init__(self, heads: int, blocks: int, kept: int) -> None:
        super().__init__()
        self.heads, self.blocks, self.kept = heads, blocks, kept
        chosen = torch.stack([torch.randperm(blocks)[:kept].sort().values for _ in range(blocks)])
        self.register_buffer("chosen", chosen.flatten())

    def _gather(self, x: Tensor) -> Tensor:
        batch, heads, tokens, dim = x.shape
        blocked = x.reshape(batch, heads, self.blocks, tokens // self.blocks, dim)
        taken = torch.index_select(blocked, 2, self.chosen)  # type: ignore[arg-type]
        return taken.reshape(batch, heads, self.blocks, self.kept * (tokens // self.blocks), dim)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batch, heads, tokens, dim = q.shape
        blocked = q.reshape(batch, heads, self.blocks, tokens // self.blocks, dim)
        return attend(blocked, self._gather(k), self._gather(v)).reshape(batch, heads, tokens, dim)


@network("dsv-attention")
def _dsv(
    batch: int = 1, seq: int = 512, block: int = 64, density: float = 0.25, heads: int = 6, dim: int = 64
) -> Built:
    """DSV's block-sparse attention: each block of queries reads ``density`` of the key blocks."""
    check_divides(block, seq, "dsv-attention: block and seq")
    blocks = seq // block
    qkv = tuple(torch.randn(batch, heads, seq, dim) for _ in range(3))
    return _BlockSparse(heads, blocks, max(1, math.ceil(density * blocks))), qkv


class _AudioEncoder(nn.Module):
    """Two conv1d layers, the second of which halves the frames, then a transformer layer."""

    def __init__(self, mels: int, width: int, heads: int, frames: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(mels, width, 3, 1, 1), nn.Conv1d(width, width, 3, 2, 1)
        self.act, self.positions = nn.GELU(), nn.Parameter(torch.randn(frames // 2, width))
        self.layer, self.norm, self.pool = PreNormLayer(width, heads), nn.LayerNorm(width), nn.AvgPool1d(2, 2)

    def forward(self, mel: Tensor) -> Tensor:
        x = self.act(self.conv2(self.act(self.conv1(mel)))).transpose(1, 2) + self.positions
        x = self.norm(self.layer(x))
        return self.pool(x.transpose(1, 2))


@network("audio-encoder")
def _audio_encoder(batch: int = 1, frames: int = 256, mels: int = 80, width: int = 384, heads: int = 6) -> Built:
    """Step-Audio's encoder: ``frames`` (a multiple of 4) of ``mels`` bands."""
    check_divides(heads, width, "audio-encoder: heads and width")
    check_divides(4, frames, "audio-encoder: frames")
    return _AudioEncoder(mels, width, heads, frames), (torch.randn(batch, mels, frames),)


class _Dilated(nn.Module):
    """HiFi-GAN's residual block: convolutions of growing dilation."""

    def __init__(self, width: int, kernel: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Conv1d(width, width, kernel, dilation=d, padding=d * (kernel // 2)) for d in (1, 3, 5)
        )

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            x = x + conv(nn.functional.leaky_relu(x, 0.1))
        return x


class _Vocoder(nn.Module):
    """HiFi-GAN: transposed convolutions lengthen, residual blocks of several kernels follow each."""

    def __init__(self, mels: int, width: int) -> None:
        super().__init__()
        self.enter = nn.Conv1d(mels, width, 7, padding=3)
        self.ups, self.blocks = nn.ModuleList(), nn.ModuleList()
        for factor in (8, 8, 4):
            self.ups.append(nn.ConvTranspose1d(width, width // 2, 2 * factor, factor, factor // 2))
            width //= 2
            self.blocks += [_Dilated(width, 3), _Dilated(width, 7)]
        self.leave = nn.Conv1d(width, 1, 7, padding=3)

    def forward(self, mel: Tensor) -> Tensor:
        x = self.enter(mel)
        for stage, up in enumerate(self.ups):
            x = up(nn.functional.leaky_relu(x, 0.1))
            x = (self.blocks[2 * stage](x) + self.blocks[2 * stage + 1](x)) * 0.5
        return torch.tanh(self.leave(nn.functional.leaky_relu(x, 0.1)))


@network("vocoder")
def _vocoder(batch: int = 1, frames: int = 32, mels: int = 80, width: int = 128) -> Built:
    """Step-Audio's vocoder: ``frames`` of a spectrogram to 256 times as many samples."""
    check_divides(8, width, "vocoder: width")
    return _Vocoder(mels, width), (torch.randn(batch, mels, frames),)


def route(tokens: int, experts: int, second: float) -> list[list[tuple[int, int]]]:
    """For each expert its ``(token, 0 or 1)``: first choices of all tokens, second ones of a share.

    Expert e is chosen with a weight of 1 / (e + 1)^0.5.
    """
    weights = torch.arange(1.0, experts + 1).rsqrt()
    order = torch.stack([torch.multinomial(weights, min(2, experts)) for _ in range(tokens)]).tolist()
    plan: list[list[tuple[int, int]]] = [[] for _ in range(experts)]
    for token, choices in enumerate(order):
        plan[choices[0]].append((token, 0))
        if token < round(tokens * second):
            plan[choices[1]].append((token, 1))
    return plan


class ExpertLayer(nn.Module):
    """Gather each expert's tokens, run it, and add each token's results, weighted by the router."""

    def __init__(self, tokens: int, width: int, hidden: int, experts: int, second: float, shared: int) -> None:
        super().__init__()
        plan = route(tokens, experts, second)
        self.router = nn.Linear(width, experts, bias=False)
        self.sizes = [len(experts_of_rank) for experts_of_rank in plan]
        self.experts = nn.ModuleList(SwiGLU(width, hidden) for experts_of_rank in plan if experts_of_rank)
        self.shared = SwiGLU(width, shared) if shared else None
        rows = [(token, expert) for expert, experts_of_rank in enumerate(plan) for token, _ in experts_of_rank]
        self.register_buffer("gather", torch.tensor([token for token, _ in rows]))
        self.register_buffer("scores", torch.tensor([token * experts + expert for token, expert in rows]))
        places = {pair: row for row, pair in enumerate(pair for experts_of_rank in plan for pair in experts_of_rank)}
        self.register_buffer("first", torch.tensor([places[token, 0] for token in range(tokens)]))
        # Tokens without a second expert read the row of zeros behind the others.
        seconds = [places.get((token, 1), len(rows)) for token in range(tokens)]
        self.register_buffer("second", torch.tensor(seconds) if second else None)

    def forward(self, x: Tensor) -> Tensor:
        gates = torch.softmax(self.router(x), -1).reshape(-1)
        taken = torch.index_select(x, 0, self.gather)  # type: ignore[arg-type]
        results, start = [], 0
        for size, expert in zip((n for n in self.sizes if n), self.experts, strict=True):
            results.append(expert(taken[start : start + size]))
            start += size
        weight = torch.index_select(gates, 0, self.scores)[:, None]  # type: ignore[arg-type]
        rows = torch.cat(results, 0) * weight
        y = torch.index_select(rows, 0, self.first)  # type: ignore[arg-type]
        if self.second is not None:
            rows = torch.cat((rows, torch.zeros_like(rows[:1])), 0)
            y = y + torch.index_select(rows, 0, self.second)  # type: ignore[arg-type]
        return y if self.shared is None else y + self.shared(x)


def _experts(tokens: int, experts: int, width: int, hidden: int, second: float, shared: int = 0) -> Built:
    if second and experts < 2:
        raise InvalidProgramError("two experts for a token of one", hint="experts is at least 2")
    return ExpertLayer(tokens, width, hidden, experts, second, shared), (torch.randn(tokens, width),)


@network("moe-top1")
def _top1(tokens: int = 128, experts: int = 4, width: int = 512, hidden: int = 1024) -> Built:
    """Experts of which each token takes one."""
    return _experts(tokens, experts, width, hidden, 0.0)


@network("moe-top2")
def _top2(tokens: int = 128, experts: int = 4, width: int = 512, hidden: int = 1024) -> Built:
    """Experts of which each token takes two."""
    return _experts(tokens, experts, width, hidden, 1.0)


@network("moe-adaptive")
def _adaptive(tokens: int = 128, experts: int = 4, width: int = 512, hidden: int = 1024, second: float = 0.3) -> Built:
    """Adaptive gating: a share ``second`` of the tokens takes two experts, the others one."""
    return _experts(tokens, experts, width, hidden, second)


class _Mfa(nn.Module):
    """Multi-matrix factorisation attention: low-rank queries of many heads, one key and value for all."""

    def __init__(self, width: int, heads: int, dim: int, rank: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.rank_norm = RMSNorm(width), RMSNorm(rank)
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, heads * dim, bias=False)
        self.key, self.value = nn.Linear(width, dim, bias=False), nn.Linear(width, dim, bias=False)
        self.out = nn.Linear(heads * dim, width, bias=False)

    def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        y = self.norm(x)
        q = split_heads(self.up(self.rank_norm(self.down(y))), self.heads)
        k, v = torch.cat((keys, self.key(y)), 1), torch.cat((values, self.value(y)), 1)
        return x + self.out(merge_heads(attend(q, k[:, None], v[:, None])))


@network("step3-attention")
def _step3_attention(batch: int = 4, past: int = 128, width: int = 1024, heads: int = 16, dim: int = 64) -> Built:
    """Step-3's attention (MFA) on one new token after ``past`` cached ones; runs on devices of its own."""
    check_divides(4, width, "step3-attention: rank and width")
    cache = [torch.randn(batch, past, dim) for _ in "kv"]
    return _Mfa(width, heads, dim, width // 4), (torch.randn(batch, 1, width), *cache)


@network("step3-ffn")
def _step3_ffn(tokens: int = 64, experts: int = 8, width: int = 1024, hidden: int = 512) -> Built:
    """Step-3's feed-forward half: a shared expert and routed ones, two for each token."""
    return _experts(tokens, experts, width, hidden, 1.0, shared=hidden)
