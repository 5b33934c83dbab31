"""The compact AST of a tensor program (CDMPP section 4.1): one leaf per computation, with its loop path.

The lowered TIR is walked once, from TVM's JSON. Inner nodes (loops) are folded into the leaves below
them; what remains of the tree is each leaf's depth and pre-order rank. Blocks of scheduled, not yet
flattened TIR are followed by substituting their iteration variables, so no lowering pass is needed.

A leaf is a ``BufferStore``, or an evaluated hardware intrinsic (a tensorised program stores nothing
itself). The initial value of a reduction is a leaf of its own that runs once per output element.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cdmpp.errors import InvalidProgramError
from cdmpp.features.affine import (
    Linear,
    Num,
    add,
    floor_divide,
    floor_modulo,
    hull,
    maximum,
    minimum,
    multiply,
    negate,
)
from cdmpp.features.tvm_json import HINT, Nodes, prim_funcs

#: Kinds of arithmetic that are counted, per evaluation of the stored expression.
OPERATIONS = (
    "float_add", "float_mul", "float_fma", "float_div", "float_compare", "float_math", "float_cast",
    "int_add", "int_mul", "int_div", "int_compare", "int_other", "select", "other_call",
)  # fmt: skip
_OP = {name: i for i, name in enumerate(OPERATIONS)}
_ARITHMETIC = {
    "Add": "add", "Sub": "add", "Mul": "mul", "Div": "div", "Mod": "div", "FloorDiv": "div", "FloorMod": "div",
    "Min": "compare", "Max": "compare", "EQ": "compare", "NE": "compare", "LT": "compare", "LE": "compare",
    "GT": "compare", "GE": "compare",
}  # fmt: skip
_LOGIC = frozenset({"And", "Or", "Not"})
#: Enough for any schedule of ours; a deeper nest is refused before Python's stack ends.
MAX_DEPTH = 400
#: Expression nodes visited in one program: shared nodes can be chained to be visited 2^n times.
MAX_STEPS = 1_000_000


@dataclass(slots=True)
class Loop:
    """One loop on the path to a leaf."""

    name: str
    extent: Num
    kind: str  # serial, parallel, vectorized, unrolled, or a thread tag such as blockIdx.x
    unroll_step: int = 0
    reduces: bool = False  # feeds a reduction variable of a block


@dataclass(slots=True)
class Buffer:
    """One tensor of the program."""

    name: str
    dtype: str
    scope: str
    shape: list[Num]
    is_parameter: bool


@dataclass(slots=True)
class Access:
    """A read or write of a buffer: one ``Linear`` per dimension."""

    buffer: Buffer
    indices: list[Linear]
    is_write: bool = False
    also_read: bool = False


@dataclass(slots=True)
class Leaf:
    """One computation: its loops (outermost first), store, reads and arithmetic."""

    name: str
    path: tuple[int, ...]
    store: Access
    reads: list[Access]
    counts: list[int]
    compute_dtype: str
    rank: int
    depth: int
    is_init: bool = False
    predicated: Num = False
    intrinsic: str = ""
    reduce_loops: frozenset[int] = frozenset()

    @property
    def position(self) -> int:
        """Place in the depth-first sequence that marks both entry and exit: 2 * rank - depth."""
        return 2 * self.rank - self.depth


@dataclass(slots=True)
class CompactAST:
    """Leaves in pre-order, with the loops they refer to by index."""

    leaves: list[Leaf] = field(default_factory=list)
    loops: list[Loop] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    #: (rank, depth, loop index or None, leaf index or None) of every inner node and leaf, for printing.
    outline: list[tuple[int, int, int | None, int | None]] = field(default_factory=list)


def build_ast(
    nodes: Nodes, root: int, *, function: str | None = None, bindings: Mapping[str, Num] | None = None
) -> CompactAST:
    """Build the compact AST of one PrimFunc.

    Parameters
    ----------
    nodes, root
        As :func:`cdmpp.features.tvm_json.load` returns them.
    function : str, optional
        Which PrimFunc, when the module has several.
    bindings : mapping, optional
        Values of the symbolic sizes by name (integers, or int64 arrays with one element per shape).

    Raises
    ------
    InvalidProgramError
        No (or several) PrimFunc, a symbolic size without a value, a while loop, broken references.
    """
    functions = prim_funcs(nodes, root)
    if function is None and len(functions) != 1:
        raise InvalidProgramError(
            f"the module has {len(functions)} PrimFuncs: {', '.join(sorted(functions)[:8]) or 'none'}",
            hint="pass one PrimFunc, or name the function",
        )
    name = function if function is not None else next(iter(functions))
    if name not in functions:
        raise InvalidProgramError(f"no PrimFunc {name!r} in the module", hint=", ".join(sorted(functions)))
    walker = _Walker(nodes, bindings or {})
    try:
        walker.function(functions[name])
    except (KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidProgramError(f"the program's nodes are broken ({error!r})", hint=HINT) from None
    if not walker.ast.leaves:
        raise InvalidProgramError("the program stores nothing", hint="there is no computation to predict")
    return walker.ast


class _Walker:
    """One pass over a PrimFunc; ``env`` maps a variable's node index to its value."""

    def __init__(self, nodes: Nodes, bindings: Mapping[str, Num]) -> None:
        self.nodes = nodes
        self.bindings = bindings
        self.ast = CompactAST()
        self.env: dict[int, Linear] = {}
        self.buffers: dict[int, Buffer] = {}
        self.parameters: set[int] = set()
        self.path: list[int] = []
        self.thread_loops: dict[str, int] = {}
        self.predicates: Num = 0
        self.rank = 0
        self.depth = 0
        self.block = ""
        self.steps_left = MAX_STEPS

    # -- small readers -------------------------------------------------------------------------------
    def data(self, index: int) -> Any:
        return self.nodes[index]["data"]

    def array(self, index: int) -> list[int]:
        data = self.nodes[index].get("data")
        return data if type(data) is list else []

    def dtype(self, index: int) -> str:
        """Element type of an expression node."""
        node = self.nodes[self.nodes[index]["data"]["ty"]]
        data = node["data"]
        return str(data["dtype"]) if type(data["dtype"]) is str else str(self.data(data["dtype"])["dtype"])

    def function(self, index: int) -> None:
        data = self.data(index)
        self.parameters = set(self.array(data["params"]))
        self.statement(data["body"])

    # -- statements ----------------------------------------------------------------------------------
    def statement(self, index: int) -> None:
        node = self.nodes[index]
        kind = node["type"].rpartition(".")[2]
        handler = getattr(self, "on_" + kind, None)
        if handler is None:
            raise InvalidProgramError(f"TIR statement {kind} cannot be encoded", hint=HINT)
        handler(node["data"])

    def on_SeqStmt(self, data: dict[str, Any]) -> None:
        for child in self.array(data["seq"]):
            self.statement(child)

    def on_For(self, data: dict[str, Any]) -> None:
        extent = self.expression(data["extent"]).high
        binding = self.nodes[data["thread_binding"]]
        kind = ("serial", "parallel", "vectorized", "unrolled", "thread")[data["kind"]]
        if kind == "thread":
            kind = str(self.data(binding["data"]["thread_tag"]))
        unroll = 0
        pairs = self.array(data["annotations"])
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            if self.data(key) in ("pragma_auto_unroll_max_step", "auto_unroll_max_step"):
                unroll = int(self.expression(value).high)
        self.loop(data["loop_var"], extent, kind, data["body"], unroll, self.expression(data["min"]).low)

    def loop(self, var: int, extent: Num, kind: str, body: int, unroll: int = 0, start: Num = 0) -> None:
        """Enter a loop, walk its body, leave it."""
        shared = self.thread_loops.get(kind)
        if shared is not None:
            # The same hardware thread bound again inside: one loop, not a product of two.
            self.env[var] = self.env_of_loop(shared, start)
            self.statement(body)
            return
        loops = self.ast.loops
        name = str(self.data(self.data(var)["name"]))
        loops.append(Loop(name, extent, kind, unroll))
        me = len(loops) - 1
        self.env[var] = self.env_of_loop(me, start)
        self.ast.outline.append((self.enter(), self.depth, me, None))
        self.path.append(me)
        if "Idx" in kind or "vthread" in kind:
            self.thread_loops[kind] = me
        self.statement(body)
        self.thread_loops.pop(kind, None)
        self.path.pop()
        self.depth -= 1

    def env_of_loop(self, loop: int, start: Num) -> Linear:
        return Linear(start, start + self.ast.loops[loop].extent - 1, {loop: 1})

    def enter(self) -> int:
        """Step one level down: the new node's pre-order rank (the root has 0)."""
        self.rank += 1
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise InvalidProgramError(f"loops nest deeper than {MAX_DEPTH}", hint=HINT)
        return self.rank

    def on_SBlockRealize(self, data: dict[str, Any]) -> None:
        block = self.data(data["block"])
        reduce_loops: set[int] = set()
        for iter_var, value in zip(
            self.array(block["iter_vars"]), self.array(data["iter_values"]), strict=True
        ):
            info = self.data(iter_var)
            bound = self.expression(value)
            self.env[info["var"]] = bound
            if info["iter_type"] == 2:
                reduce_loops.update(bound.steps)
        for loop in reduce_loops:
            self.ast.loops[loop].reduces = True
        before = self.predicates
        self.predicates = before + (1 - self.holds(data["predicate"]))
        outer, self.block = self.block, str(self.data(block["name_hint"]))
        for buffer in self.array(block["alloc_buffers"]):
            self.buffer(buffer)
        for match in self.array(block["match_buffers"]):
            region = self.data(match)
            self.buffers[region["buffer"]] = self.buffer(self.data(region["source"])["source"])
        if self.nodes[block["init"]]["type"] != "None":
            self.init_of = True
            self.statement(block["init"])
            self.init_of = False
        self.statement(block["body"])
        self.block = outer
        self.predicates = before

    init_of = False

    def holds(self, index: int) -> Num:
        """1 where a condition is true for every iteration, as far as intervals tell; 0 elsewhere.

        A compiler drops conditions that it can prove; a vector that depended on how much was proved
        would differ between a concrete program and its structural class.
        """
        node = self.nodes[index]
        kind, data = node["type"].rpartition(".")[2], node.get("data")
        if kind == "IntImm":
            return int(bool(self.data(data["value"])))
        if kind == "And":
            return minimum(self.holds(data["a"]), self.holds(data["b"]))
        if kind == "Or":
            return maximum(self.holds(data["a"]), self.holds(data["b"]))
        if kind not in ("LT", "LE", "GT", "GE", "EQ"):
            return 0
        a, b = self.expression(data["a"]), self.expression(data["b"])
        if kind in ("GT", "GE"):
            a, b = b, a
        if kind in ("LT", "GT"):
            return 1 * (a.high < b.low)
        if kind in ("LE", "GE"):
            return 1 * (a.high <= b.low)
        return 1 * ((a.low == a.high) & (b.low == b.high) & (a.low == b.low))

    def on_SBlock(self, data: dict[str, Any]) -> None:
        self.statement(data["body"])

    def on_IfThenElse(self, data: dict[str, Any]) -> None:
        before = self.predicates
        self.predicates = before + (1 - self.holds(data["condition"]))
        self.statement(data["then_case"])
        if self.nodes[data["else_case"]]["type"] != "None":
            self.statement(data["else_case"])
        self.predicates = before

    def on_AttrStmt(self, data: dict[str, Any]) -> None:
        node = self.nodes[data["node"]]
        if self.data(data["attr_key"]) == "thread_extent" and node["type"].endswith("IterVar"):
            tag = str(self.data(node["data"]["thread_tag"]))
            self.loop(node["data"]["var"], self.expression(data["value"]).high, tag, data["body"])
        else:
            self.statement(data["body"])

    def on_Bind(self, data: dict[str, Any]) -> None:
        self.env[data["var"]] = self.expression(data["value"])

    def on_LetStmt(self, data: dict[str, Any]) -> None:
        self.on_Bind(data)
        self.statement(data["body"])

    def on_AllocBuffer(self, data: dict[str, Any]) -> None:
        self.buffer(data["buffer"])
        if "body" in data:
            self.statement(data["body"])

    on_DeclBuffer = on_AllocBuffer

    def on_While(self, data: dict[str, Any]) -> None:
        raise InvalidProgramError(
            "a while loop has no trip count before the run", hint="only counted loops can be encoded"
        )

    def on_AssertStmt(self, data: dict[str, Any]) -> None:
        if "body" in data:
            self.statement(data["body"])

    def on_Evaluate(self, data: dict[str, Any]) -> None:
        value = self.nodes[data["value"]]
        if value["type"] != "ir.Call":
            return
        name = self.call_name(value["data"])
        if not any(mark in name for mark in ("mma", "matrix", "extern", "packed", "ptx", "atomic", "dp4a")):
            return
        counts, reads = [0] * len(OPERATIONS), []
        self.value(data["value"], counts, reads)
        accesses = reads or [Access(Buffer(name, "float32", "global", [1], False), [Linear(0, 0)])]
        self.leaf(accesses[0], accesses[1:], counts, "float32", intrinsic=name)

    def on_BufferStore(self, data: dict[str, Any]) -> None:
        counts: list[int] = [0] * len(OPERATIONS)
        reads: list[Access] = []
        before = self.predicates
        indices = [self.expression(i) for i in self.array(data["indices"])]
        self.value(data["value"], counts, reads)
        store = Access(self.buffer(data["buffer"]), indices, is_write=True)
        self.leaf(store, reads, counts, self.compute_type)
        self.predicates = before

    compute_type = "float32"

    def leaf(
        self, store: Access, reads: list[Access], counts: list[int], dtype: str, *, intrinsic: str = ""
    ) -> None:
        distinct: list[Access] = []
        for read in reads:
            if read.buffer is store.buffer:
                store.also_read = True
            elif not any(read.buffer is d.buffer and _same(read.indices, d.indices) for d in distinct):
                distinct.append(read)
        path = tuple(self.path)
        if self.init_of:
            path = tuple(p for p in path if not self.ast.loops[p].reduces)
            reduces: frozenset[int] = frozenset()
        else:
            stored = set().union(*(i.steps for i in store.indices)) if store.indices else set()
            reduces = frozenset(p for p in path if self.ast.loops[p].reduces and p not in stored)
            if not self.block:
                reduces = frozenset(p for p in path if p not in stored)
        rank = self.enter()
        self.ast.leaves.append(
            Leaf(
                self.block or store.buffer.name, path, store, distinct, counts, dtype, rank, self.depth,
                self.init_of, self.predicates > 0, intrinsic, reduces,
            )
        )  # fmt: skip
        self.ast.outline.append((rank, self.depth, None, len(self.ast.leaves) - 1))
        self.depth -= 1

    def buffer(self, var: int) -> Buffer:
        known = self.buffers.get(var)
        if known is None:
            data = self.data(var)
            kind = self.data(data["ty"])
            shape = [self.expression(i).high for i in self.array(kind["shape"])]
            known = Buffer(
                str(self.data(data["name"])), str(self.data(kind["dtype"])["dtype"]),
                str(self.data(kind["storage_scope"])).partition(".")[0] or "global",
                shape, var in self.parameters,
            )  # fmt: skip
            self.buffers[var] = known
            self.ast.buffers.append(known)
        return known

    # -- integer expressions: bounds and indices -------------------------------------------------------
    def expression(self, index: int) -> Linear:
        """Value of an index, extent or bound."""
        self.steps_left -= 1
        if self.steps_left < 0:
            raise InvalidProgramError("the program's expressions are too large to encode", hint=HINT)
        node = self.nodes[index]
        kind, data = node["type"], node.get("data")
        if kind == "ir.IntImm":
            value = self.nodes[data["value"]]["data"]
            return Linear(value, value)
        if kind == "ir.Var":
            known = self.env.get(index)
            if known is not None:
                return known
            name = str(self.data(data["name"]))
            if name not in self.bindings:
                raise InvalidProgramError(
                    f"the size {name!r} is symbolic", hint="bind it: only static shapes have one latency"
                )
            value = self.bindings[name]
            self.env[index] = Linear(value, value)
            return self.env[index]
        if kind == "int":
            return Linear(data, data)
        kind = kind.rpartition(".")[2]
        if kind in ("Cast",):
            return self.expression(data["value"])
        if kind in ("Add", "Sub", "Mul", "FloorDiv", "Div", "FloorMod", "Mod", "Min", "Max"):
            a, b = self.expression(data["a"]), self.expression(data["b"])
            if kind == "Add":
                return add(a, b)
            if kind == "Sub":
                return add(a, negate(b))
            if kind == "Mul":
                return multiply(a, b)
            if kind in ("FloorDiv", "Div"):
                return floor_divide(a, b)
            if kind in ("FloorMod", "Mod"):
                return floor_modulo(a, b)
            if a.is_constant() and b.is_constant():
                best = (minimum if kind == "Min" else maximum)(a.low, b.low)
                return Linear(best, best)
            return hull(a, b)
        if kind == "TensorLoad":
            inner = Linear(0, 0)
            for i in self.array(data["indices"]):
                inner = hull(inner, self.expression(i))
            return Linear(0, 1 << 48, inner.steps, True)
        if kind in ("EQ", "NE", "LT", "LE", "GT", "GE", "And", "Or"):
            return hull(hull(Linear(0, 1), self.expression(data["a"])), self.expression(data["b"]))
        if kind == "Select":
            return hull(self.expression(data["true_value"]), self.expression(data["false_value"]))
        if kind == "Call":
            parts = [self.expression(i) for i in self.array(data["args"])]
            if self.call_name(data).endswith("if_then_else"):
                return hull(parts[1], parts[2])
            whole = Linear(0, 0)
            for part in parts:
                whole = hull(whole, part)
            return Linear(0, 1 << 48, whole.steps, True)
        if kind == "Ramp":
            base, lanes = self.expression(data["base"]), self.expression(data["lanes"])
            return Linear(base.low, base.high + lanes.high - 1, base.steps, base.indirect)
        raise InvalidProgramError(f"index expression {kind} cannot be encoded", hint=HINT)

    def call_name(self, data: dict[str, Any]) -> str:
        op = self.nodes[data["op"]]
        return str(op["data"]) if op["type"] == "ir.Op" else str(op["type"])

    # -- value expressions: arithmetic and reads ---------------------------------------------------------
    def value(self, index: int, counts: list[int], reads: list[Access]) -> None:
        """Count the arithmetic of a stored value and collect its reads (indices are not arithmetic)."""
        self.compute_type = ""
        stack = [index]
        nodes = self.nodes
        while stack:
            item = stack.pop()
            self.steps_left -= 1
            if self.steps_left < 0:
                raise InvalidProgramError("the program's expressions are too large to encode", hint=HINT)
            node = nodes[item]
            kind, data = node["type"].rpartition(".")[2], node.get("data")
            if kind == "TensorLoad":
                reads.append(
                    Access(self.buffer(data["source"]), [self.expression(i) for i in self.array(data["indices"])])
                )
                if not self.compute_type:
                    self.compute_type = self.dtype(item)
            elif kind in _ARITHMETIC:
                what = _ARITHMETIC[kind]
                dtype = self.dtype(data["a"])
                if "float" in dtype:
                    self.compute_type = dtype
                    counts[_OP["float_" + what]] += 1
                    if kind == "Add" and "Mul" in (
                        nodes[data["a"]]["type"].rpartition(".")[2], nodes[data["b"]]["type"].rpartition(".")[2],
                    ):  # fmt: skip
                        counts[_OP["float_fma"]] += 1
                else:
                    self.compute_type = self.compute_type or dtype
                    counts[_OP["int_" + what]] += 1
                stack.append(data["b"])
                stack.append(data["a"])
            elif kind == "Cast":
                if "float" in self.dtype(item) or "float" in self.dtype(data["value"]):
                    counts[_OP["float_cast"]] += 1
                else:
                    counts[_OP["int_other"]] += 1
                stack.append(data["value"])
            elif kind == "Call":
                args = self.array(data["args"])
                name = self.call_name(data)
                if name.endswith("if_then_else"):
                    # The condition is a predicate of the leaf, not arithmetic.
                    self.predicates = self.predicates + (1 - self.holds(args[0]))
                    args = args[1:]
                elif name.startswith("tirx.") and "float" in self.dtype(item):
                    counts[_OP["float_math"]] += 1
                else:
                    counts[_OP["other_call"]] += 1
                stack.extend(a for a in reversed(args) if nodes[a]["type"] != "ffi.String")
            elif kind == "Select":
                counts[_OP["select"]] += 1
                stack.extend((data["false_value"], data["true_value"], data["condition"]))
            elif kind in _LOGIC:
                counts[_OP["int_other"]] += 1
                stack.extend(data[k] for k in ("b", "a") if k in data)
            elif kind in ("Broadcast", "Ramp"):
                stack.append(data["value" if kind == "Broadcast" else "base"])
            elif kind == "Var" and self.nodes[data["ty"]]["type"].endswith("BufferType"):
                reads.append(Access(self.buffer(item), [Linear(0, 0)]))
        if not self.compute_type:
            self.compute_type = "int32" if "Int" in nodes[index]["type"] else "float32"


def _same(a: list[Linear], b: list[Linear]) -> bool:
    if len(a) != len(b):
        return False
    for x, y in zip(a, b, strict=True):
        if x is y:
            continue
        if x.steps.keys() != y.steps.keys():
            return False
        # Arrays: offsets that agree for every shape of the class; scalars: plain equality.
        if not bool(_all(x.low == y.low)) or not bool(_all(x.high == y.high)):
            return False
    return True


def _all(value: Any) -> Any:
    return value.all() if hasattr(value, "all") else value


__all__ = ["OPERATIONS", "Access", "Buffer", "CompactAST", "Leaf", "Loop", "build_ast"]
