"""How a leaf's place in the program reaches the network: four ways, one of them the default.

A leaf's position is its index in the depth-first sequence that marks entry and exit, 2 * rank - depth
(CDMPP section 4.1).
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from cdmpp.nn.constants import MAX_DISTANCE

#: Positions whose encoding is kept; deeper programs are rare.
POSITION_TABLE = 512


def positional_encoding(positions: Tensor, width: int) -> Tensor:
    """sin/cos encoding with the standard exponent: PE[p, 2i] = sin(p / 10000^(2i / width))."""
    exponent = torch.arange(0, width, 2, device=positions.device, dtype=torch.float32) / width
    angle = positions.float().unsqueeze(-1) * torch.exp(-math.log(10000.0) * exponent)
    return torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(-2)


def published_encoding(positions: Tensor, width: int) -> Tensor:
    """The encoding as CDMPP's code has it, for even i: PE[p, i] = sin(p / 10000^(2i / width)) and
    PE[p, i + 1] = cos(p / 10000^(2(i + 1) / width)).

    Its i steps by two already, so the exponent is twice the standard one, and the two of a pair have
    different frequencies; kept for the comparison.
    """
    exponent = 2 * torch.arange(0, width, device=positions.device, dtype=torch.float32) / width
    angle = positions.float().unsqueeze(-1) * torch.exp(-math.log(10000.0) * exponent)
    even = torch.arange(width, device=positions.device) % 2 == 0
    return torch.where(even, angle.sin(), angle.cos())


_ENCODINGS = {"published": published_encoding, "standard": positional_encoding}


class PositionEncoding(nn.Module):
    """What is added to a leaf's token for its position; no weights."""

    _table: Tensor

    def __init__(self, kind: Literal["published", "standard"], width: int) -> None:
        super().__init__()
        self.width, self._encode = width, _ENCODINGS[kind]
        # Sines and cosines would be a twentieth of a forward pass; positions beyond the table are computed.
        table = self._encode(torch.arange(POSITION_TABLE), width)
        self.register_buffer("_table", table, persistent=False)

    def forward(self, positions: Tensor) -> Tensor:
        """(rows, leaves) -> (rows, leaves, width)."""
        if int(positions.max()) < POSITION_TABLE:
            return self._table[positions]
        return self._encode(positions, self.width)


class StructuralBias(nn.Module):
    """A learned bias of the attention between two leaves, by the clipped difference of their positions.

    The sign stays: what comes before a leaf is not what comes after it. Zero at the start, so the untrained
    network attends as if there were no positions.
    """

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.bias = nn.Embedding(2 * MAX_DISTANCE + 1, heads)
        nn.init.zeros_(self.bias.weight)

    def forward(self, positions: Tensor) -> Tensor:
        """(rows, leaves) -> (rows, heads, leaves, leaves), from the attending leaf to the attended one."""
        difference = positions[:, None, :] - positions[:, :, None]
        index = difference.clamp(-MAX_DISTANCE, MAX_DISTANCE) + MAX_DISTANCE
        out: Tensor = self.bias(index.long()).permute(0, 3, 1, 2)
        return out
