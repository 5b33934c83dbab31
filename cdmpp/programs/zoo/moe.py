"""Mixtures of experts under a routing histogram, and Step-3's attention and experts apart.

Which token goes to which expert is drawn once, so that shapes are static: an expert's program has as many
rows as the histogram gives it. Loads are uneven, as a trained router's are.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cdmpp.errors import InvalidProgramError
from cdmpp.programs.zoo.layers import RMSNorm, SwiGLU, attend, check_divides, merge_heads, split_heads
from cdmpp.programs.zoo.registry import network


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


class Experts(nn.Module):
    """Gather each expert's tokens, run it, and add each token's results, weighted by the router."""

    def __init__(self, tokens: int, width: int, hidden: int, experts: int, second: float, shared: int) -> None:
        super().__init__()
        plan = route(tokens, experts, second)
        self.router = nn.Linear(width, experts, bias=False)
        self.sizes = [len(own) for own in plan]
        self.experts = nn.ModuleList(SwiGLU(width, hidden) for own in plan if own)
        self.shared = SwiGLU(width, shared) if shared else None
        rows = [(token, expert) for expert, own in enumerate(plan) for token, _ in own]
        self.register_buffer("gather", torch.tensor([token for token, _ in rows]))
        self.register_buffer("scores", torch.tensor([token * experts + expert for token, expert in rows]))
        places = {pair: row for row, pair in enumerate(pair for own in plan for pair in own)}
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


def _experts(
    tokens: int, experts: int, width: int, hidden: int, second: float, shared: int = 0
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    if second and experts < 2:
        raise InvalidProgramError("two experts for a token of one", hint="experts is at least 2")
    return Experts(tokens, width, hidden, experts, second, shared), (torch.randn(tokens, width),)


@network("moe-top1")
def _top1(
    tokens: int = 128, experts: int = 4, width: int = 512, hidden: int = 1024
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Experts of which each token takes one."""
    return _experts(tokens, experts, width, hidden, 0.0)


@network("moe-top2")
def _top2(
    tokens: int = 128, experts: int = 4, width: int = 512, hidden: int = 1024
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Experts of which each token takes two."""
    return _experts(tokens, experts, width, hidden, 1.0)


@network("moe-adaptive")
def _adaptive(
    tokens: int = 128, experts: int = 4, width: int = 512, hidden: int = 1024, second: float = 0.3
) -> tuple[nn.Module, tuple[Tensor, ...]]:
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
        z: Tensor = x + self.out(merge_heads(attend(q, k[:, None], v[:, None])))
        return z


@network("step3-attention")
def _step3_attention(
    batch: int = 4, past: int = 128, width: int = 1024, heads: int = 16, dim: int = 64
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Step-3's attention (MFA) on one new token after ``past`` cached ones; runs on devices of its own."""
    check_divides(4, width, "step3-attention: rank and width")
    cache = [torch.randn(batch, past, dim) for _ in "kv"]
    return _Mfa(width, heads, dim, width // 4), (torch.randn(batch, 1, width), *cache)


@network("step3-ffn")
def _step3_ffn(
    tokens: int = 64, experts: int = 8, width: int = 1024, hidden: int = 512
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Step-3's feed-forward half: a shared expert and routed ones, two for each token."""
    return _experts(tokens, experts, width, hidden, 1.0, shared=hidden)
