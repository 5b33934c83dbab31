"""Interpreter of scheduled GPU programs on numpy arrays: all threads of the grid take each statement together.

A test can run a template's small version with it and compare results, without a GPU. Threads run in lockstep, which is
one of the orders that TVM's barriers between stores to and loads from shared memory allow.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.data.lowered import lower

Env = dict[Any, Any]
Value = Callable[[Env], Any]

_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Div": np.divide,
    "FloorDiv": np.floor_divide,
    "FloorMod": np.mod,
    "Min": np.minimum,
    "Max": np.maximum,
    "LT": np.less,
    "LE": np.less_equal,
    "GT": np.greater,
    "GE": np.greater_equal,
    "EQ": np.equal,
    "NE": np.not_equal,
    "And": np.logical_and,
    "Or": np.logical_or,
}


def run(function: Any, arguments: dict[str, Any]) -> None:
    """Run a PrimFunc; output arrays are written in place.

    Parameters
    ----------
    function : tvm.tirx.PrimFunc
        Scheduled, with thread bindings and float32 or integer buffers.
    arguments : dict of str to array or number
        Value of each parameter by name.
    """
    _Run(lower(function), arguments)


class _Run:
    def __init__(self, function: Any, arguments: dict[str, Any]) -> None:
        self.extents: list[tuple[Any, str, int]] = []
        body = function.body
        while type(body).__name__ == "AttrStmt":
            if body.attr_key == "thread_extent":
                self.extents.append((body.node.var, str(body.node.thread_tag), int(body.value)))
            body = body.body
        shape = [extent for *_, extent in self.extents]
        grids = np.indices(shape).reshape(len(shape), -1)
        self.env: Env = {var: row for (var, *_), row in zip(self.extents, grids, strict=True)}
        self.threads = grids.shape[1]
        blocks = [row for (_, tag, _), row in zip(self.extents, grids, strict=True) if tag.startswith("blockIdx")]
        sizes = [extent for _, tag, extent in self.extents if tag.startswith("blockIdx")]
        self.block = np.ravel_multi_index(blocks, sizes)
        self.blocks = int(np.prod(sizes))
        #: Buffer -> (array, index of each thread's own part or None).
        self.memory: dict[Any, tuple[Any, Any]] = {}
        for parameter in function.params:
            value = arguments[str(parameter.name)]
            if isinstance(value, np.ndarray):
                assert value.shape == tuple(int(extent) for extent in parameter.shape), parameter.name
                self.memory[parameter] = (value, None)
            else:
                self.env[parameter] = np.float32(value)
        self.statement(body)(self.env)

    def statement(self, node: Any) -> Callable[[Env], None]:
        kind = type(node).__name__
        if kind == "SeqStmt":
            parts = [self.statement(part) for part in node.seq]
            return lambda env: [part(env) for part in parts] and None
        if kind == "AllocBuffer":
            self.allocate(node.buffer)
            return lambda env: None
        if kind == "AttrStmt":
            return self.statement(node.body)
        if kind == "For":
            return self.loop(node)
        if kind == "IfThenElse":
            assert node.else_case is None
            return self.condition(self.value(node.condition), self.statement(node.then_case))
        assert kind == "BufferStore", kind
        return self.store(node)

    def allocate(self, buffer: Any) -> None:
        shape = tuple(int(extent) for extent in buffer.shape)
        own, count = (
            (self.block, self.blocks) if buffer.scope() == "shared" else (np.arange(self.threads), self.threads)
        )
        # What a thread reads before it or another one has written is not a number.
        self.memory[buffer] = (np.full((count, *shape), np.nan, dtype=str(buffer.dtype)), own)

    def loop(self, node: Any) -> Callable[[Env], None]:
        body, var, low, extent = self.statement(node.body), node.loop_var, int(node.min), int(node.extent)

        def run_loop(env: Env) -> None:
            for step in range(low, low + extent):
                body({**env, var: step})

        return run_loop

    def condition(self, holds: Value, body: Callable[[Env], None]) -> Callable[[Env], None]:
        return lambda env: body({**env, "active": np.logical_and(env.get("active", True), holds(env))})

    def store(self, node: Any) -> Callable[[Env], None]:
        array, own = self.memory[node.buffer]
        indices, value = [self.value(i) for i in node.indices], self.value(node.value)

        def run_store(env: Env) -> None:
            active = np.broadcast_to(env.get("active", True), (self.threads,))
            at = [np.broadcast_to(index(env), (self.threads,))[active] for index in indices]
            for index, extent in zip(at, array.shape[len(array.shape) - len(at) :], strict=True):
                assert ((index >= 0) & (index < extent)).all(), f"{node.buffer.name} is written out of bounds"
            at = at if own is None else [own[active], *at]
            array[tuple(at)] = np.broadcast_to(value(env), (self.threads,))[active]

        return run_store

    def value(self, node: Any) -> Value:
        kind = type(node).__name__
        if kind in ("IntImm", "FloatImm"):
            number = np.float32(node.value) if kind == "FloatImm" else int(node.value)
            return lambda env: number
        if kind in ("Var", "SizeVar"):
            return lambda env: env[node]
        if kind in _BINARY:
            operation, a, b = _BINARY[kind], self.value(node.a), self.value(node.b)
            return lambda env: operation(a(env), b(env))
        if kind == "Call":
            name = str(node.op.name)
            if name == "tirx.call_extern" and node.args[0].value == "__ldg":
                return self.value(node.args[1].args[0])
            raise AssertionError(f"call of {name}")
        assert kind == "TensorLoad", kind
        array, own = self.memory[node.source]
        indices = [self.value(i) for i in node.indices]

        def load(env: Env) -> Any:
            active = np.broadcast_to(env.get("active", True), (self.threads,))
            at = [np.broadcast_to(index(env), (self.threads,)) for index in indices]
            for index, extent in zip(at, array.shape[len(array.shape) - len(at) :], strict=True):
                assert ((index >= 0) & (index < extent))[active].all(), f"{node.source.name} is read out of bounds"
            # Inactive threads read anything.
            at = [np.where(active, index, 0) for index in at]
            return array[tuple(at if own is None else [own, *at])]

        return load
