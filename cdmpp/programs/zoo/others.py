"""Networks on tables, graphs, points and rays, and operators alone in layouts that networks rarely show."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from cdmpp.programs.zoo.layers import Built
from cdmpp.programs.zoo.registry import network


def _mlp(*widths: int, act: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), act()]
    return nn.Sequential(*layers[:-1])


class _Recommender(nn.Module):
    """DLRM with the second-order term of a factorisation machine."""

    def __init__(self, fields: int, rows: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, width)
        self.bottom, self.top = _mlp(13, 64, width), _mlp(fields * fields + 2 * width, 128, 64, 1)

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        x, embedded = self.bottom(dense), self.table(sparse)
        pairs = torch.matmul(embedded, embedded.transpose(1, 2)).flatten(1)
        second = 0.5 * (embedded.sum(1) ** 2 - (embedded**2).sum(1))
        return torch.sigmoid(self.top(torch.cat((x, second, pairs), 1)))


@network("recommender")
def _recommender(batch: int = 64, fields: int = 26, rows: int = 2000, width: int = 32) -> Built:
    """DLRM: embeddings of ``fields`` features, their interactions, two small networks."""
    inputs = torch.randn(batch, 13), torch.randint(0, rows, (batch, fields))
    return _Recommender(fields, rows, width), inputs


class _Graph(nn.Module):
    """A layer of graph convolution and one of graph attention, on a dense adjacency matrix."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(inputs, width), nn.Linear(width, width, bias=False)
        self.left, self.right = nn.Linear(width, 1), nn.Linear(width, 1)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        degree = adjacency.sum(1, keepdim=True)
        x = torch.relu(torch.matmul(adjacency, self.first(x)) / degree)
        y = self.second(x)
        scores = nn.functional.leaky_relu(self.left(y) + self.right(y).transpose(0, 1), 0.2)
        scores = torch.where(adjacency > 0.5, scores, torch.full_like(scores, -1e9))
        return torch.log_softmax(torch.matmul(torch.softmax(scores, 1), y), 1)


@network("graph")
def _graph(nodes: int = 200, inputs: int = 100, width: int = 48) -> Built:
    """Graph convolution and graph attention over ``nodes`` nodes."""
    return _Graph(inputs, width), (torch.randn(nodes, inputs), torch.rand(nodes, nodes))


class _Points(nn.Module):
    """PointNet: one network for every point, the maximum over points, a classifier."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.local = nn.Sequential(
            nn.Conv1d(3, width, 1), nn.BatchNorm1d(width), nn.ReLU(), nn.Conv1d(width, 2 * width, 1), nn.ReLU()
        )
        self.wide = nn.Conv1d(4 * width, 3 * width, 1)
        self.head = _mlp(3 * width, width, classes)

    def forward(self, x: Tensor) -> Tensor:
        y = self.local(x)
        together = nn.functional.max_pool1d(y, y.shape[2]).expand(-1, -1, y.shape[2])
        y = torch.relu(self.wide(torch.cat((y, together), 1)))
        return self.head(y.mean(2))


@network("points")
def _points(batch: int = 2, points: int = 500, width: int = 64, classes: int = 40) -> Built:
    """PointNet on clouds of ``points`` points."""
    return _Points(width, classes), (torch.randn(batch, 3, points),)


class _Rays(nn.Module):
    """NeRF: positions as sines and cosines, a network for density and colour, blending along rays."""

    def __init__(self, samples: int, octaves: int, width: int) -> None:
        super().__init__()
        self.octaves = octaves
        self.earlier = nn.Parameter(torch.ones(samples, samples).triu(1))
        self.body = _mlp(6 * octaves, width, width, 4, act=nn.Softplus)

    def forward(self, positions: Tensor) -> Tensor:
        scaled = torch.cat([positions * float(1 << i) for i in range(self.octaves)], -1)
        out = self.body(torch.cat((torch.sin(scaled), torch.cos(scaled)), -1))
        density, colour = torch.relu(out[..., 3]), torch.sigmoid(out[..., :3])
        through = torch.exp(-torch.matmul(density, self.earlier))
        weights = through * (1 - torch.exp(-density))
        return (weights[..., None] * colour).sum(1)


@network("rays")
def _rays(rays: int = 64, samples: int = 32, octaves: int = 6, width: int = 96) -> Built:
    """NeRF: ``samples`` points on each of ``rays`` rays."""
    return _Rays(samples, octaves, width), (torch.randn(rays, samples, 3),)


class _Agent(nn.Module):
    """Actor and critic of a reinforcement learner, with the log-probability of an action and the advantage."""

    def __init__(self, inputs: int, width: int, actions: int) -> None:
        super().__init__()
        self.body = _mlp(inputs, width, width, act=nn.Tanh)
        self.mean, self.value = nn.Linear(width, actions), nn.Linear(width, 1)
        self.log_scale = nn.Parameter(torch.zeros(actions))

    def forward(self, seen: Tensor, action: Tensor, rewards: Tensor) -> tuple[Tensor, Tensor]:
        y = self.body(seen)
        error = (action - self.mean(y)) * torch.exp(-self.log_scale)
        log_probability = (-0.5 * error**2 - self.log_scale - 0.918938533).sum(-1)
        advantage = rewards - self.value(y)[:, 0]
        advantage = (advantage - advantage.mean()) / (advantage.std(correction=0) + 1e-8)
        ratio = torch.exp(log_probability - log_probability.mean())
        return torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage), advantage


@network("agent")
def _agent(batch: int = 256, inputs: int = 60, width: int = 128, actions: int = 8) -> Built:
    """PPO's forward pass: a policy, a value, the clipped objective of ``batch`` steps."""
    given = torch.randn(batch, inputs), torch.randn(batch, actions), torch.randn(batch)
    return _Agent(inputs, width, actions), given


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
def _products(m: int = 96, n: int = 80, k: int = 72) -> Built:
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
def _reductions(a: int = 24, b: int = 60, c: int = 100) -> Built:
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
def _layouts(a: int = 8, b: int = 64, c: int = 90) -> Built:
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
def _elementwise(rows: int = 100, columns: int = 300) -> Built:
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
def _filters(batch: int = 1, width: int = 32, image: int = 28) -> Built:
    """Single convolutions and pools on ``width`` channels; ``width`` is even."""
    return _Filters(width), (torch.randn(batch, width, image, image),)
