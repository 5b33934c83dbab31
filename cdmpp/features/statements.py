"""Statements of a GPU program with the nodes of their indices and conditions, and the launch that runs them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cdmpp.errors import InvalidProgramError
from cdmpp.features.ast import Access, Leaf
from cdmpp.features.expressions import Expressions, check_extents
from cdmpp.features.walk import Region, Walker
from cdmpp.programs.tvm_json import Nodes

#: Hardware threads and blocks, in TVM's order.
THREADS = ("threadIdx.x", "threadIdx.y", "threadIdx.z")
BLOCKS = ("blockIdx.x", "blockIdx.y", "blockIdx.z")
_OPERANDS = ("a", "b", "value", "condition", "true_value", "false_value", "base", "stride")
#: Marks in the name of an intrinsic that a whole warp executes.
_OF_WARPS = ("mma", "matrix", "fragment")
#: Of a region that a warp accesses at once.
_MOST_ELEMENTS = 4096
#: A condition's node, and whether it holds.
Condition = tuple[int, bool]
#: Stage and order of each statement of a software pipeline, and its asynchronous stages.
Pipeline = tuple[list[int], list[int], list[int]]


class BufferLoad(NamedTuple):
    """A load: its access, the nodes of its indices, and the conditions around it."""

    access: Access
    indices: list[int]
    conditions: tuple[Condition, ...]


@dataclass
class Statement:
    """A store with the nodes of its indices, its loads, and the conditions around it.

    A leaf for each call of an intrinsic has the loops that the call replaced; the statement has those around it.
    """

    leaf: Leaf
    #: Loops around it, outermost first.
    path: tuple[int, ...]
    store: Access
    indices: list[int]
    loads: list[BufferLoad]
    conditions: tuple[Condition, ...]
    kernel: int
    vthreads: frozenset[int] = frozenset()
    #: Operations of a warp on tensor cores in one run; a multiply-add is two.
    tensor_ops: int = 0
    #: Loop of a software pipeline -> place in its annotations. A copy through registers (``staged``) has two places,
    #: a pipeline inside has three: prologue, body and epilogue.
    place: dict[int, int] = field(default_factory=dict)
    staged: bool = False

    def accesses(self) -> Iterable[tuple[Access, list[int], bool]]:
        """Each access, the nodes of its indices, and whether it reads."""
        yield self.store, self.indices, False
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
        #: Loop -> its software pipeline.
        self.pipelines: dict[int, Pipeline] = {}
        #: Asynchronous copies behind the one in use that a lowered program allows.
        self.in_flight = 0
        #: Variable of a buffer that stands for a region -> nodes of the region's lowest corner.
        self._corners: dict[int, list[int]] = {}
        self._place: dict[int, int] = {}
        self._pipeline: int | None = None
        self._staged = self._recorded = False
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
        before, staged = self._conditions, self._staged
        block = self.data(data["block"])
        for variable, value in zip(self.array(block["iter_vars"]), self.array(data["iter_values"]), strict=True):
            self.value_of[self.data(variable)["var"]] = value
        for match in map(self.data, self.array(block["match_buffers"])):
            self._corners[match["buffer"]] = self._corner(match["source"])
        notes = self._notes(block)
        writes = [self.buffer(self.data(i)["source"]) for i in self.array(block.get("writes", 0))]
        for n, *padding in map(self._integers, self.array(notes.get("buffer_dim_align", 0))):
            check_extents([padding[1]], "a row's alignment")
            writes[n].padding.append(padding)
        if "double_buffer_scope" in notes:
            writes[int(self.expression(notes["double_buffer_scope"]).low)].double = True
        self._staged = any(name.endswith("manifest_shared_memory_local_stage") for name in notes)
        self._conditions, self._recorded = (*before, (data["predicate"], True)), False
        super().block_realize(data)
        self._conditions, self._staged = before, staged

    def _notes(self, data: dict[str, Any]) -> dict[str, int]:
        pairs = self.array(data.get("annotations", 0))
        return dict(zip(map(str, map(self.data, pairs[::2])), pairs[1::2], strict=True))

    def _integers(self, index: int) -> list[int]:
        return [int(self.expression(i).low) for i in self.array(index)]

    def _corner(self, region: int) -> list[int]:
        return [self.data(r)["min"] for r in self.array(self.data(region)["region"])]

    def for_loop(self, data: dict[str, Any]) -> None:
        """For: its annotations may make it a software pipeline."""
        notes = self._notes(data)
        if "software_pipeline_stage" in notes:
            self._pipeline = len(self.ast.loops)
            stages, order, copies = (f"software_pipeline_{name}" for name in ("stage", "order", "async_stages"))
            values = (self._integers(notes.get(name, 0)) for name in (stages, order, copies))
            self.pipelines[self._pipeline] = next(values), next(values), next(values)
        super().for_loop(data)

    def sequence(self, data: dict[str, Any]) -> None:
        """SeqStmt: the first one in a software pipeline has a place for each of its statements."""
        before, loop, self._pipeline = self._place, self._pipeline, None
        if loop is None:
            return super().sequence(data)
        place, stages = 0, self.pipelines[loop][0]
        for child in self.array(data["seq"]):
            known, inside = len(self.statements), set(self.pipelines)
            self._place = {**before, loop: place}
            self.statement(child)
            nested = any(max(self.pipelines[p][0]) for p in self.pipelines.keys() - inside)
            place += 3 if nested else 1 + any(s.staged for s in self.statements[known:])
        self._place = before
        if not place == len(stages) == len(self.pipelines[loop][1]):
            raise InvalidProgramError(
                f"a software pipeline has {len(stages)} stages for {place} statements",
                hint="annotate the loop with a stage and an order for each statement of its body",
            )
        return None

    def attribute(self, data: dict[str, Any]) -> None:
        """AttrStmt: a wait for asynchronous copies says how many may be left."""
        if self.data(data["attr_key"]) == "async_wait_inflight_count":
            self.in_flight = max(self.in_flight, int(self.expression(data["value"]).high))
        super().attribute(data)

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
        loads: list[BufferLoad] = []
        # Where a coefficient is 0 nothing is computed.
        before = self._conditions
        self._conditions = (*before, *((node, True) for node in self.coefficients))
        self._collect(data["value"], self._conditions, loads)
        leaf, indices = self.ast.leaves[-1], self._whole(data["buffer"], self.array(data["indices"]))
        store = leaf.store
        if data["buffer"] in self._corners:
            store = Access(store.buffer, [self.expression(i) for i in indices])
        self._record(leaf.path, store, indices, loads)
        self._conditions = before

    def _record(
        self, path: tuple[int, ...], store: Access, indices: list[int], loads: list[BufferLoad], tensor_ops: int = 0
    ) -> None:
        leaf, conditions, kernel = self.ast.leaves[-1], self._conditions, self.kernels - 1 if self._inside else -1
        more = frozenset[int](), tensor_ops, self._place, self._staged
        self.statements.append(Statement(leaf, path, store, indices, loads, conditions, kernel, *more))

    def _whole(self, var: int, indices: list[int]) -> list[int]:
        """Indices of the whole buffer for those of a region of it: new nodes add the region's corner."""
        corner = self._corners.get(var)
        if corner is None:
            return indices
        whole = corner[: len(corner) - len(indices)]
        for a, b in zip(corner[len(whole) :], indices, strict=True):
            whole.append(len(self.nodes))
            self.nodes[whole[-1]] = {"type": "tirx.Add", "data": {"a": a, "b": b}}
        return whole

    def _tensorized(self, name: str, write: Region, reads: list[Region]) -> None:
        """An intrinsic of a warp: one statement for the calls of a block, without the loops that it replaced."""
        super()._tensorized(name, write, reads)
        if self._recorded or self._regions is None or not any(mark in name for mark in _OF_WARPS):
            return
        self._recorded, leaf, path = True, self.ast.leaves[-1], tuple(self._path)
        if max(r.elements for r in (write, *reads)) > _MOST_ELEMENTS:
            raise InvalidProgramError(f"{name[:40]} has more than {_MOST_ELEMENTS} elements", hint="tile the program")
        written, *_ = (self._corner(i) for i in self.array(self._regions[0]))
        store, *accesses = (Access(r.buffer, r.corner, box=tuple(int(e) for e in r.extents)) for r in (write, *reads))
        corners = (self._corner(i) for i in self.array(self._regions[1]))
        loads = [BufferLoad(access, at, self._conditions) for access, at in zip(accesses, corners, strict=True)]
        trips = math.prod(int(self.ast.loops[p].extent) for p in leaf.path[len(path) :])
        self._record(path, store, written, loads, 2 * trips if any(leaf.counts) else 0)

    def _collect(self, index: int, conditions: tuple[Condition, ...], loads: list[BufferLoad]) -> None:
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
                    indices = self._whole(data["source"], indices)
                    access = Access(self.buffer(data["source"]), [self.expression(i) for i in indices])
                    loads.append(BufferLoad(access, indices, held))
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
        loops: set[int] = set()
        stack, seen = [index], set[int]()
        while stack:
            item = stack.pop()
            if item in seen:
                continue
            seen.add(item)
            if item in self.loop_of:
                loops.add(self.loop_of[item][0])
            elif item in self.value_of:
                stack.append(self.value_of[item])
            else:
                stack += operands(self, item)
        return frozenset(loops)


def operands(expressions: Expressions, index: int) -> list[int]:
    """Nodes of the operands of an expression."""
    data = expressions.nodes[index].get("data")
    if type(data) is not dict:
        return []
    operands = [data[k] for k in _OPERANDS if k in data]
    for name in ("args", "indices"):
        operands += expressions.array(data[name]) if name in data else []
    return [i for i in operands if type(i) is int]
