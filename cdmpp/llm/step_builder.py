"""Collection of the operators and collectives of a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from cdmpp.errors import CdmppError, FieldError
from cdmpp.llm.config import LLMConfig
from cdmpp.llm.layout import Layout, Types
from cdmpp.programs.operators import OperatorSpec, make_operator


@dataclass(frozen=True)
class StepPart:
    """An operator or collective of a step."""

    name: str  # its place in the model, such as "qkv_proj" or "attention_all_reduce"
    program: OperatorSpec  # of one rank
    count: int  # runs in the step
    # The same of more rows, which an engine could compute instead: no step takes longer than a larger one.
    padded: tuple[OperatorSpec, ...] = ()


class StepBuilder:
    """Collects the parts of a step; ``tokens``: rows of the activations of one rank."""

    def __init__(self, config: LLMConfig, layout: Layout, types: Types, tokens: int) -> None:
        self.config, self.layout, self.types, self.tokens = config, layout, types, tokens
        self.parts: list[StepPart] = []
        #: Field of attention operators for the type of the cache.
        self.cache = {} if types.kv_dtype is None else {"kv_dtype": types.kv_dtype}
        self._count = 1

    @contextmanager
    def times(self, count: int) -> Iterator[None]:
        """Parts added inside run ``count`` times; none is added for a count of 0."""
        before, self._count = self._count, count
        try:
            yield
        finally:
            self._count = before

    def repeated(self, runs: int) -> AbstractContextManager[None]:
        """Parts added inside run ``runs`` times for each time that they would run."""
        return self.times(self._count * runs)

    def add(self, name: str, operator: str, **fields: Any) -> None:
        """Add an operator; its ``dtype`` is that of the activations if not given.

        Raises FieldError where the step is too large for the operator.
        """
        if not self._count:
            return
        try:
            program = make_operator({"operator": operator, "dtype": self.types.dtype, **fields})
        except CdmppError as error:
            raise FieldError.at(
                "config",
                f"cannot compute the model's part {name!r}: {error.message}",
                hint=f"{error.hint}. These sizes follow from the batch, the input length and config.json",
            ) from None
        self.parts.append(StepPart(name, program, self._count))

    def vector(self, name: str, operator: str, cols: int, **fields: Any) -> None:
        """Add an operator on ``[tokens, cols]``."""
        self.add(name, operator, rows=self.tokens, cols=cols, **fields)

    def norm(self, name: str, cols: int, *, residual: bool = False) -> None:
        """Add a norm of ``[tokens, cols]``.

        ``residual``: the kernel adds the residual too. It reads and writes two tensors instead of one, as a norm of
        twice as many rows does.
        """
        self.add(name, self.config.norm, rows=self.tokens * (1 + residual), cols=cols)

    def linear(self, name: str, n: int, k: int, part: str | None = "attention", *, rows: int | None = None) -> None:
        """Add a linear layer from ``k`` to ``n`` columns, of all tokens or of ``rows``.

        ``part``: part of a layer whose type its weights have; None: they are not quantised.
        """
        types = self.types.product(part) if part is not None else {}
        self.add(name, "linear", **types, m=self.tokens if rows is None else rows, n=n, k=k)

    def mix_streams(self, name: str) -> None:
        """Add the mixing of the copies of the residual, where the model has several."""
        streams, hidden = self.config.streams, self.config.hidden
        if streams > 1:
            self.linear(f"{name}_weights", (2 + streams) * streams, streams * hidden, None)
            self.vector(name, "add", streams * hidden)

    def all_reduce(self, name: str) -> None:
        """Add the sum of the activations over the ranks of a layer; nothing for a single rank."""
        self._collective(name, "all_reduce", self._activations(), self.layout.tp)

    def all_gather(self, name: str, cols: int) -> None:
        """Add the concatenation of columns over the ranks of a layer, ``cols`` in total."""
        self._collective(name, "all_gather", self.tokens * cols * self.types.bytes, self.layout.tp)

    def exchange(self, name: str, element_bytes: float, topk: float, *, back: bool = False, cols: int = 0) -> None:
        """Add the exchange of tokens between experts of several replicas of the attention.

        Where each expert is on one rank, each rank sends its share of the replica's tokens once to each rank that has
        one of a token's experts. Otherwise all ranks get all tokens, and add up their parts of the results. ``cols``:
        columns of a token; 0: those of the model.
        """
        layout = self.layout
        if layout.dp == 1:
            return
        row = (cols or self.config.hidden) * element_bytes
        if layout.expert_tp == 1:
            share = -(-self.tokens // layout.tp)
            self._collective(name, "all_to_all", share * min(topk, layout.ep) * row, layout.ep)
        else:
            operator = "reduce_scatter" if back else "all_gather"
            self._collective(name, operator, self.tokens * layout.dp * row, layout.stage_ranks)

    def transfer(self, name: str, count: int) -> None:
        """Add transfers of the activations to the next stage."""
        with self.times(count):
            self._collective(name, "send_recv", self._activations(), 2, self.layout.gpus)

    def _activations(self) -> float:
        return self.tokens * self.config.hidden * self.types.bytes

    def _collective(self, name: str, operator: str, size: float, ranks: int, span: int | None = None) -> None:
        """Add a collective; the device decides which ranks share a node. ``span``: see ``Collective``."""
        if ranks > 1:
            spread = span if span is not None and span > ranks else None
            self.add(name, operator, bytes=max(1, round(size)), ranks=ranks, span=spread)
