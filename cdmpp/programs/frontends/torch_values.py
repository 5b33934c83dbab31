"""Sizes of results that depend on values, as expected: experts of tokens, elements that are not zero, loops."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

#: Calls whose first result is about the same choices as their first tensor.
_KEEPING = "eq index index_select clone _to_copy sum gt ne cat stack contiguous any squeeze"


@dataclass
class Choices:
    """Tokens that choose among experts; each expert gets as many as any other.

    Attributes
    ----------
    classes, number : int
        Experts, and choices of all tokens.
    experts : int
        Experts that a loop visits.
    given : float
        Choices that were handed out so far.
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

    def note(self, name: str, tensors: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        """Follow the choices of experts through a call."""
        if name == "topk" and len(results) == 2:
            self.choose(results[1], tensors[0].shape[-1] if tensors[0].ndim else 1)
        elif name in _KEEPING.split() and tensors and results and tensors[0].is_meta and results[0].is_meta:
            found = self._choices.get(tensors[0].untyped_storage()._cdata)
            if found is not None:
                key = results[0].untyped_storage()._cdata
                self._choices.setdefault(key, (found[0], found[1] or name in ("sum", "any"), results[0]))

    def without_masks(self, indices: Sequence[Any]) -> list[Any]:
        """Indices in which masks are replaced by the numbers of their elements."""
        numbers: list[Any] = []
        for index in indices:
            if isinstance(index, Tensor) and index.is_meta and index.dtype == torch.bool:
                numbers += torch.ops.aten.nonzero.default(index).unbind(1)
            else:
                numbers.append(index)
        return numbers

    def result(self, name: str, args: Sequence[Any]) -> Any:
        """The result of a call whose sizes depend on values; None for other calls."""
        x = args[0] if args else None
        if name not in _DEPENDENT or not isinstance(x, Tensor) or not x.is_meta:
            return None
        if name != "nonzero":
            self._assume(f"{name} gives the largest result")
            return _DEPENDENT[name](x)
        found = self._choices.get(x.untyped_storage()._cdata)
        if found is None:
            self._assume("nonzero() finds every element")
            return x.new_empty((x.numel(), x.ndim), dtype=torch.int64)
        choices, counted, _ = found
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


def teach_higher_order(recorder: type, missing: Callable[[Any, str, str], None], attend: Callable[..., Any]) -> None:
    """Teach a mode PyTorch's operators of control flow, which run their parts as often as the shapes say, or once.

    It imports PyTorch's compiler, which takes two seconds.
    """

    def conditional(mode: Any, chosen: Any, yes: Any, no: Any, operands: Sequence[Any]) -> Any:
        missing(mode, "cond", "one branch is priced, the first, because the condition is a value")
        with mode:
            return yes(*operands)

    def while_loop(mode: Any, go_on: Any, body: Any, carried: Sequence[Any], more: Sequence[Any]) -> Any:
        missing(mode, "while_loop", "its body is priced once, because the number of its runs is a value")
        with mode:
            return tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, body(*carried, *more))

    def scan(mode: Any, combine: Any, start: Sequence[Any], rows: Sequence[Tensor], more: Sequence[Any]) -> Any:
        state, pieces = list(start), []
        with mode:
            for i in range(rows[0].shape[0]):
                results = combine(*state, *(row[i] for row in rows), *more)
                state = list(results[: len(start)])
                pieces.append(results[len(start) :])
            return [*state, *(torch.stack(column) for column in zip(*pieces, strict=True))]

    def mapped(mode: Any, body: Any, rows: Sequence[Tensor], more: Sequence[Any]) -> Any:
        with mode:
            results = [body(*(row[i] for row in rows), *more) for i in range(rows[0].shape[0])]
            return [torch.stack(column) for column in zip(*results, strict=True)]

    rules = {"cond": conditional, "while_loop": while_loop, "scan": scan, "map_impl": mapped, "flex_attention": attend}
    for name, rule in rules.items():
        operator = getattr(torch.ops.higher_order, name, None)
        if operator is not None and recorder not in operator.python_key_table:
            operator.py_impl(recorder)(torch.compiler.disable(rule))
