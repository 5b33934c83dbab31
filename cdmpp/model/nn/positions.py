"""Positional encodings of leaves, for the torch form and the ONNX form of the network.

The position of a leaf is its index in the depth-first sequence that marks entry and exit, 2 * rank - depth
(CDMPP section 4.1).
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np

from cdmpp.model.nn.config import Positions

Array = np.ndarray[Any, np.dtype[Any]]

#: Positions whose encoding is tabulated; deeper programs are rare.
POSITION_TABLE = 512


def encode_positions(kind: Positions, positions: Array, width: int) -> Array:
    """Encoding that is added to leaves' tokens: (..., width) float32 of (rows, leaves) or (leaves,) int.

    "standard": PE[p, 2i] = sin(p / 10000^(2i / width)) and PE[p, 2i + 1] its cosine.

    "published", as CDMPP's code computes it, for even i: PE[p, i] = sin(p / 10000^(2i / width)) and PE[p, i + 1] =
    cos(p / 10000^(2(i + 1) / width)). Its i already steps by two, so the exponent is twice the standard one, and sine
    and cosine of a pair have different frequencies. Kept for the comparison with the original.
    """
    # Sines and cosines would be a twentieth of a forward pass; positions beyond the table are computed.
    if positions.max(initial=0) < POSITION_TABLE:
        return np.asarray(_table(kind, width)[positions])
    return _encoded(kind, positions, width)


@cache
def _table(kind: Positions, width: int) -> Array:
    return _encoded(kind, np.arange(POSITION_TABLE), width)


def _encoded(kind: Positions, positions: Array, width: int) -> Array:
    exponent = np.arange(0, width, 2 if kind == "standard" else 1, dtype=np.float32) / np.float32(width)
    if kind == "published":
        exponent = 2 * exponent
    angle = positions[..., None].astype(np.float32) * np.exp(np.float32(-math.log(10000.0)) * exponent)
    if kind == "standard":
        both = np.stack([np.sin(angle), np.cos(angle)], axis=-1)
        return np.asarray(both.reshape(*positions.shape, 2 * angle.shape[-1]))
    return np.asarray(np.where(np.arange(width) % 2 == 0, np.sin(angle), np.cos(angle)))
