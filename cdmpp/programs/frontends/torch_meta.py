"""Copies of modules and inputs on torch's ``meta`` device, which has shapes and no data.

Sizes of results that depend on values are as expected: experts of tokens, elements that are not zero.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from cdmpp.errors import InvalidProgramError
from cdmpp.programs.frontends.eager_rules import AtenCall


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


#: Calls whose first result is about the same choices as their first tensor.
_NAMES = "eq index index_select clone _to_copy sum gt ne cat stack contiguous any squeeze"
_KEEPING = frozenset(_NAMES.split())


@dataclass
class Choices:
    """Choices of all tokens (``number``) among experts (``classes``), each of which gets as many as any other.

    ``experts``: those that a loop visits, where it is known; ``given``: choices that were handed out so far.
    """

    classes: int
    number: int
    experts: int = 0
    given: float = 0.0

    @property
    def hit(self) -> int:
        """Expected number of experts that a token chooses."""
        missed = (1 - 1 / self.classes) ** self.number
        return max(1, min(self.number, round(self.classes * (1 - missed))))

    def next_count(self, elements: int) -> int:
        """Number of the choices among ``elements`` of a mask; the counts of all experts add up to all choices."""
        if elements > self.number:
            return self.number
        before, self.given = self.given, self.given + elements / (self.experts or self.classes)
        return math.floor(self.given + 1e-6) - math.floor(before + 1e-6)


class ExpectedValues:
    """Results of calls that need values, on ``meta``; ``assumptions`` counts what was assumed."""

    def __init__(self, assume: Callable[[str], None]) -> None:
        self._assume = assume
        # By storage, which is held so that no other one has its address; counted: a number for each expert.
        self._choices: dict[int, tuple[Choices, bool, Tensor]] = {}

    def choose(self, chosen: Tensor, classes: int) -> None:
        """Note that ``chosen`` has numbers of experts, unless it is known already."""
        if classes > 0 and chosen.is_meta:
            key = chosen.untyped_storage()._cdata
            self._choices.setdefault(key, (Choices(classes, chosen.numel()), False, chosen))

    def note(self, call: AtenCall) -> None:
        """Follow the choices of experts through a call."""
        name = call.name
        if name != "topk" and (name not in _KEEPING or not self._choices):
            return
        tensors, results = call.tensors, call.results
        if name == "topk" and len(results) == 2:
            self.choose(results[1], tensors[0].shape[-1] if tensors[0].ndim else 1)
        elif name in _KEEPING and tensors and results and tensors[0].is_meta and results[0].is_meta:
            chosen = self._choices.get(tensors[0].untyped_storage()._cdata)
            if chosen is not None:
                key = results[0].untyped_storage()._cdata
                self._choices.setdefault(key, (chosen[0], chosen[1] or name in ("sum", "any"), results[0]))

    def without_masks(self, indices: Sequence[Any]) -> list[Any]:
        """Indices in which masks are replaced by the numbers of their elements."""
        masks = [isinstance(i, Tensor) and i.is_meta and i.dtype == torch.bool for i in indices]
        nonzero = torch.ops.aten.nonzero.default
        return [j for i, mask in zip(indices, masks, strict=True) for j in (nonzero(i).unbind(1) if mask else (i,))]

    def result(self, name: str, args: Sequence[Any]) -> Any:
        """The result of a call whose sizes depend on values; None for other calls."""
        x = args[0] if args else None
        if not isinstance(x, Tensor) or not x.is_meta:
            return None
        if name == "_grouped_mm" and x.dtype != torch.bfloat16:  # other types run on a GPU, not on ``meta``
            operands = [tensor.bfloat16() for tensor in args[:2]]
            return torch.ops.aten._grouped_mm.default(*operands, *args[2:]).to(x.dtype)
        if name not in _DEPENDENT:
            return None
        if name != "nonzero":
            self._assume(f"{name} gives the largest result")
            return _DEPENDENT[name](x)
        chosen = self._choices.get(x.untyped_storage()._cdata)
        if chosen is None:
            self._assume("nonzero() finds every element")
            return x.new_empty((x.numel(), x.ndim), dtype=torch.int64)
        choices, counted, _ = chosen
        if counted:
            choices.experts = choices.hit
            # Real numbers: the loop over them indexes modules and compares them.
            return torch.arange(choices.experts, device="cpu")[:, None]
        self._assume("every expert has as many tokens")
        return x.new_empty((choices.next_count(x.numel()), x.ndim), dtype=torch.int64)


def _unique(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    counts = x.new_empty(x.numel(), dtype=torch.int64)
    return x.new_empty(x.numel()), counts.view(x.shape), torch.empty_like(counts)


#: Calls whose sizes depend on values -> their largest result.
_DEPENDENT: dict[str, Callable[[Tensor], Any]] = {
    "nonzero": lambda x: x,
    "masked_select": lambda x: x.new_empty(x.numel()),
    **dict.fromkeys(("_unique2", "unique_consecutive"), _unique),
    "bincount": lambda x: x.new_empty(x.numel(), dtype=torch.int64),
}
