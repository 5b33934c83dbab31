"""Tensor statistics of a PyTorch module, read by hooks in one training step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from cdmpp.errors import DataError
from cdmpp.plan.precision.schema import StatisticsForm, TensorForm


def operator_statistics(
    module: nn.Module, inputs: tuple[Any, ...], loss: Callable[[Any], torch.Tensor]
) -> dict[str, StatisticsForm]:
    """Statistics of every called module without children by its name, from one forward and backward pass.

    They are in the order of the calls, as a plan's operators are; of several calls of a module, those of the last.
    Gradients are cleared before and after; parameters do not change. ``loss``: maps the module's output to a scalar.
    Raises DataError: the loss is not a scalar.
    """
    inputs_of: dict[str, torch.Tensor] = {}
    gradients: dict[str, torch.Tensor] = {}
    handles: list[Any] = []

    def watch(name: str) -> Callable[..., None]:
        def forward(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            floating = [a for a in args if torch.is_tensor(a) and a.is_floating_point()]
            if not floating or not torch.is_tensor(output):
                return
            inputs_of.pop(name, None)
            inputs_of[name] = floating[0].detach()
            if output.requires_grad:
                output.register_hook(keep)  # type: ignore[no-untyped-call]

        def keep(gradient: torch.Tensor) -> None:
            gradients[name] = gradient.detach()

        return forward

    for name, part in module.named_modules():
        if not list(part.children()):
            handles.append(part.register_forward_hook(watch(name)))
    try:
        module.zero_grad(set_to_none=True)
        value = loss(module(*inputs))
        if value.numel() != 1:
            raise DataError(f"the loss has {value.numel()} elements", hint="reduce it to a scalar")
        value.backward()  # type: ignore[no-untyped-call]
    finally:
        for handle in handles:
            handle.remove()
        module.zero_grad(set_to_none=True)
    parts = dict(module.named_modules())
    out: dict[str, StatisticsForm] = {}
    for name, tensor in inputs_of.items():
        weight = getattr(parts[name], "weight", None)
        product = isinstance(parts[name], nn.Linear | nn.modules.conv._ConvNd)
        out[name] = StatisticsForm.model_construct(
            input=_statistics(tensor),
            weight=_statistics(weight.detach()) if product and torch.is_tensor(weight) else None,
            gradient=_statistics(gradients[name]) if name in gradients else None,
        )
    return out


def _statistics(tensor: torch.Tensor) -> TensorForm:
    values = tensor.double()
    norm2, max_abs = (float(values.square().sum()), float(values.abs().max())) if values.numel() else (0.0, 0.0)
    return TensorForm.model_construct(elements=values.numel(), norm2=norm2, max_abs=max_abs)
