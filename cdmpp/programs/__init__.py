"""Tensor programs and operator specifications: what is asked about."""
