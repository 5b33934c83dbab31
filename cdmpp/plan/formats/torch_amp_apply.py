"""Types of modules, applied to a torch model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.utils._pytree import tree_map

from cdmpp.errors import FieldError


class _Forward(nn.Module):
    """Calls the original forward pass of a module; its parameters can be replaced for one call."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part, self.run = part, part.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)


def apply_types(module: nn.Module, types: Mapping[str, str]) -> None:
    """Compute each named module in its type: inputs and copies of its weights are cast, forward and backward.

    Weights stay as they are (master weights), and so do their gradients. Autocast has no effect within these modules.

    Parameters
    ----------
    types : mapping of str to str
        Names of submodules to "float16", "bfloat16" or "float32", as in a file of the format ``torch-amp``. The
        modules do not contain each other.

    Raises
    ------
    FieldError
        A name is no submodule.
    """
    parts = dict(module.named_modules())
    missing = [name for name in types if name not in parts]
    if missing:
        raise FieldError(f"{', '.join(missing[:5])}: no such modules", hint="name operators after the modules")
    for name, dtype in types.items():
        parts[name].forward = _in_type(_Forward(parts[name]), getattr(torch, dtype))


def _in_type(inner: _Forward, dtype: torch.dtype) -> Callable[..., Any]:
    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    def forward(*args: Any, **kwargs: Any) -> Any:
        weights = {name: cast(weight) for name, weight in inner.named_parameters()}
        with torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
            return functional_call(inner, weights, tree_map(cast, args), tree_map(cast, kwargs))

    return forward
