"""Import of torch, or an error with the extra that brings it."""

from __future__ import annotations

from typing import Any

from cdmpp.errors import MissingDependencyError, install_hint


def import_torch() -> Any:
    """The package torch with ``torch.export``; raises :class:`MissingDependencyError` where it is not installed."""
    try:
        import torch
        import torch.export
    except ImportError as error:
        raise MissingDependencyError("torch programs need torch", hint=install_hint("torch")) from error
    return torch
