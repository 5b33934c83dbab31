"""Positional encodings in numpy, equal to those of :mod:`cdmpp.model.nn.positions` in torch."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np

from cdmpp.model.nn.config import Positions

Array = np.ndarray[Any, np.dtype[Any]]

#: Positions whose encoding is tabulated; deeper programs are rare.
KEPT = 512


def encode_places(kind: Positions, positions: Array, width: int) -> Array:
    """Encoding that is added to leaves' tokens.

    Parameters
    ----------
    kind : {"published", "standard"}
    positions : (rows, leaves) int
    width : int

    Returns
    -------
    (rows, leaves, width) float32
    """
    if positions.max(initial=0) < KEPT:
        return np.asarray(_table(kind, width)[positions])
    return _encoded(kind, positions, width)


@cache
def _table(kind: Positions, width: int) -> Array:
    return _encoded(kind, np.arange(KEPT), width)


def _encoded(kind: Positions, positions: Array, width: int) -> Array:
    exponent = np.arange(0, width, 2 if kind == "standard" else 1, dtype=np.float32) / np.float32(width)
    if kind == "published":
        exponent = 2 * exponent
    angle = positions[..., None].astype(np.float32) * np.exp(np.float32(-math.log(10000.0)) * exponent)
    if kind == "standard":
        both = np.stack([np.sin(angle), np.cos(angle)], axis=-1)
        return np.asarray(both.reshape(*positions.shape, 2 * angle.shape[-1]))
    return np.asarray(np.where(np.arange(width) % 2 == 0, np.sin(angle), np.cos(angle)))
