"""Features of tensor programs: TVM JSON to the compact AST and its leaf vectors, with numpy only.

What depends on a device or on trained weights belongs in :mod:`cdmpp.model`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cdmpp.features.launch import launch_summary

__all__ = ["launch_summary"]


def __getattr__(name: str) -> Any:
    # Training elsewhere imports this package without pydantic, which programs need.
    if name == "launch_summary":
        from cdmpp.features.launch import launch_summary

        return launch_summary
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
