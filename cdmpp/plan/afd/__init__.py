"""A decoding service whose attention and feed-forward layers run on devices of their own (Step-3)."""

from cdmpp.plan.afd.size import AfdLink, AfdSide, Sizing, size

__all__ = ["AfdLink", "AfdSide", "Sizing", "size"]
