"""A decoding service whose attention and feed-forward layers run on devices of their own (Step-3)."""

from cdmpp.plan.afd.size import Link, Side, Sizing, size

__all__ = ["Link", "Side", "Sizing", "size"]
