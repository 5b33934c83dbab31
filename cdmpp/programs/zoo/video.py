"""Blocks of video models: Step-Video's DiT block and VAE stage, DSV's block-sparse attention."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from cdmpp.programs.zoo.layers import (
    RMSNorm,
    attend,
    check_divides,
    merge_heads,
    modulate,
    rotary_tables,
    rotate,
    split_heads,
)
from cdmpp.programs.zoo.registry import network
from cdmpp.programs.zoo.transformers import feed_forward


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
        y: Tensor = x + parts[5] * self.mlp(modulate(self.norm(x), parts[3], parts[4]))
        return y


@network("dit-3d")
def _dit_3d(
    batch: int = 1, frames: int = 4, side: int = 8, text: int = 32, width: int = 384, heads: int = 6
) -> tuple[nn.Module, tuple[Tensor, ...]]:
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
        y: Tensor = self.conv(nn.functional.pad(x, (0, 0, 0, 0, 2, 0)))
        return y


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
        z: Tensor = self.down(x) + self.shortcut(self.pool(x))
        return z


@network("vae-3d")
def _vae_3d(batch: int = 1, frames: int = 4, image: int = 32, width: int = 32) -> tuple[nn.Module, tuple[Tensor, ...]]:
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
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """DSV's block-sparse attention: each block of queries reads ``density`` of the key blocks."""
    check_divides(block, seq, "dsv-attention: block and seq")
    blocks = seq // block
    qkv = tuple(torch.randn(batch, heads, seq, dim) for _ in range(3))
    return _BlockSparse(heads, blocks, max(1, math.ceil(density * blocks))), qkv
