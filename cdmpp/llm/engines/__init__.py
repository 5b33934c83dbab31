"""What software adds to its kernels: engine profiles, one TOML file each.

The kernels' time is the model's answer. Here is the rest: host time of a step, what is a captured graph, how a prefill
is divided, and how far a total is off.
"""

from __future__ import annotations

from cdmpp.llm.engines.profile import EngineProfile, engine_names, load_engine

__all__ = ["EngineProfile", "engine_names", "load_engine"]
