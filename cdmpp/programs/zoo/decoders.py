"""Transformer decoders: GPT-2 and LLaMA blocks in prefill and decode, the step of NextStep-1."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cdmpp.programs.zoo.layers import (
    RMSNorm,
    SwiGLU,
    attend,
    causal_mask,
    check_divides,
    merge_heads,
    modulate,
    rotary_tables,
    rotate,
    split_heads,
    time_embedding,
)
from cdmpp.programs.zoo.registry import network
from cdmpp.programs.zoo.transformers import feed_forward


class _Gpt2(nn.Module):
    """GPT-2's block: one product for query, key and value; keys and values of earlier tokens in front."""

    def __init__(self, width: int, heads: int, queries: int, past: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = feed_forward(width, 4 * width)
        self.register_buffer("mask", causal_mask(queries, past + queries))

    def forward(self, x: Tensor, keys: Tensor | None = None, values: Tensor | None = None) -> Tensor:
        q, k, v = (split_heads(part, self.heads) for part in self.qkv(self.norm(x)).chunk(3, -1))
        if keys is not None and values is not None:
            k, v = torch.cat((keys, k), 2), torch.cat((values, v), 2)
        # A single query is the last token: it sees all keys, and the mask would be all zero.
        mask: Tensor | None = self.mask if x.shape[1] > 1 else None  # type: ignore[assignment]
        x = x + self.out(merge_heads(attend(q, k, v, mask)))
        y: Tensor = x + self.mlp(self.mlp_norm(x))
        return y


@network("gpt2-prefill")
def _gpt2_prefill(
    batch: int = 1, seq: int = 128, width: int = 768, heads: int = 12
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """GPT-2's block on a prompt."""
    check_divides(heads, width, "gpt2-prefill: heads and width")
    return _Gpt2(width, heads, seq, 0), (torch.randn(batch, seq, width),)


@network("gpt2-decode")
def _gpt2_decode(
    batch: int = 1, past: int = 128, width: int = 768, heads: int = 12
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """GPT-2's block on one new token after ``past`` cached ones."""
    check_divides(heads, width, "gpt2-decode: heads and width")
    cache = [torch.randn(batch, heads, past, width // heads) for _ in "kv"]
    return _Gpt2(width, heads, 1, past), (torch.randn(batch, 1, width), *cache)


class LlamaBlock(nn.Module):
    """RMS normalisation, rotary embedding, grouped-query attention, gated feed-forward network."""

    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int, queries: int, past: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = heads, kv_heads, width // heads
        self.norm, self.mlp_norm = RMSNorm(width), RMSNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, kv_heads * self.dim, bias=False)
        self.value = nn.Linear(width, kv_heads * self.dim, bias=False)
        self.out, self.mlp = nn.Linear(width, width, bias=False), SwiGLU(width, hidden)
        cosine, sine = rotary_tables(past + queries, dim=self.dim)
        self.register_buffer("cosine", cosine[past:].clone())
        self.register_buffer("sine", sine[past:].clone())
        self.register_buffer("mask", causal_mask(queries, past + queries))

    def forward(self, x: Tensor, keys: Tensor | None = None, values: Tensor | None = None) -> Tensor:
        batch, queries, _ = x.shape
        y = self.norm(x)
        q = rotate(split_heads(self.query(y), self.heads), self.cosine, self.sine)  # type: ignore[arg-type]
        k = rotate(split_heads(self.key(y), self.kv_heads), self.cosine, self.sine)  # type: ignore[arg-type]
        v = split_heads(self.value(y), self.kv_heads)
        if keys is not None and values is not None:
            k, v = torch.cat((keys, k), 2), torch.cat((values, v), 2)
        # The heads of a group read the same keys: a dimension of its own, without copies of the keys.
        q = q.reshape(batch, self.kv_heads, self.heads // self.kv_heads, queries, self.dim)
        mask: Tensor | None = self.mask if queries > 1 else None  # type: ignore[assignment]
        attended = attend(q, k[:, :, None], v[:, :, None], mask)
        x = x + self.out(merge_heads(attended.reshape(batch, self.heads, queries, self.dim)))
        z: Tensor = x + self.mlp(self.mlp_norm(x))
        return z


@network("llama-block")
def _llama_block(
    batch: int = 1, seq: int = 64, width: int = 1024, heads: int = 16, kv_heads: int = 4
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A LLaMA-style block on a prompt."""
    check_divides(heads, width, "llama-block: heads and width")
    check_divides(kv_heads, heads, "llama-block: kv_heads and heads")
    return LlamaBlock(width, heads, kv_heads, 11 * width // 4, seq, 0), (torch.randn(batch, seq, width),)


@network("llama-decode")
def _llama_decode(
    batch: int = 1, past: int = 128, width: int = 1024, heads: int = 16, kv_heads: int = 4
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A LLaMA-style block on one new token after ``past`` cached ones."""
    check_divides(heads, width, "llama-decode: heads and width")
    check_divides(kv_heads, heads, "llama-decode: kv_heads and heads")
    block = LlamaBlock(width, heads, kv_heads, 11 * width // 4, 1, past)
    cache = [torch.randn(batch, kv_heads, past, width // heads) for _ in "kv"]
    return block, (torch.randn(batch, 1, width), *cache)


class _FlowBlock(nn.Module):
    """Residual layer of the flow-matching head, modulated by time and context."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.modulation = nn.Linear(width, 3 * width)
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale, gate = self.modulation(condition).chunk(3, -1)
        y: Tensor = x + gate * self.mlp(modulate(self.norm(x), shift, scale))
        return y


class _NextStep(nn.Module):
    """One image token: a decoder block on the cache, then Euler steps of the flow-matching head."""

    def __init__(self, width: int, heads: int, past: int, steps: int, patch: int, head: int) -> None:
        super().__init__()
        self.steps = steps
        self.block, self.norm = LlamaBlock(width, heads, heads // 4, 11 * width // 4, 1, past), RMSNorm(width)
        self.enter, self.leave = nn.Linear(patch, head), nn.Linear(head, patch)
        self.context, self.time = nn.Linear(width, head), nn.Linear(head, head)
        self.layers = nn.ModuleList(_FlowBlock(head) for _ in range(2))

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, noise: Tensor, times: Tensor) -> Tensor:
        context = self.context(self.norm(self.block(x, keys, values))[:, 0])
        for step in range(self.steps):
            condition = nn.functional.silu(context + self.time(times[step : step + 1]))
            y = self.enter(noise)
            for layer in self.layers:
                y = layer(y, condition)
            noise = noise + self.leave(y) * (1 / self.steps)
        return noise


@network("nextstep")
def _nextstep(
    batch: int = 1, past: int = 128, width: int = 1024, heads: int = 16, steps: int = 2
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """NextStep-1's autoregressive step: a decoder block, and ``steps`` of its flow-matching MLP head."""
    check_divides(heads, width, "nextstep: heads and width")
    check_divides(4, heads, "nextstep: query heads for each key head, and heads")
    head, patch = 512, 64
    cache = [torch.randn(batch, heads // 4, past, width // heads) for _ in "kv"]
    module = _NextStep(width, heads, past, steps, patch, head)
    inputs = (torch.randn(batch, 1, width), *cache, torch.randn(batch, patch), time_embedding(steps, head))
    return module, inputs
