"""Features of tensor programs: TVM JSON to the compact AST and its leaf vectors, with numpy only.

What depends on a device or on trained weights belongs in :mod:`cdmpp.model`.
"""

from cdmpp.features.launch import launch_summary

__all__ = ["launch_summary"]
