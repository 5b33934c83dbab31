"""Quantile levels of the network."""

from __future__ import annotations

#: Quantile levels that the network emits; others are interpolated between them.
LEVELS = (0.02, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98)
