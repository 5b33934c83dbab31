"""Copies of modules and inputs on torch's ``meta`` device, which has shapes and no data."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from cdmpp.errors import InvalidProgramError


def meta_module(module: nn.Module, dtype: torch.dtype | None, train: bool | None) -> nn.Module:
    """A copy without data; the caller's module keeps its weights, gradients and hooks.

    A compiled module is copied as the module that was compiled. ``dtype``: of floating-point parameters and buffers;
    None keeps theirs. ``train``: mode of the copy; None keeps that of the module.
    Raises InvalidProgramError: the module contains itself, or cannot be copied.
    """
    module = getattr(module, "_orig_mod", module)
    check_acyclic(module)
    _check_kinds(module)
    tensors: dict[int, Any] = {}
    for part in module.modules():
        # A tensor that is neither parameter nor buffer has no data either.
        for tensor in (*part.buffers(recurse=False), *(v for v in vars(part).values() if isinstance(v, Tensor))):
            tensors[id(tensor)] = meta_tensor(tensor, dtype)
    for parameter in module.parameters():
        # deepcopy takes what stands in its memo for a copy: no weight is duplicated on the way.
        empty = meta_tensor(parameter.detach(), dtype)
        tensors[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    try:
        copied = copy.deepcopy(module, tensors)
        return copied if train is None else copied.train(train)
    except Exception as error:
        raise InvalidProgramError(
            f"{type(module).__name__} cannot be copied: {_line(error)}",
            hint="copy.deepcopy(module).train() has to work; take locks, files and generators out of the module",
        ) from None


def module_name(path: str) -> str:
    """A submodule's qualified name, as if no module were compiled."""
    return ".".join(part for part in path.split(".") if part != "_orig_mod")


def meta_inputs(inputs: Any, dtype: torch.dtype | None) -> Any:
    """Inputs with every tensor replaced by one on ``meta``; floating-point tensors in ``dtype`` where it is given."""

    def empty(value: Any) -> Any:
        return meta_tensor(value, dtype) if isinstance(value, Tensor) else value

    return tree_map(empty, inputs)


def meta_tensor(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A tensor of the same shape and strides on ``meta``."""
    kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    return torch.empty_like(tensor.detach(), device="meta", dtype=kind).requires_grad_(tensor.requires_grad)


def _check_kinds(module: nn.Module) -> None:
    """Raise :class:`InvalidProgramError` for compiled TorchScript and for parameters without shapes."""
    for name, part in module.named_modules():
        where = name or type(module).__name__
        if isinstance(part, torch.jit.ScriptModule):
            raise InvalidProgramError(
                f"{where} is TorchScript, whose calls cannot be listed",
                hint="pass the module before torch.jit.script or torch.jit.trace",
            )
        if any(nn.parameter.is_lazy(parameter) for parameter in part.parameters(recurse=False)):
            raise InvalidProgramError(
                f"{where} ({type(part).__name__}) has parameters without shapes",
                hint="run the module once, which sets them",
            )


def check_acyclic(module: nn.Module) -> None:
    """Raise :class:`InvalidProgramError` for a module that contains itself; shared parts are fine."""
    open_modules: dict[int, str] = {id(module): ""}
    done: set[int] = set()
    stack: list[tuple[nn.Module, str, Iterator[tuple[str, nn.Module]]]] = [(module, "", _children(module))]
    while stack:
        part, name, children = stack[-1]
        child_name, child = next(children, ("", None))
        if child is None:
            stack.pop()
            done.add(id(part))
            del open_modules[id(part)]
            continue
        path = f"{name}.{child_name}" if name else child_name
        if id(child) in open_modules:
            whole = open_modules[id(child)] or type(module).__name__
            raise InvalidProgramError(
                f"{type(module).__name__}: the module {whole} contains itself as {path}",
                hint="keep a reference to a parent outside of the submodules, for example in a tuple: self.up = (up,)",
            )
        if id(child) not in done:
            open_modules[id(child)] = path
            stack.append((child, path, _children(child)))


def _children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return iter([(name, child) for name, child in module._modules.items() if child is not None])


def differentiated(result: Any) -> list[Tensor]:
    """Tensors of a module's result from which the backward pass starts: its ``loss``, or all with a gradient."""
    loss = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
    if isinstance(loss, Tensor) and loss.requires_grad:
        return [loss]
    return [tensor for tensor in _tensors(result) if tensor.requires_grad]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name))


def not_traceable(module: nn.Module, where: str, error: Exception) -> InvalidProgramError:
    """The error of a module that does not run on ``meta``.

    ``where``: the part that was running; empty for the module itself.
    """
    name, line = type(module).__name__ + (f", {where}" if where else ""), _line(error)
    if isinstance(error, TypeError) and "argument" in line:
        return InvalidProgramError(
            f"{name}: the inputs do not fit: {line}",
            hint="pass example_inputs as forward takes them: a tuple, a dictionary of keywords, or one tensor",
        )
    text = str(error).strip().partition("\n")[0]
    for signs, problem, hint in _PROBLEMS:
        if any(sign in text for sign in signs):
            # Of its operators of control flow PyTorch says where objects are in memory.
            detail = "" if "HigherOrderOperator" in signs else f": {line}"
            return InvalidProgramError(f"{name}: {problem}{detail}", hint=hint)
    return InvalidProgramError(
        f"{name}: does not run on these inputs: {type(error).__name__}: {line}",
        hint="check shapes and types of example_inputs: does module(*example_inputs) run?",
    )


#: Signs in PyTorch's messages, what they mean, and what to do; the first that fits.
_PROBLEMS = (
    (
        ("FlexAttention", "flex_attention"),
        "flex attention is compiled for the mask and the scores that it is given, and has no kernel without a device",
        "call torch.nn.functional.scaled_dot_product_attention in its place, which has the same products",
    ),
    (
        ("HigherOrderOperator",),
        "the control flow of PyTorch's while_loop, cond, scan and map depends on values",
        "write the loop with a number of steps, or the branch that is taken, in Python",
    ),
    (
        ("fake impl", "'Meta' backend"),
        "an operator gives no shapes without data",
        "register its shapes with torch.library.register_fake, or use PyTorch's own operator in its place",
    ),
    (
        ("CUDA", "cuda", "expected device meta", "on the same device"),
        "names a device",
        "make tensors on the device of the inputs, device=x.device, and take .to(device) out of forward",
    ),
    (
        ("meta", "data-independent", "data-dependent"),
        "does not run without data",
        "control flow that depends on values cannot be listed: leave out inputs whose values are tested, such as an "
        "attention mask, or make the result of the test an attribute of the module",
    ),
)


def _line(error: Exception) -> str:
    """First sentence of an error's message."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return re.split(r"(?<=[\w)'\"])[.:;!] ?(?=[A-Z]|There|attempted)", line)[0][:200]
