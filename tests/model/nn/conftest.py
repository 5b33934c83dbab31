"""Tiny networks run on one thread."""

from tests.threads import one_thread

__all__ = ["one_thread"]
