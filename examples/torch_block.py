"""A decoder of four blocks in plain torch: `cdmpp predict examples.torch_block:decoder --device t4`."""

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """Causal attention and a feed-forward network, each behind a layer norm."""

    def __init__(self, width: int = 1024, heads: int = 16) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens of shape (batch, length, width)."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attention = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attention.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


def decoder() -> tuple[nn.Module, tuple[Tensor]]:
    """Four blocks and their input: 4 sequences of 512 tokens. No memory is allocated."""
    with torch.device("meta"):
        return nn.Sequential(*(Block() for _ in range(4))), (torch.empty(4, 512, 1024),)
