"""Transformer encoders: BERT tiny and base, a vision transformer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cdmpp.programs.zoo.layers import attend, check_divides, image_input, merge_heads, split_heads
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
        out: Tensor = self.out(merge_heads(attend(q, k, v, mask)))
        return out


def feed_forward(width: int, hidden: int) -> nn.Sequential:
    """Two linear layers with GELU between."""
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


class EncoderLayer(nn.Module):
    """BERT's layer: attention and feed-forward network, each added and normalised after."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention, self.norm = SelfAttention(width, heads), nn.LayerNorm(width)
        self.mlp, self.mlp_norm = feed_forward(width, 4 * width), nn.LayerNorm(width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.norm(x + self.attention(x, mask))
        y: Tensor = self.mlp_norm(x + self.mlp(x))
        return y


class PreNormLayer(nn.Module):
    """GPT-2's and ViT's layer: normalised first, then added."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention, self.norm = SelfAttention(width, heads), nn.LayerNorm(width)
        self.mlp, self.mlp_norm = feed_forward(width, 4 * width), nn.LayerNorm(width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.norm(x), mask)
        y: Tensor = x + self.mlp(self.mlp_norm(x))
        return y


class _Bert(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, seq: int, vocabulary: int = 30522) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Parameter(torch.randn(seq, width))
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList(EncoderLayer(width, heads) for _ in range(layers))
        self.pooler = nn.Linear(width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.tokens(tokens) + self.positions)
        for layer in self.layers:
            x = layer(x)
        return torch.tanh(self.pooler(x[:, 0]))


@network("bert-tiny")
def _bert_tiny(batch: int = 1, seq: int = 128, layers: int = 2) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """BERT-tiny: embedding, encoder layers of width 128, pooler."""
    return _Bert(layers, 128, 2, seq), (torch.randint(30522, (batch, seq)),)


@network("bert-base")
def _bert_base(batch: int = 1, seq: int = 128, layers: int = 1) -> tuple[nn.Module, tuple[Tensor, ...]]:
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
        scores: Tensor = self.head(self.norm(x)[:, 0])
        return scores


@network("vit")
def _vit(
    batch: int = 1, image: int = 224, layers: int = 1, width: int = 192, heads: int = 3
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Vision transformer, tiny by default; ``image`` is a multiple of the patch of 16."""
    check_divides(heads, width, "vit: heads and width")
    check_divides(16, image, "vit: patch and image")
    return _Vit(layers, width, heads, image, 16), image_input(batch, image)
