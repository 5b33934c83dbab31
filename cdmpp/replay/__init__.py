"""Replay of whole models over their programs (dPRO)."""
