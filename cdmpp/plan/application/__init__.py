"""Applications of several models and tools as graphs of primitives on batching engines (Teola)."""

from cdmpp.plan.application.simulate import Application, Engine, Policy, Primitive, Run, simulate

__all__ = ["Application", "Engine", "Policy", "Primitive", "Run", "simulate"]
