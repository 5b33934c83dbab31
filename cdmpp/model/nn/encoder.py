"""Self-attention over the leaves of programs with different leaf counts (CDMPP section 4.2).

All leaves go through each matrix product together; attention is computed for one leaf count at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Part:
    """Rows of one padded leaf count.

    Attributes
    ----------
    leaves : (rows, leaves, columns)
    positions : (rows, leaves) or (leaves,)
    mask : (rows, leaves) bool, True for real leaves; None when all are
    """

    leaves: Tensor
    positions: Tensor
    mask: Tensor | None

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and leaves."""
        return self.leaves.shape[0], self.leaves.shape[1]

    @property
    def tokens(self) -> int:
        """Leaves of all rows, padding counted."""
        return self.leaves.shape[0] * self.leaves.shape[1]


class EncoderLayer(nn.Module):
    """Pre-norm self-attention over the leaves of a program, then a feed-forward block."""

    def __init__(self, width: int, heads: int, feed_forward: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_feed = nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, feed_forward), nn.GELU(), nn.Linear(feed_forward, width))

    def forward(self, tokens: Tensor, parts: Sequence[Part], biases: Sequence[Tensor | None]) -> Tensor:
        """tokens (tokens, width): the leaves of all parts one below the other, padding rows at the end."""
        mixed = []
        projected = self.qkv(self.norm_attention(tokens))
        for part, bias, own in zip(parts, biases, split_parts(projected, parts), strict=False):
            rows, leaves = part.shape
            if leaves == 1:  # attends to itself alone
                mixed.append(own[:, 2 * own.shape[1] // 3 :])
                continue
            q, k, v = own.view(rows, leaves, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            seen = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
            mixed.append(seen.transpose(1, 2).reshape(rows * leaves, -1))
        left = len(tokens) - sum(len(m) for m in mixed)
        if left:
            mixed.append(tokens.new_zeros(left, tokens.shape[1]))
        tokens = tokens + self.out(torch.cat(mixed))
        out: Tensor = tokens + self.feed(self.norm_feed(tokens))
        return out


def split_parts(tokens: Tensor, parts: Sequence[Part]) -> tuple[Tensor, ...]:
    """Tokens of each part, then the padding at the end."""
    sizes = [part.tokens for part in parts]
    return torch.split(tokens, [*sizes, len(tokens) - sum(sizes)])


def attention_bias(mask: Tensor | None) -> Tensor | None:
    """Mask of the leaves that may be attended to, (rows, 1, 1, leaves); None when all may."""
    return None if mask is None else mask[:, None, None, :]
