"""Positional encodings of leaves in torch.

The position of a leaf is its index in the depth-first sequence that marks entry and exit, 2 * rank - depth
(CDMPP section 4.1). :mod:`cdmpp.model.nn.positional_encoding_np` computes the same without torch.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from cdmpp.model.nn.config import Positions

#: Positions whose encoding is tabulated; deeper programs are rare.
POSITION_TABLE = 512


def positional_encoding(positions: Tensor, width: int) -> Tensor:
    """sin/cos encoding with the standard exponent: PE[p, 2i] = sin(p / 10000^(2i / width))."""
    exponent = torch.arange(0, width, 2, device=positions.device, dtype=torch.float32) / width
    angle = positions.float().unsqueeze(-1) * torch.exp(-math.log(10000.0) * exponent)
    return torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(-2)


def published_encoding(positions: Tensor, width: int) -> Tensor:
    """The encoding of CDMPP's code, for even i: PE[p, i] = sin(p / 10000^(2i / width)) and
    PE[p, i + 1] = cos(p / 10000^(2(i + 1) / width)).

    Its i already steps by two, so the exponent is twice the standard one, and sine and cosine of a pair have
    different frequencies. Kept for the comparison with the original.
    """
    exponent = 2 * torch.arange(0, width, device=positions.device, dtype=torch.float32) / width
    angle = positions.float().unsqueeze(-1) * torch.exp(-math.log(10000.0) * exponent)
    even = torch.arange(width, device=positions.device) % 2 == 0
    return torch.where(even, angle.sin(), angle.cos())


_ENCODINGS = {"published": published_encoding, "standard": positional_encoding}


class PositionEncoding(nn.Module):
    """Encoding that is added to a leaf's token; it has no weights."""

    _table: Tensor

    def __init__(self, kind: Positions, width: int) -> None:
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
