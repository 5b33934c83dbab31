"""Measurements of replay and of the planners (docs/planning.md)."""
