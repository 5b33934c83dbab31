"""Operators alone, in layouts that networks rarely show: transposed, strided, permuted, of odd sizes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cdmpp.programs.zoo.registry import network


class _Products(nn.Module):
    """Matrix products of every orientation, an outer and an inner product, sums of three tensors."""

    def forward(self, a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        left = torch.matmul(a.transpose(0, 1), b)  # [k, m]^T [k, n]
        right = torch.matmul(left, c.transpose(0, 1))  # [m, n] [p, n]^T
        both = torch.matmul(b.transpose(0, 1), right.transpose(0, 1)[: b.shape[0]].contiguous())
        gram = torch.matmul(left, left.transpose(0, 1)) * 0.5 + 1.0
        outer = a[0][:, None] * b[0][None, :] + left
        inner = (left * outer).sum(1)
        bilinear = torch.relu(torch.matmul(c, left.transpose(0, 1)) - inner[None, :])
        return both, gram, bilinear, inner


@network("products")
def _products(m: int = 96, n: int = 80, k: int = 72) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Products of transposed matrices: sizes ``m``, ``n``, ``k``."""
    return _Products(), (torch.randn(k, m), torch.randn(k, n), torch.randn(k, n))


class _Reductions(nn.Module):
    """Sums, means, extremes and norms along each axis of a tensor."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        inner = x.mean(2), (x * x).sum(2).sqrt()
        middle = x.sum(1), (x - x.mean(1, keepdim=True)).abs().mean(1)
        outer = x.sum(0), x.var(0), torch.exp(x).sum(0).log()
        whole = x.mean((0, 2)), (x**2).mean((1, 2)), x.sum()
        scaled = x / (x.norm(dim=2, keepdim=True) + 1e-6), torch.softmax(x, 1), x / x.sum(0)
        return (*inner, *middle, *outer, *whole, *scaled)


@network("reductions")
def _reductions(a: int = 24, b: int = 60, c: int = 100) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Reductions of an ``a`` x ``b`` x ``c`` tensor along its axes."""
    return _Reductions(), (torch.randn(a, b, c),)


class _Layouts(nn.Module):
    """Transposes, strided slices, paddings, concatenations and gathers."""

    def forward(self, x: Tensor, index: Tensor) -> tuple[Tensor, ...]:
        swapped = x.permute(0, 2, 1) * 1.5
        turned = x.permute(2, 1, 0) + 1.0
        strided = x[:, ::2, 1::3] - 0.5
        mixed = torch.cat((x, x.flip(1)), 2) * 0.1
        padded = nn.functional.pad(x, (2, 3, 1, 0)) * 2.0
        gathered = torch.index_select(x, 1, index) + 3.0
        repeated = x[:, :, :1] * x[:, :1, :]
        rolled = torch.cat((x[..., 5:], x[..., :5]), 2) - x
        blocks = x.reshape(x.shape[0], x.shape[1] // 2, 2, x.shape[2]).transpose(1, 2) * 0.3
        return swapped, turned, strided, mixed, padded, gathered, repeated, rolled, blocks


@network("layouts")
def _layouts(a: int = 8, b: int = 64, c: int = 90) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Copies of an ``a`` x ``b`` x ``c`` tensor into other layouts; ``b`` is even."""
    return _Layouts(), (torch.randn(a, b, c), torch.arange(b).flip(0))


class _Elementwise(nn.Module):
    """Chains of elementwise operators between reductions, which fusion cannot join."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(columns)), nn.Parameter(torch.randn(columns))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        a = torch.tanh(x * self.weight + self.bias)
        b = nn.functional.mish(x) * torch.sigmoid(y)
        c = torch.where(x > y, torch.log1p(x.abs()), torch.rsqrt(y * y + 1.0))
        d = nn.functional.hardsigmoid(x) + nn.functional.softplus(y)
        e = torch.erf(x) * torch.exp(-y.abs())
        f = (x.clamp(-1, 1) / (y.abs() + 0.5)).floor()
        g = torch.sin(x) * torch.cos(y) + torch.maximum(x, y) ** 3
        h = (x > 0).float() * y
        return a, b, c, d, e, f, g, h


@network("elementwise")
def _elementwise(rows: int = 100, columns: int = 300) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Elementwise operators on two ``rows`` x ``columns`` tensors."""
    return _Elementwise(columns), (torch.randn(rows, columns), torch.randn(rows, columns))


class _Filters(nn.Module):
    """Convolutions and pools of unusual strides, kernels and groups, and their transposed forms."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.tall, self.wide = nn.Conv2d(width, width, (5, 1), padding=(2, 0)), nn.Conv2d(width, width, (1, 7), 2)
        self.dilated = nn.Conv2d(width, width // 2, 3, padding=3, dilation=3)
        self.depthwise = nn.Conv2d(width, 2 * width, 3, 3, groups=width)
        self.back = nn.ConvTranspose2d(width, width // 2, 3, 2, 1)
        self.one = nn.Conv2d(width, 4 * width, 1, 2, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        pooled = nn.functional.avg_pool2d(x, 3, 2), nn.functional.max_pool2d(x, 5, 1, 2)
        return (self.tall(x), self.wide(x), self.dilated(x), self.depthwise(x), self.back(x), self.one(x), *pooled)


@network("filters")
def _filters(batch: int = 1, width: int = 32, image: int = 28) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Single convolutions and pools on ``width`` channels; ``width`` is even."""
    return _Filters(width), (torch.randn(batch, width, image, image),)
