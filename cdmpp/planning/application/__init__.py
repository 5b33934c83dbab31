"""Applications of several models and tools as graphs of primitives on batching engines (Teola)."""

from cdmpp.planning.application.graph import Application, Engine, Primitive
from cdmpp.planning.application.simulate import Policy, Run, simulate

__all__ = ["Application", "Engine", "Policy", "Primitive", "Run", "simulate"]
