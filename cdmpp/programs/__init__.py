"""Tensor programs and operator specifications."""
