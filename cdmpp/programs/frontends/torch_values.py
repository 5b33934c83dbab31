"""Sizes of results that depend on values, as expected: experts of tokens, elements that are not zero."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cdmpp.programs.frontends.eager_rules import AtenCall

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
