"""Expressions of TIR: indices as intervals with steps, stored values as counts of arithmetic and reads.

One :class:`Expressions` belongs to one walk of a PrimFunc. A stranger's JSON comes through here, so the
work is bounded: shared nodes can be chained to be visited 2^n times, and integers squared in turn to
fill the memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from cdmpp.errors import InvalidProgramError
from cdmpp.features.affine import (
    AffineRange,
    Num,
    add,
    crossings,
    floor_divide,
    floor_modulo,
    hull,
    maximum,
    minimum,
    multiply,
    negate,
)
from cdmpp.features.ast import OPERATIONS, Access, Buffer, CompactAST
from cdmpp.programs.tvm_json import HINT, Nodes

_OP = {name: i for i, name in enumerate(OPERATIONS)}
_ARITHMETIC = {
    **dict.fromkeys(("Add", "Sub"), "add"),
    "Mul": "mul",
    **dict.fromkeys(("Div", "Mod", "FloorDiv", "FloorMod"), "div"),
    **dict.fromkeys(("Min", "Max", "EQ", "NE", "LT", "LE", "GT", "GE"), "compare"),
}
INTEGER = frozenset({"Add", "Sub", "Mul", "FloorDiv", "Div", "FloorMod", "Mod", "Min", "Max"})
_COMPARISONS = frozenset({"EQ", "NE", "LT", "LE", "GT", "GE", "And", "Or"})
_LOGIC = frozenset({"And", "Or", "Not"})
#: What an unknown value may be: an index loaded from memory, the result of a call.
_ANYTHING = 1 << 48
#: Calls that leave a coordinate where it is, as far as strides go.
_ROUNDING = frozenset({"tirx.floor", "tirx.ceil", "tirx.round", "tirx.trunc", "tirx.nearbyint"})
#: Functions that compilers make one or two instructions of; any other is a call of the C library, which takes
#: as long as tens of multiplications and keeps a loop from being vectorised.
_PLAIN = "sqrt rsqrt fabs floor ceil round trunc nearbyint copysign fma fmax fmin"
_INSTRUCTIONS = frozenset(f"tirx.{name}" for name in _PLAIN.split())
#: Calls that take about two exponentials.
_DEAR = frozenset(f"tirx.{name}" for name in ("erf", "tanh", "pow", "sin", "cos", "tan"))
#: Functions that are always a call of the C library for each element.
_NAMES = "exp exp2 exp10 log log2 log10 log1p sigmoid pow erf hypot atan2 sin cos tan sinh cosh tanh asin acos atan"
_CALLED = frozenset(f"tirx.{n}" for n in (*_NAMES.split(), "asinh", "acosh", "atanh", "fmod", "ldexp", "nextafter"))
#: Exponents of powers that LLVM makes a product, a quotient or a root of; a cube is a call (283 µs for 65,536).
_PRODUCTS = (-1, 0, 0.5, 1, 2)
#: Calls in one expression whose arguments are followed.
_MAX_CALLS = 8
#: External functions that only load from an address: CUDA's read-only cache.
_LOADS = frozenset({"__ldg"})
#: Sizes and offsets are below this; so are products of them that a real program makes.
MAX_VALUE = 1 << 60
#: Nodes visited in one program, loops in their indices counted.
MAX_STEPS = 200_000


class Expressions:
    """Reads expression nodes; ``env`` maps a variable's node index to its value, and ``bindings`` the name
    of a symbolic size."""

    def __init__(self, nodes: Nodes, bindings: Mapping[str, Num]) -> None:
        self.nodes = nodes
        self.bindings = bindings
        self.ast = CompactAST()
        self.env: dict[int, AffineRange] = {}
        self.buffers: dict[int, Buffer] = {}
        self.parameters: set[int] = set()
        #: Names of float expressions (Bind): the arithmetic is counted where the name is stored.
        self.values: dict[int, int] = {}
        #: Conditions around the present statement that are not known to hold.
        self.predicates: Num = 0
        #: Element type of the last stored value's arithmetic.
        self.compute_type = "float32"
        #: Nodes of its constant coefficients (:meth:`is_coefficient`).
        self.coefficients: list[int] = []
        self._is_coefficient: dict[int, bool] = {}
        #: Library calls in it, in units of an exponential, and the reads of each (:attr:`Leaf.call_reads`).
        self.library_calls = 0.0
        self.call_reads: list[list[Access]] = []
        self._steps_left = MAX_STEPS

    # -- small readers -----------------------------------------------------------------------------------
    def data(self, index: int) -> Any:
        """Content of a node."""
        return self.nodes[index]["data"]

    def array(self, index: int) -> list[int]:
        """Elements of an array or map node; of any other (None), nothing."""
        data = self.nodes[index].get("data")
        return data if type(data) is list else []

    def dtype(self, index: int) -> str:
        """Element type of an expression node; a pointer is a "handle"."""
        dtype = self.nodes[self.nodes[index]["data"]["ty"]]["data"].get("dtype", "handle")
        return str(dtype) if type(dtype) is str else str(self.data(dtype)["dtype"])

    def call_name(self, data: dict[str, Any]) -> str:
        """Name of what a Call calls."""
        op = self.nodes[data["op"]]
        return str(op["data"]) if op["type"] == "ir.Op" else str(op["type"])

    def spend(self, steps: int) -> None:
        """Count work against the budget of the program."""
        self._steps_left -= steps
        if self._steps_left < 0:
            raise InvalidProgramError("the program is too large to encode", hint=HINT)

    def buffer(self, var: int) -> Buffer:
        """The buffer behind a variable."""
        known = self.buffers.get(var)
        if known is None:
            data = self.data(var)
            kind = self.data(data["ty"])
            shape = [self.expression(i).high for i in self.array(kind["shape"])]
            check_extents(shape, "a buffer")
            scope, _, detail = str(self.data(kind["storage_scope"])).partition(".")
            known = Buffer(
                str(self.data(data["name"])),
                str(self.data(kind["dtype"])["dtype"]),
                scope or "global",
                shape,
                var in self.parameters,
                detail == "dyn",
            )
            self.buffers[var] = known
            self.ast.buffers.append(known)
        return known

    # -- integer expressions: bounds and indices ---------------------------------------------------------
    def expression(self, index: int) -> AffineRange:
        """Value of an index, extent or bound."""
        self.spend(1)
        node = self.nodes[index]
        kind: str = node["type"]
        data: Any = node.get("data")
        if kind == "ir.IntImm":
            data = self.nodes[data["value"]]["data"]
            kind = "int"
        if kind == "int":
            if type(data) is not int or not -MAX_VALUE < data < MAX_VALUE:
                raise InvalidProgramError("an integer is not a whole number, or too large", hint=HINT)
            return AffineRange(data, data)
        if kind == "ir.Var":
            known = self.env.get(index)
            if known is not None:
                return known
            name = str(self.data(data["name"]))
            if name not in self.bindings:
                raise InvalidProgramError(
                    f"the size {name[:80]!r} is symbolic", hint="bind it: only static shapes have one latency"
                )
            value = self.bindings[name]
            self.env[index] = AffineRange(value, value)
            return self.env[index]
        kind = kind.rpartition(".")[2]
        if kind in INTEGER:
            return self._checked(self._integer(kind, self.expression(data["a"]), self.expression(data["b"])))
        if kind == "Cast":
            value = self.expression(data["value"])
            if type(value.low) is float or type(value.high) is float:
                value = AffineRange(math.floor(value.low), math.ceil(value.high), value.steps, value.indirect)
            return self._checked(value)
        return self._checked(self._other(kind, data))

    def _checked(self, value: AffineRange) -> AffineRange:
        self.spend(len(value.steps))
        if value.indirect:
            # Loaded values are not known, and arithmetic on them does not make them larger than anything.
            value.low, value.high = maximum(value.low, -_ANYTHING), minimum(value.high, _ANYTHING)
        if type(value.high) in (int, float) and not -MAX_VALUE < value.low <= value.high < MAX_VALUE:
            raise InvalidProgramError("an index is larger than any memory", hint=HINT)
        return value

    def _integer(self, kind: str, a: AffineRange, b: AffineRange) -> AffineRange:
        if kind == "Add":
            return add(a, b)
        if kind == "Sub":
            return add(a, negate(b))
        if kind == "Mul":
            return multiply(a, b)
        if kind == "Div" and type(b.low) is float and b.is_number() and b.low:
            return multiply(a, AffineRange(1 / b.low, 1 / b.low))
        if kind in ("FloorDiv", "Div", "FloorMod", "Mod"):
            value = floor_divide(a, b) if kind.endswith("Div") else floor_modulo(a, b)
            if b.is_number() and not a.is_constant():
                value.crossings = crossings(a, b.low, self.ast.loops)
            return value
        if a.is_constant() and b.is_constant():
            best = (minimum if kind == "Min" else maximum)(a.low, b.low)
            return AffineRange(best, best)
        return hull(a, b)

    def _other(self, kind: str, data: Any) -> AffineRange:
        if kind == "FloatImm":  # a coordinate of an interpolation, on its way to an index
            number = float(data["value"])
            if not abs(number) < MAX_VALUE:
                raise InvalidProgramError("a number in an index is not a whole number, or too large", hint=HINT)
            return AffineRange(number, number)
        if kind == "TensorLoad":
            inner = AffineRange(0, 0)
            for i in self.array(data["indices"]):
                inner = hull(inner, self.expression(i))
            return AffineRange(0, _ANYTHING, inner.steps, True)
        if kind in _COMPARISONS:
            return hull(hull(AffineRange(0, 1), self.expression(data["a"])), self.expression(data["b"]))
        if kind == "Select":
            return hull(self.expression(data["true_value"]), self.expression(data["false_value"]))
        if kind == "Call":
            parts = [self.expression(i) for i in self.array(data["args"])]
            name = self.call_name(data)
            if name.endswith("if_then_else"):
                return hull(parts[1], parts[2])
            if name in _ROUNDING and len(parts) == 1:
                return parts[0]
            whole = AffineRange(0, 0)
            for part in parts:
                whole = hull(whole, part)
            return AffineRange(0, _ANYTHING, whole.steps, True)
        if kind == "Broadcast":
            return self.expression(data["value"])
        if kind == "Ramp":
            base, lanes = self.expression(data["base"]), self.expression(data["lanes"])
            return AffineRange(base.low, base.high + lanes.high - 1, base.steps, base.indirect)
        raise InvalidProgramError(f"index expression {kind[:80]} cannot be encoded", hint=HINT)

    def holds(self, index: int) -> Num:
        """1 where a condition is true for every iteration, as far as intervals tell; 0 elsewhere.

        A compiler drops conditions that it can prove; a vector that depended on how much was proved
        would differ between a concrete program and its structural class.
        """
        self.spend(1)
        node = self.nodes[index]
        kind: str = node["type"].rpartition(".")[2]
        data: Any = node.get("data")
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

    # -- value expressions: arithmetic and reads ---------------------------------------------------------
    def value(self, index: int, counts: list[int], reads: list[Access]) -> None:
        """Count the arithmetic of a stored value and collect its reads (indices are not arithmetic)."""
        calls: list[int] = []
        self.coefficients = []
        self._value(index, counts, reads, calls)
        before = self.compute_type, self.library_calls, self.predicates
        self.call_reads = [[] for _ in calls[:_MAX_CALLS]]
        for call, below in zip(calls, self.call_reads, strict=False):
            self._value(call, [0] * len(OPERATIONS), below, [])
        self.compute_type, self.library_calls, self.predicates = before

    def _value(self, index: int, counts: list[int], reads: list[Access], calls: list[int]) -> None:
        """:meth:`value`; ``calls`` gains the library calls that no condition skips."""
        self.compute_type = ""
        self.library_calls = 0.0
        stack, predicates = [index], self.predicates
        nodes = self.nodes
        while stack:
            item = stack.pop()
            self.spend(1)
            node = nodes[item]
            kind: str = node["type"].rpartition(".")[2]
            data: Any = node.get("data")
            if kind == "TensorLoad":
                indices = [self.expression(i) for i in self.array(data["indices"])]
                reads.append(Access(self.buffer(data["source"]), indices))
                if not self.compute_type:
                    self.compute_type = self.dtype(item)
            elif kind in _ARITHMETIC:
                self._count_arithmetic(kind, data, counts)
                for operand in (data["b"], data["a"]):
                    folded = kind == "Mul" and self.is_coefficient(operand)
                    (self.coefficients if folded else stack).append(operand)
            elif kind == "Cast":
                floats = "float" in self.dtype(item) or "float" in self.dtype(data["value"])
                counts[_OP["float_cast" if floats else "int_other"]] += 1
                stack.append(data["value"])
            elif kind == "Call":
                args = self._count_call(item, data, counts)
                if self.predicates is predicates and self._is_library_call(item, data):
                    calls.append(item)
                stack.extend(a for a in reversed(args) if nodes[a]["type"] != "ffi.String")
            elif kind == "Select":
                counts[_OP["select"]] += 1
                stack.extend((data["false_value"], data["true_value"], data["condition"]))
            elif kind in _LOGIC:
                counts[_OP["int_other"]] += 1
                stack.extend(data[k] for k in ("b", "a") if k in data)
            elif kind in ("Broadcast", "Ramp"):
                stack.append(data["value" if kind == "Broadcast" else "base"])
            elif kind == "Var" and item in self.values:
                stack.append(self.values[item])
            elif kind == "Var" and nodes[data["ty"]]["type"].endswith("BufferType"):
                # A whole buffer handed to an intrinsic.
                reads.append(Access(self.buffer(item), [AffineRange(0, 0)]))
        if not self.compute_type:
            self.compute_type = "int32" if "Int" in nodes[index]["type"] else "float32"

    def is_coefficient(self, index: int) -> bool:
        """Whether a factor is chosen among numbers by unrolled loops alone, as those of Winograd's transforms are.

        TVM folds it when it unrolls. A product with 0 vanishes, and with it what it is added to.
        """
        known = self._is_coefficient.get(index)
        if known is None:
            self._is_coefficient[index] = known = self._computes_coefficient(index)
        return known

    def _computes_coefficient(self, index: int) -> bool:
        stack = [index]
        if not self.nodes[index]["type"].endswith("Select"):
            return False
        while stack:
            item = stack.pop()
            self.spend(1)
            kind: str = self.nodes[item]["type"].rpartition(".")[2]
            data: Any = self.nodes[item].get("data")
            if kind == "Var":
                value = self.env.get(item)
                if value is None or value.indirect or any(self.ast.loops[p].kind != "unrolled" for p in value.steps):
                    return False
            elif kind == "Select":
                stack += (data["condition"], data["true_value"], data["false_value"])
            elif kind in INTEGER or kind in _LOGIC or kind in _COMPARISONS:
                stack += (data[side] for side in ("a", "b") if side in data)
            elif not kind.endswith("Imm"):
                return False
        return True

    def _count_arithmetic(self, kind: str, data: dict[str, Any], counts: list[int]) -> None:
        what = _ARITHMETIC[kind]
        dtype = self.dtype(data["a"])
        if "float" not in dtype:
            self.compute_type = self.compute_type or dtype
            counts[_OP["int_" + what]] += 1
            if what == "div" and not self.nodes[data["b"]]["type"].endswith("Imm"):
                self.library_calls += 1.0  # no vector instruction divides integers
            return
        self.compute_type = dtype
        counts[_OP["float_" + what]] += 1
        operands = [self.nodes[data[side]]["type"].rpartition(".")[2] for side in ("a", "b")]
        if kind == "Add" and "Mul" in operands:
            counts[_OP["float_fma"]] += 1

    def _count_call(self, index: int, data: dict[str, Any], counts: list[int]) -> list[int]:
        """Count a call; returns the arguments that hold arithmetic of their own."""
        args = self.array(data["args"])
        name = self.call_name(data)
        if name.endswith("if_then_else"):
            # The condition is a predicate of the leaf, not arithmetic.
            self.predicates = self.predicates + (1 - self.holds(args[0]))
            return args[1:]
        if name == "tirx.call_extern" and self._string(args[0]) in _LOADS:
            # A load like any other, except that it is marked. Its argument is the address of an element.
            counts[_OP["other_call"]] += 1
            return self.array(self.data(args[1])["args"])
        if name == "tirx.pow" and self._is_product(args):
            counts[_OP["float_mul"]] += 1
        elif name.startswith("tirx.") and "float" in self.dtype(index):
            counts[_OP["float_math"]] += 1
            if name not in _INSTRUCTIONS:
                self.library_calls += 2.0 if name in _DEAR else 1.0
        else:
            counts[_OP["other_call"]] += 1
        return args

    def _is_library_call(self, index: int, data: dict[str, Any]) -> bool:
        name, args = self.call_name(data), self.array(data["args"])
        constant = [self.nodes[a]["type"].endswith("Imm") for a in args]
        if all(constant):
            return False
        extern = name == "tirx.call_pure_extern" and "float" in self.dtype(index)
        if extern:
            name = f"tirx.{self._string(args[0]).removesuffix('f')}"
        if name == "tirx.pow" and self._is_product(args):
            return False
        return name in _CALLED or (extern and name not in _INSTRUCTIONS)

    def _is_product(self, args: list[int]) -> bool:
        """Whether LLVM makes a power of these arguments a product, a quotient or a root."""
        return self.nodes[args[-1]]["type"].endswith("Imm") and self.data(args[-1])["value"] in _PRODUCTS

    def _string(self, index: int) -> str:
        """Text of a StringImm; "" for anything else."""
        node = self.nodes[index]
        return str(self.data(node["data"]["value"])) if node["type"].endswith("StringImm") else ""


def check_extents(extents: list[Num], what: str) -> None:
    """Known sizes must be at least 1, and their product one that a machine can hold."""
    product = 1
    for extent in extents:
        if type(extent) is int:
            if extent < 1:
                raise InvalidProgramError(f"{what} has the size {extent}", hint="sizes are at least 1")
            product *= extent
            if product > MAX_VALUE:
                raise InvalidProgramError(
                    f"the sizes of {what} overflow", hint="nothing this large can run; check the sizes"
                )
