"""Transformer encoders (BERT, ViT), decoders in prefill and decode, and batches of unequal lengths.

The decoders are blocks of GPT-2, LLaMA and NextStep-1. A batch of unequal lengths is padded to the longest, or packed
(ByteTransformer).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cdmpp.programs.zoo.layers import (
    Built,
    RMSNorm,
    SwiGLU,
    attend,
    causal_mask,
    check_divides,
    image_input,
    merge_heads,
    modulate,
    rotary_tables,
    rotate,
    split_heads,
    time_embedding,
)
from cdmpp.programs.zoo.registry import network


class SelfAttention(nn.Module):
    """Multi-head self-attention, optionally under an additive mask."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (split_heads(part(x), self.heads) for part in (self.query, self.key, self.value))
        return self.out(merge_heads(attend(q, k, v, mask)))


def feed_forward(width: int, hidden: int) -> nn.Sequential:
    """Two linear layers with GELU between."""
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


class BertLayer(nn.Module):
    """BERT's layer: attention and feed-forward network, each added and normalised after."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention, self.norm = SelfAttention(width, heads), nn.LayerNorm(width)
        self.mlp, self.mlp_norm = feed_forward(width, 4 * width), nn.LayerNorm(width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.norm(x + self.attention(x, mask))
        return self.mlp_norm(x + self.mlp(x))


class PreNormLayer(BertLayer):
    """GPT-2's and ViT's layer: BERT's parts, normalised first, then added."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.norm(x), mask)
        return x + self.mlp(self.mlp_norm(x))


class _Bert(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, seq: int, vocabulary: int = 30522) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Parameter(torch.randn(seq, width))
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList(BertLayer(width, heads) for _ in range(layers))
        self.pooler = nn.Linear(width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.tokens(tokens) + self.positions)
        for layer in self.layers:
            x = layer(x)
        return torch.tanh(self.pooler(x[:, 0]))


@network("bert-tiny")
def _bert_tiny(batch: int = 1, seq: int = 128, layers: int = 2) -> Built:
    """BERT-tiny: embedding, encoder layers of width 128, pooler."""
    return _Bert(layers, 128, 2, seq), (torch.randint(30522, (batch, seq)),)


@network("bert-base")
def _bert_base(batch: int = 1, seq: int = 128, layers: int = 1) -> Built:
    """BERT-base with one of its 12 equal layers by default."""
    return _Bert(layers, 768, 12, seq), (torch.randint(30522, (batch, seq)),)


class _Vit(nn.Module):
    """Patches of an image and a class token through encoder layers that normalise first."""

    def __init__(self, layers: int, width: int, heads: int, image: int, patch: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.randn(1, 1, width))
        self.positions = nn.Parameter(torch.randn((image // patch) ** 2 + 1, width))
        self.layers = nn.ModuleList(PreNormLayer(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patches(image).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(x.shape[0], -1, -1), x), 1) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)[:, 0])


@network("vit")
def _vit(batch: int = 1, image: int = 224, layers: int = 1, width: int = 192, heads: int = 3) -> Built:
    """Vision transformer, tiny by default; ``image`` is a multiple of the patch of 16."""
    check_divides(heads, width, "vit: heads and width")
    check_divides(16, image, "vit: patch and image")
    return _Vit(layers, width, heads, image, 16), image_input(batch, image)


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
        return x + self.mlp(self.mlp_norm(x))


@network("gpt2-prefill")
def _gpt2_prefill(batch: int = 1, seq: int = 128, width: int = 768, heads: int = 12) -> Built:
    """GPT-2's block on a prompt."""
    check_divides(heads, width, "gpt2-prefill: heads and width")
    return _Gpt2(width, heads, seq, 0), (torch.randn(batch, seq, width),)


@network("gpt2-decode")
def _gpt2_decode(batch: int = 1, past: int = 128, width: int = 768, heads: int = 12) -> Built:
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
        return x + self.mlp(self.mlp_norm(x))


@network("llama-block")
def _llama_block(batch: int = 1, seq: int = 64, width: int = 1024, heads: int = 16, kv_heads: int = 4) -> Built:
    """A LLaMA-style block on a prompt."""
    check_divides(heads, width, "llama-block: heads and width")
    check_divides(kv_heads, heads, "llama-block: kv_heads and heads")
    return LlamaBlock(width, heads, kv_heads, 11 * width // 4, seq, 0), (torch.randn(batch, seq, width),)


@network("llama-decode")
def _llama_decode(batch: int = 1, past: int = 128, width: int = 1024, heads: int = 16, kv_heads: int = 4) -> Built:
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
        return x + gate * self.mlp(modulate(self.norm(x), shift, scale))


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
def _nextstep(batch: int = 1, past: int = 128, width: int = 1024, heads: int = 16, steps: int = 2) -> Built:
    """NextStep-1's autoregressive step: a decoder block, and ``steps`` of its flow-matching MLP head."""
    check_divides(heads, width, "nextstep: heads and width")
    check_divides(4, heads, "nextstep: query heads for each key head, and heads")
    head, patch = 512, 64
    cache = [torch.randn(batch, heads // 4, past, width // heads) for _ in "kv"]
    module = _NextStep(width, heads, past, steps, patch, head)
    inputs = (torch.randn(batch, 1, width), *cache, torch.randn(batch, patch), time_embedding(steps, head))
    return module, inputs


def lengths(batch: int, seq: int, fill: float) -> tuple[int, ...]:
    """Lengths of the sequences, evenly spread around ``fill`` of the longest, which is ``seq``."""
    low = max(0.0, 2 * fill - 1)
    shares = [1 - (1 - low) * i / max(1, batch - 1) for i in range(batch)]
    return tuple(max(1, round(seq * share)) for share in shares)


class _Packed(nn.Module):
    """The encoder layer on the tokens that are there, one after the other.

    Linear layers, normalisation and activation see no padding; attention runs sequence by sequence.
    """

    def __init__(self, width: int, heads: int, sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.layer, self.heads, self.sizes = BertLayer(width, heads), heads, sizes

    def forward(self, x: Tensor) -> Tensor:
        part = self.layer.attention
        q, k, v = part.query(x), part.key(x), part.value(x)
        attended, start = [], 0
        for size in self.sizes:
            span = slice(start, start + size)
            heads = (split_heads(whole[None, span], self.heads) for whole in (q, k, v))
            attended.append(merge_heads(attend(*heads))[0])
            start += size
        x = self.layer.norm(x + part.out(torch.cat(attended, 0)))
        return self.layer.mlp_norm(x + self.layer.mlp(x))


@network("bert-padded")
def _bert_padded(batch: int = 4, seq: int = 64, width: int = 512, heads: int = 8, fill: float = 0.6) -> Built:
    """A BERT block on sequences padded to ``seq`` tokens, with a mask; ``fill`` is their mean length."""
    check_divides(heads, width, "bert-padded: heads and width")
    mask = torch.zeros(batch, 1, 1, seq)
    for row, size in enumerate(lengths(batch, seq, fill)):
        mask[row, ..., size:] = -1e9
    return BertLayer(width, heads), (torch.randn(batch, seq, width), mask)


@network("bert-packed")
def _bert_packed(batch: int = 4, seq: int = 64, width: int = 512, heads: int = 8, fill: float = 0.6) -> Built:
    """The same sequences without padding, their tokens one after the other."""
    check_divides(heads, width, "bert-packed: heads and width")
    sizes = lengths(batch, seq, fill)
    return _Packed(width, heads, sizes), (torch.randn(sum(sizes), width),)
