"""Applications of several models and tools as graphs of primitives on batching engines (Teola)."""

from cdmpp.plan.application.search import Application, BatchingEngine, Policy, Primitive, Run, simulate

__all__ = ["Application", "BatchingEngine", "Policy", "Primitive", "Run", "simulate"]
