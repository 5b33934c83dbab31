"""Statements of a GPU program with the nodes of their indices and conditions, and the launch that runs them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from cdmpp.features.ast import Access, Leaf
from cdmpp.features.expressions import Expressions
from cdmpp.features.walk import Walker
from cdmpp.programs.tvm_json import Nodes

#: Hardware threads and blocks, in TVM's order.
THREADS = ("threadIdx.x", "threadIdx.y", "threadIdx.z")
BLOCKS = ("blockIdx.x", "blockIdx.y", "blockIdx.z")
_OPERANDS = ("a", "b", "value", "condition", "true_value", "false_value", "base", "stride")
#: A condition's node, and whether it holds.
Condition = tuple[int, bool]


class Load(NamedTuple):
    """A load: its access, the nodes of its indices, and the conditions around it."""

    access: Access
    indices: list[int]
    conditions: tuple[Condition, ...]


@dataclass
class Statement:
    """A store with the nodes of its indices, its loads, and the conditions around it."""

    leaf: Leaf
    indices: list[int]
    loads: list[Load]
    conditions: tuple[Condition, ...]
    kernel: int
    vthreads: frozenset[int] = frozenset()

    @property
    def path(self) -> tuple[int, ...]:
        """Loops around it, outermost first."""
        return self.leaf.path

    def accesses(self) -> Iterable[tuple[Access, list[int], bool]]:
        """Each access, the nodes of its indices, and whether it reads."""
        yield self.leaf.store, self.indices, False
        for read in self.loads:
            yield read.access, read.indices, True


class Recorder(Walker):
    """A walk that keeps the nodes of indices and conditions beside the compact AST."""

    def __init__(self, nodes: Nodes, bindings: dict[str, Any]) -> None:
        super().__init__(nodes, bindings)
        self.statements: list[Statement] = []
        self.kernels = 0
        #: Variable -> (loop, start, step), or the node of its value.
        self.loop_of: dict[int, tuple[int, Any, Any]] = {}
        self.value_of: dict[int, int] = {}
        self._conditions: tuple[Condition, ...] = ()
        self._inside = 0

    def loop(
        self, var: int, name: str, extent: Any, kind: str, body: int, unroll: int = 0, start: Any = 0, step: Any = 1
    ) -> None:
        """Enter a loop; the first one of blocks or threads begins a kernel."""
        known = self._thread_loops.get(kind)
        self.loop_of[var] = (len(self.ast.loops) if known is None else known, start, step)
        bound = kind in THREADS or kind in BLOCKS
        if bound and not self._inside:
            self.kernels += 1
        self._inside += bound
        super().loop(var, name, extent, kind, body, unroll, start, step)
        self._inside -= bound

    def block_realize(self, data: dict[str, Any]) -> None:
        """SBlockRealize: its variables have the nodes of their values; its predicate is a condition."""
        before = self._conditions
        variables = self.array(self.data(data["block"])["iter_vars"])
        for variable, value in zip(variables, self.array(data["iter_values"]), strict=True):
            self.value_of[self.data(variable)["var"]] = value
        self._conditions = (*before, (data["predicate"], True))
        super().block_realize(data)
        self._conditions = before

    def if_then_else(self, data: dict[str, Any]) -> None:
        """IfThenElse: a condition around one case, and its opposite around the other."""
        before = self._conditions
        held = self.predicates
        self.predicates = held + (1 - self.holds(data["condition"]))
        for case, holds in (("then_case", True), ("else_case", False)):
            if not self._is_none(data[case]):
                self._conditions = (*before, (data["condition"], holds))
                self.statement(data[case])
        self.predicates, self._conditions = held, before

    def bind(self, data: dict[str, Any]) -> None:
        """Bind, LetStmt."""
        self.value_of[data["var"]] = data["value"]
        super().bind(data)

    def store(self, data: dict[str, Any]) -> None:
        """BufferStore."""
        super().store(data)
        loads: list[Load] = []
        self._collect(data["value"], self._conditions, loads)
        kernel = self.kernels - 1 if self._inside else -1
        self.statements.append(
            Statement(self.ast.leaves[-1], self.array(data["indices"]), loads, self._conditions, kernel)
        )

    def _collect(self, index: int, conditions: tuple[Condition, ...], loads: list[Load]) -> None:
        """Loads of a stored value, each address once, under the conditions of ``if_then_else``."""
        stack = [(index, conditions)]
        seen: set[tuple[int, ...]] = set()
        while stack:
            item, held = stack.pop()
            self.spend(1)
            node = self.nodes[item]
            data: Any = node.get("data")
            kind = node["type"].rpartition(".")[2]
            if kind == "TensorLoad":
                indices = self.array(data["indices"])
                key = (data["source"], *indices)
                if key not in seen:
                    seen.add(key)
                    access = Access(self.buffer(data["source"]), [self.expression(i) for i in indices])
                    loads.append(Load(access, indices, held))
            elif kind == "Call":
                arguments = self.array(data["args"])
                if self.call_name(data).endswith("if_then_else"):
                    condition, yes, no = arguments
                    stack += [(yes, (*held, (condition, True))), (no, (*held, (condition, False)))]
                else:
                    stack += [(a, held) for a in arguments]
            elif kind == "Var" and item in self.values:
                stack.append((self.values[item], held))
            else:
                stack += [(child, held) for child in operands(self, item)]

    def loops_of(self, index: int) -> frozenset[int]:
        """Loops whose variables an expression has."""
        found: set[int] = set()
        stack, seen = [index], set[int]()
        while stack:
            item = stack.pop()
            if item in seen:
                continue
            seen.add(item)
            if item in self.loop_of:
                found.add(self.loop_of[item][0])
            elif item in self.value_of:
                stack.append(self.value_of[item])
            else:
                stack += operands(self, item)
        return frozenset(found)


def operands(expressions: Expressions, index: int) -> list[int]:
    """Nodes of the operands of an expression."""
    data = expressions.nodes[index].get("data")
    if type(data) is not dict:
        return []
    operands = [data[k] for k in _OPERANDS if k in data]
    for name in ("args", "indices"):
        operands += expressions.array(data[name]) if name in data else []
    return [i for i in operands if type(i) is int]
