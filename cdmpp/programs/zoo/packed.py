"""A BERT block on sequences of different lengths: padded to the longest, or packed (ByteTransformer)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cdmpp.programs.zoo.layers import attend, check_divides, merge_heads, split_heads
from cdmpp.programs.zoo.registry import network
from cdmpp.programs.zoo.transformers import EncoderLayer


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
        self.layer, self.heads, self.sizes = EncoderLayer(width, heads), heads, sizes

    def forward(self, x: Tensor) -> Tensor:
        part = self.layer.attention
        q, k, v = part.query(x), part.key(x), part.value(x)
        attended, start = [], 0
        for size in self.sizes:
            own = slice(start, start + size)
            heads = (split_heads(whole[None, own], self.heads) for whole in (q, k, v))
            attended.append(merge_heads(attend(*heads))[0])
            start += size
        x = self.layer.norm(x + part.out(torch.cat(attended, 0)))
        y: Tensor = self.layer.mlp_norm(x + self.layer.mlp(x))
        return y


@network("bert-padded")
def _bert_padded(
    batch: int = 4, seq: int = 64, width: int = 512, heads: int = 8, fill: float = 0.6
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A BERT block on sequences padded to ``seq`` tokens, with a mask; ``fill`` is their mean length."""
    check_divides(heads, width, "bert-padded: heads and width")
    mask = torch.zeros(batch, 1, 1, seq)
    for row, size in enumerate(lengths(batch, seq, fill)):
        mask[row, ..., size:] = -1e9
    return EncoderLayer(width, heads), (torch.randn(batch, seq, width), mask)


@network("bert-packed")
def _bert_packed(
    batch: int = 4, seq: int = 64, width: int = 512, heads: int = 8, fill: float = 0.6
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The same sequences without padding, their tokens one after the other."""
    check_divides(heads, width, "bert-packed: heads and width")
    sizes = lengths(batch, seq, fill)
    return _Packed(width, heads, sizes), (torch.randn(sum(sizes), width),)
