"""Griffe extension: functions with declared options (`cdmpp.llm.options.with_options`) show them as parameters."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import griffe


class DeclaredOptions(griffe.Extension):
    """Replaces `**options` by the parameters of the signature that the function has at run time."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Called for each function when its package is loaded."""
        if not any("with_options" in str(decorator.value) for decorator in func.decorators):
            return
        module = import_module(func.module.path)
        signature = inspect.signature(getattr(module, func.name)) if hasattr(module, func.name) else None
        if signature is None:
            return
        shown = {p.name for p in func.parameters}
        func.parameters._params = [p for p in func.parameters if p.kind is not griffe.ParameterKind.var_keyword]
        for p in signature.parameters.values():
            if p.name not in shown:
                required = p.default is p.empty
                text = p.annotation.__name__ if isinstance(p.annotation, type) else str(p.annotation)
                func.parameters.add(
                    griffe.Parameter(
                        p.name,
                        annotation=text.replace("typing.", ""),
                        kind=griffe.ParameterKind.keyword_only,
                        default=None if required else repr(p.default),
                    )
                )
