"""Compact AST of TVM JSON: one walk over the statements of a PrimFunc.

Blocks of scheduled, not yet flattened TIR are followed by substituting their iteration variables, so no
lowering pass is needed. A leaf is a ``BufferStore``, or an evaluated hardware intrinsic (a tensorised
program stores nothing itself). The initial value of a reduction is a leaf of its own that runs once per
output element.

A tensorised block holds one call in place of its inner loops; what it reads and writes stands in the
block's regions. Loops of the kind ``tensorized`` are put in their place (:func:`loop_nest`), so that a
tensor-core tile of 16 x 16 x 16 counts the same arithmetic and bytes as the loops would.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from cdmpp.errors import InvalidProgramError
from cdmpp.features.affine import AffineRange, Num
from cdmpp.features.ast import OPERATIONS, Access, Buffer, CompactAST, Leaf, Loop
from cdmpp.features.expressions import Expressions, check_extents
from cdmpp.programs.tvm_json import HINT, Nodes, find_prim_func

KIND = "tensorized"
#: Marks in the name of an intrinsic that multiplies two tensors.
_CONTRACTS = ("mma", "dp4a", "dot")


@dataclass
class Region:
    """A box of a buffer: lowest corner (over the loops) and extents."""

    buffer: Buffer
    corner: list[AffineRange]
    extents: list[Num]

    @property
    def elements(self) -> int:
        """Elements of the box."""
        return math.prod(int(e) for e in self.extents)


@dataclass
class Nest:
    """The loops of an intrinsic and its accesses, numbered from ``first_loop``."""

    store: Access
    reads: list[Access]
    loops: list[Loop] = field(default_factory=list)
    contracts: bool = False


def loop_nest(name: str, write: Region, reads: list[Region], first_loop: int) -> Nest:
    """Loops and accesses of one evaluation of an intrinsic, whose name says whether it multiplies.

    ``reads``: what it reads; the written buffer among them where it accumulates. ``first_loop``: number of the
    program's loops so far: the new ones count on from here.
    """
    others = [r for r in reads if r.buffer is not write.buffer]
    if any(mark in name for mark in _CONTRACTS) and len(others) >= 2:
        sizes = contraction_sizes(write.elements, others[0].elements, others[1].elements)
        m, n, k = range(first_loop, first_loop + 3)
        loops = [Loop(f"{KIND}_{axis}", size, KIND) for axis, size in zip("mnk", sizes, strict=True)]
        loops[2].reduces = True
        numbered = dict(zip((m, n, k), sizes, strict=True))
        axes = [(others[0], (m, k)), (others[1], (k, n)), *((other, (m, n)) for other in others[2:])]
        accesses = [_access(region, {p: numbered[p] for p in nest}) for region, nest in axes]
        store = _access(write, {m: sizes[0], n: sizes[1]})
        if len(others) < len(reads):
            accesses.append(store)
        return Nest(store, accesses, loops, contracts=True)
    wide = [int(e) for e in write.extents if int(e) > 1]
    loops = [Loop(f"{KIND}_{i}", size, KIND) for i, size in enumerate(wide)]
    numbered = {first_loop + i: size for i, size in enumerate(wide)}
    return Nest(_access(write, numbered), [_access(r, numbered) for r in reads], loops)


def contraction_sizes(out: int, left: int, right: int) -> tuple[int, int, int]:
    """m, n, k of ``out[m, n] += left[m, k] * right[k, n]`` from the numbers of elements.

    Thread layouts (32 lanes of 8 registers) hide the shape but not the counts. Where they fit no
    contraction, m and k keep the amount of arithmetic.
    """
    m, n = math.isqrt(out * left // right), math.isqrt(out * right // left)
    k = math.isqrt(left * right // out)
    if (m * n, m * k, k * n) == (out, left, right):
        return m, n, k
    return out, 1, max(1, math.isqrt(left * right // out))


def _access(region: Region, loops: dict[int, int]) -> Access:
    """The region as an access that the loops sweep: one loop to a dimension where the sizes say so."""
    wide = [d for d, extent in enumerate(region.extents) if int(extent) > 1]
    matched = _match([int(region.extents[d]) for d in wide], loops)
    indices = []
    for d, (corner, extent) in enumerate(zip(region.corner, region.extents, strict=True)):
        steps: dict[int, Num] = dict(corner.steps)
        if d in wide:
            steps |= dict.fromkeys([matched[wide.index(d)]] if matched else loops, 1)
        indices.append(AffineRange(corner.low, corner.high + extent - 1, steps, corner.indirect))
    return Access(region.buffer, indices)


def _match(extents: list[int], loops: dict[int, int]) -> list[int] | None:
    for order in (list(loops), list(reversed(loops))):
        if [loops[p] for p in order] == extents:
            return order
    return None


#: Loops around each other: enough for any schedule of ours.
MAX_DEPTH = 100
#: Statements inside each other (loops, blocks, sequences), refused before Python's stack ends.
MAX_NESTING = 250
#: A tuned convolution has some twenty; the network's time grows with the square.
MAX_LEAVES = 1024

#: Kinds of loops in TVM's order.
LOOP_KINDS = ("serial", "parallel", "vectorized", "unrolled", "thread")
#: Annotations that bound the body up to which a loop is unrolled.
UNROLLS = ("pragma_auto_unroll_max_step", "auto_unroll_max_step")
#: Marks in the name of an intrinsic that computes or moves something, and of one that only waits.
_COMPUTES = ("mma", "matrix", "fragment", "extern", "packed", "ptx", "atomic", "dp4a")
_WAITS = ("wait", "commit", "barrier", "fence")


def build_ast(
    nodes: Nodes, root: int, *, function: str | None = None, bindings: Mapping[str, Num] | None = None
) -> CompactAST:
    """Build the compact AST of one PrimFunc, from the result of :func:`cdmpp.programs.tvm_json.load`.

    ``function``: which PrimFunc, when the module has several. ``bindings``: values of the symbolic sizes by name
    (integers, or int64 arrays with one element per shape).
    Raises InvalidProgramError: no (or several) PrimFunc, a symbolic size without a value, a while loop, broken
    references.
    """
    return Walker(nodes, bindings or {}).build(root, function)


@contextmanager
def broken_nodes() -> Iterator[None]:
    """Errors of nodes that do not fit together are :class:`InvalidProgramError`."""
    try:
        yield
    except InvalidProgramError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RecursionError) as error:
        raise InvalidProgramError(f"the program's nodes are broken ({error!r:.200})", hint=HINT) from None


class Walker(Expressions):
    """One pass over the statements of a PrimFunc; arguments as of :func:`build_ast`."""

    def __init__(self, nodes: Nodes, bindings: Mapping[str, Num]) -> None:
        super().__init__(nodes, bindings)
        self._path: list[int] = []
        #: Hardware thread tag -> the loop that is bound to it here.
        self._thread_loops: dict[str, int] = {}
        self._rank = 0
        self._depth = 0
        self._nesting = 0
        self._block = ""
        #: Nodes of the regions that the present block writes and reads.
        self._regions: tuple[int, int] | None = None
        self._in_init = False

    def build(self, root: int, function: str | None = None) -> CompactAST:
        """The compact AST; arguments and errors as of :func:`build_ast`. A walker builds one."""
        with broken_nodes():
            self.function(find_prim_func(self.nodes, root, function))
        if not self.ast.leaves:
            raise InvalidProgramError("the program stores nothing", hint="there is no computation to predict")
        return self.ast

    def function(self, index: int) -> None:
        """Walk a PrimFunc."""
        data = self.data(index)
        self.parameters = set(self.array(data["params"]))
        self.statement(data["body"])

    def statement(self, index: int) -> None:
        """Walk one statement."""
        self.spend(1)
        node = self.nodes[index]
        kind = node["type"].rpartition(".")[2]
        handler = _STATEMENTS.get(kind)
        if handler is None:
            raise InvalidProgramError(f"TIR statement {kind[:80]} cannot be encoded", hint=HINT)
        self._nesting += 1
        if self._nesting > MAX_NESTING:
            raise InvalidProgramError(f"statements nest deeper than {MAX_NESTING}", hint=HINT)
        getattr(self, handler)(node["data"])
        self._nesting -= 1

    def _is_none(self, index: int) -> bool:
        return bool(self.nodes[index]["type"] == "None")

    # -- loops -------------------------------------------------------------------------------------------
    def for_loop(self, data: dict[str, Any]) -> None:
        """For: serial, parallel, vectorized, unrolled, or bound to a hardware thread."""
        extent = self.expression(data["extent"]).high
        binding = self.nodes[data["thread_binding"]]
        kind = LOOP_KINDS[data["kind"]]
        if kind == "thread":
            kind = str(self.data(binding["data"]["thread_tag"]))
        unroll = 0
        pairs = self.array(data["annotations"])
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            if self.data(key) in UNROLLS:
                unroll = int(self.expression(value).high)
        step: Num = 1
        if "step" in data and not self._is_none(data["step"]):
            step = self.expression(data["step"]).high
            check_extents([step], "a loop's step")
            extent = -(-extent // step)
        start = self.expression(data["min"]).low
        self.loop(data["loop_var"], self._name(data["loop_var"]), extent, kind, data["body"], unroll, start, step)

    def _name(self, var: int) -> str:
        return str(self.data(self.data(var)["name"]))

    def loop(
        self, var: int, name: str, extent: Num, kind: str, body: int, unroll: int = 0, start: Num = 0, step: Num = 1
    ) -> None:
        """Enter a loop, walk its body, leave it."""
        loops = self.ast.loops
        shared = self._thread_loops.get(kind)
        if shared is not None:
            # The same hardware thread bound again inside: one loop, not a product of two.
            self.env[var] = AffineRange(start, start + loops[shared].extent - 1, {shared: 1})
            self.statement(body)
            return
        check_extents([extent], f"loop {name[:40]!r}")
        me = len(loops)
        loops.append(Loop(name, extent, kind, unroll))
        self.env[var] = AffineRange(start, start + (extent - 1) * step, {me: step})
        self.ast.outline.append((self._enter(), self._depth, me, None))
        self._path.append(me)
        if "Idx" in kind or "vthread" in kind:
            self._thread_loops[kind] = me
        self.statement(body)
        self._thread_loops.pop(kind, None)
        self._path.pop()
        self._depth -= 1

    def _enter(self) -> int:
        """Step one level down: the new node's pre-order rank (the root has 0)."""
        self._rank += 1
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise InvalidProgramError(f"loops nest deeper than {MAX_DEPTH}", hint=HINT)
        return self._rank

    # -- blocks and conditions ---------------------------------------------------------------------------
    def block_realize(self, data: dict[str, Any]) -> None:
        """SBlockRealize: bind the block's variables, then its initial value and its body."""
        block = self.data(data["block"])
        variables, values = self.array(block["iter_vars"]), self.array(data["iter_values"])
        bound = []
        for iter_var, value in zip(variables, values, strict=True):
            info = self.data(iter_var)
            bound.append((info["var"], self.expression(value), info["iter_type"]))
        self.block(block, bound, data["predicate"])

    def block(self, block: dict[str, Any], bound: Iterable[tuple[int, AffineRange, int]], predicate: int) -> None:
        """A block, given the value and the type of each of its variables."""
        reduce_loops: set[int] = set()
        for var, value, iter_type in bound:
            self.env[var] = value
            if iter_type == 2:
                reduce_loops.update(value.steps)
        for loop in reduce_loops:
            self.ast.loops[loop].reduces = True
        before = self.predicates
        self.predicates = before + (1 - self.holds(predicate))
        outer = self._block, self._regions
        self._block = str(self.data(block["name_hint"]))
        self._regions = (block["writes"], block["reads"]) if "writes" in block else None
        for buffer in self.array(block["alloc_buffers"]):
            self.buffer(buffer)
        for match in self.array(block["match_buffers"]):
            region = self.data(match)
            self.buffers[region["buffer"]] = self.buffer(self.data(region["source"])["source"])
        if not self._is_none(block["init"]):
            self._in_init = True
            self.statement(block["init"])
            self._in_init = False
        self.statement(block["body"])
        self._block, self._regions = outer
        self.predicates = before

    def if_then_else(self, data: dict[str, Any]) -> None:
        """IfThenElse: both cases are leaves under a predicate."""
        before = self.predicates
        self.predicates = before + (1 - self.holds(data["condition"]))
        self.statement(data["then_case"])
        if not self._is_none(data["else_case"]):
            self.statement(data["else_case"])
        self.predicates = before

    # -- statements around others ------------------------------------------------------------------------
    def sequence(self, data: dict[str, Any]) -> None:
        """SeqStmt."""
        for child in self.array(data["seq"]):
            self.statement(child)

    def attribute(self, data: dict[str, Any]) -> None:
        """AttrStmt: a thread extent is a loop, of a virtual thread too; every other attribute passes through."""
        node = self.nodes[data["node"]]
        if self.data(data["attr_key"]) in ("thread_extent", "virtual_thread") and node["type"].endswith("IterVar"):
            tag = str(self.data(node["data"]["thread_tag"]))
            var = node["data"]["var"]
            self.loop(var, self._name(var), self.expression(data["value"]).high, tag, data["body"])
        else:
            self.statement(data["body"])

    def bind(self, data: dict[str, Any]) -> None:
        """Bind, LetStmt: a name for an expression."""
        if "float" in self.dtype(data["value"]):
            self.values[data["var"]] = data["value"]
        else:
            self.env[data["var"]] = self.expression(data["value"])
        self.body(data)

    def allocate(self, data: dict[str, Any]) -> None:
        """AllocBuffer, DeclBuffer."""
        self.buffer(data["buffer"])
        self.body(data)

    def body(self, data: dict[str, Any]) -> None:
        """A statement that only wraps another."""
        if "body" in data:
            self.statement(data["body"])

    def while_loop(self, data: dict[str, Any]) -> None:
        """While: refused."""
        raise InvalidProgramError(
            "a while loop has no trip count before the run", hint="only counted loops can be encoded"
        )

    # -- leaves ------------------------------------------------------------------------------------------
    def evaluate(self, data: dict[str, Any]) -> None:
        """Evaluate: a leaf when it calls an intrinsic that computes."""
        value = self.nodes[data["value"]]
        if value["type"] != "ir.Call":
            return
        name = self.call_name(value["data"])
        for argument in self.array(value["data"]["args"])[:1]:
            # An external function is known by its first argument.
            text = self.nodes[argument]
            name += f":{self.data(text['data']['value'])}" if text["type"].endswith("StringImm") else ""
        if not any(mark in name for mark in _COMPUTES) or any(mark in name for mark in _WAITS):
            return
        writes, reads = ([self._region(i) for i in self.array(r)] for r in self._regions or (0, 0))
        if writes:
            self._tensorized(name, writes[0], reads)
            return
        # Flat TIR: what the call is given is all that is known.
        counts = [0] * len(OPERATIONS)
        given: list[Access] = []
        self.value(data["value"], counts, given)
        accesses = given or [Access(Buffer(name, "float32", "global", [1], False), [AffineRange(0, 0)])]
        self._leaf(accesses[0], accesses[1:], counts, "float32", intrinsic=name)

    def _region(self, index: int) -> Region:
        data = self.data(index)
        ranges = [self.data(r) for r in self.array(data["region"])]
        corner = [self.expression(r["min"]) for r in ranges]
        extents = [self.expression(r["extent"]).high for r in ranges]
        check_extents(extents, "a region")
        return Region(self.buffer(data["source"]), corner, extents)

    def _tensorized(self, name: str, write: Region, reads: list[Region]) -> None:
        """A leaf with the loops that the intrinsic replaced."""
        nest = loop_nest(name, write, reads, len(self.ast.loops))
        counts = [0] * len(OPERATIONS)
        dtype = (nest.reads[0] if nest.reads else nest.store).buffer.dtype
        if nest.contracts:
            kind = "float" if "float" in dtype else "int"
            for operation in ("add", "mul", *(["fma"] if kind == "float" else [])):
                counts[OPERATIONS.index(f"{kind}_{operation}")] = 1
        self._path.extend(range(len(self.ast.loops), len(self.ast.loops) + len(nest.loops)))
        self.ast.loops.extend(nest.loops)
        self._leaf(nest.store, nest.reads, counts, dtype, intrinsic=name)
        del self._path[len(self._path) - len(nest.loops) :]

    def store(self, data: dict[str, Any]) -> None:
        """BufferStore: a leaf."""
        counts = [0] * len(OPERATIONS)
        reads: list[Access] = []
        before = self.predicates
        indices = [self.expression(i) for i in self.array(data["indices"])]
        self.value(data["value"], counts, reads)
        store = Access(self.buffer(data["buffer"]), indices)
        self._leaf(store, reads, counts, self.compute_type)
        self.ast.leaves[-1].library_calls, self.ast.leaves[-1].call_reads = self.library_calls, self.call_reads
        self.predicates = before

    def _leaf(self, store: Access, reads: list[Access], counts: list[int], dtype: str, *, intrinsic: str = "") -> None:
        loops = self.ast.loops
        if len(self.ast.leaves) >= MAX_LEAVES:
            raise InvalidProgramError(f"the program has more than {MAX_LEAVES} computations", hint=HINT)
        distinct: list[Access] = []
        for read in reads:
            self.spend(len(distinct))
            if read.buffer is store.buffer:
                store.also_read = True
            elif not any(read.buffer is d.buffer and _same(read.indices, d.indices) for d in distinct):
                distinct.append(read)
        path = tuple(self._path)
        check_extents([loops[p].extent for p in path], "a loop nest")
        if self._in_init:
            path = tuple(p for p in path if not loops[p].reduces)
            reduces: frozenset[int] = frozenset()
        else:
            stored = set().union(*(i.steps for i in store.indices)) if store.indices else set()
            # Flat TIR has no blocks to say it: a loop that the address does not depend on reduces.
            reduces = frozenset(p for p in path if p not in stored and (loops[p].reduces or not self._block))
        rank = self._enter()
        self.ast.leaves.append(
            Leaf(
                self._block or store.buffer.name,
                path,
                store,
                distinct,
                counts,
                dtype,
                rank,
                self._depth,
                self._in_init,
                self.predicates > 0,
                intrinsic,
                reduces,
            )
        )
        self.ast.outline.append((rank, self._depth, None, len(self.ast.leaves) - 1))
        self._depth -= 1


#: Method of :class:`Walker` for each kind of statement.
_STATEMENTS: dict[str, str] = {
    "SeqStmt": "sequence",
    "For": "for_loop",
    "While": "while_loop",
    "SBlockRealize": "block_realize",
    "SBlock": "body",
    "IfThenElse": "if_then_else",
    "AttrStmt": "attribute",
    "Bind": "bind",
    "LetStmt": "bind",
    "AllocBuffer": "allocate",
    "DeclBuffer": "allocate",
    "AssertStmt": "body",
    "Evaluate": "evaluate",
    "BufferStore": "store",
}


def _same(a: list[AffineRange], b: list[AffineRange]) -> bool:
    """Whether two accesses of a buffer go to one address in every iteration."""
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
