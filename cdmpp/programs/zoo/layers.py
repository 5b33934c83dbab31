"""Layers that several networks share."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from cdmpp.errors import InvalidProgramError

#: What the builder of a network returns: the module and its inputs.
Built = tuple[nn.Module, tuple[Tensor, ...]]


class ConvNorm(nn.Module):
    """Convolution, batch normalisation and activation: one fused program."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int | tuple[int, int],
        stride: int = 1,
        groups: int = 1,
        act: type[nn.Module] | None = nn.ReLU,
    ) -> None:
        super().__init__()
        sides = (kernel, kernel) if isinstance(kernel, int) else kernel
        padding = (sides[0] // 2, sides[1] // 2)
        self.conv = nn.Conv2d(inputs, outputs, sides, stride, padding, groups=groups, bias=False)
        self.norm = nn.BatchNorm2d(outputs)
        # Fresh statistics are 0 and 1, with which folding the normalisation could not go wrong visibly.
        nn.init.uniform_(self.norm.running_mean, -0.1, 0.1)  # type: ignore[arg-type]
        nn.init.uniform_(self.norm.running_var, 0.5, 1.5)  # type: ignore[arg-type]
        self.act = act() if act else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(self.conv(x)))


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[batch, tokens, width] -> [batch, heads, tokens, width / heads]."""
    batch, tokens, width = x.shape
    return x.reshape(batch, tokens, heads, width // heads).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """[batch, heads, tokens, dim] -> [batch, tokens, heads * dim]."""
    batch, heads, tokens, dim = x.shape
    return x.transpose(1, 2).reshape(batch, tokens, heads * dim)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attention written out: two matrix products and a softmax.

    ``q`` is [..., queries, dim], ``k`` and ``v`` are [..., keys, dim]; ``mask`` is added to the scores. Not
    ``scaled_dot_product_attention``: torch would decompose it into a program that no compiler starts from.
    """
    scores = torch.matmul(q, k.transpose(-1, -2)) * (1 / math.sqrt(q.shape[-1]))
    if mask is not None:
        scores = scores + mask
    return torch.matmul(torch.softmax(scores, -1), v)


def causal_mask(queries: int, keys: int) -> Tensor:
    """[queries, keys]: 0 where a query may look, -1e9 at later keys; the last query sees all keys."""
    ahead = torch.arange(keys)[None, :] > torch.arange(queries)[:, None] + (keys - queries)
    return ahead.float() * -1e9


def image_input(batch: int, image: int, channels: int = 3) -> tuple[Tensor, ...]:
    """One random batch of square images."""
    return (torch.randn(batch, channels, image, image),)


class RMSNorm(nn.Module):
    """Division by the root mean square, times a weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width).uniform_(0.5, 1.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * self.weight


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Adaptive normalisation of a diffusion transformer: the condition scales and shifts."""
    return x * (1 + scale) + shift


def time_embedding(batch: int, width: int) -> Tensor:
    """[batch, width]: sinusoidal embedding of random diffusion times."""
    rates = torch.exp(torch.arange(width // 2) * (-math.log(10000.0) / (width // 2)))
    angles = torch.rand(batch, 1) * 1000 * rates
    return torch.cat((angles.cos(), angles.sin()), -1)


def rotary_tables(*extents: int, dim: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines, [positions, dim]: rotary embedding of a grid of positions.

    Each axis of the grid turns its share of the ``dim / 2`` pairs, as equal as they can be.
    """
    grids = torch.meshgrid(*(torch.arange(float(extent)) for extent in extents), indexing="ij")
    pairs = [dim // 2 // len(extents) + (axis < dim // 2 % len(extents)) for axis in range(len(extents))]
    angles = torch.cat(
        [
            grid.reshape(-1, 1) * torch.exp(torch.arange(n) * (-math.log(10000.0) / n))
            for grid, n in zip(grids, pairs, strict=True)
        ],
        -1,
    )
    angles = torch.cat((angles, angles), -1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary embedding of [..., positions, dim]."""
    half = x.shape[-1] // 2
    return x * cosine + torch.cat((-x[..., half:], x[..., :half]), -1) * sine


class SwiGLU(nn.Module):
    """Gated feed-forward network without biases."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def check_divides(divisor: int, value: int, what: str) -> None:
    """An error that a user understands, where torch would complain of shapes."""
    if value % divisor:
        raise InvalidProgramError(f"{what}: {divisor} does not divide {value}", hint="choose another size")
