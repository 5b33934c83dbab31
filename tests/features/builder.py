"""Writes TVM JSON node by node, without TVM and without its checks."""

from typing import Any

Document = dict[str, Any]


class Builder:
    """Writes documents with one PrimFunc; methods return the index of a node."""

    def __init__(self) -> None:
        self.nodes: list[Document] = [{"type": "None"}]
        self.int32 = self.add("ir.PrimType", dtype="int32")
        self.float32 = self.add("ir.PrimType", dtype="float32")
        self.empty = self.array()
        self.scope = self.plain("ffi.String", "global")
        self.x = self.buffer("x", [8])

    def plain(self, kind: str, data: Any) -> int:
        self.nodes.append({"type": kind, "data": data})
        return len(self.nodes) - 1

    def add(self, kind: str, /, **data: Any) -> int:
        return self.plain(kind, data)

    def array(self, *items: int) -> int:
        return self.plain("ffi.Array", list(items))

    def integer(self, value: Any) -> int:
        return self.add("ir.IntImm", ty=self.int32, value=self.plain("int", value))

    def number(self, value: Any) -> int:
        return self.add("ir.FloatImm", ty=self.float32, value=value)

    def variable(self, name: str, ty: int | None = None) -> int:
        kind = self.int32 if ty is None else ty
        return self.add("ir.Var", ty=kind, name=self.plain("ffi.String", name))

    def buffer(self, name: str, shape: list[Any], dtype: str = "float32") -> int:
        kind = self.add(
            "tirx.BufferType",
            dtype=self.add("ir.PrimType", dtype=dtype),
            storage_scope=self.scope,
            shape=self.array(*map(self.integer, shape)),
        )
        return self.add("ir.Var", ty=kind, name=self.plain("ffi.String", name))

    def loop(self, extent: int, body: int, variable: int | None = None, **more: Any) -> int:
        data = {"annotations": self.empty, "thread_binding": 0, "kind": 0, "min": self.integer(0), "step": 0}
        loop_var = self.variable("i") if variable is None else variable
        return self.add("tirx.For", loop_var=loop_var, extent=extent, body=body, **(data | more))

    def store(self, index: int | None = None, value: int | None = None, buffer: int | None = None) -> int:
        zero = self.number(0.0)
        return self.add(
            "tirx.BufferStore",
            buffer=self.x if buffer is None else buffer,
            indices=self.array(self.integer(0) if index is None else index),
            value=zero if value is None else value,
        )

    def load(self, index: int, buffer: int | None = None) -> int:
        source = self.x if buffer is None else buffer
        return self.add("ir.TensorLoad", ty=self.float32, source=source, indices=self.array(index))

    def binary(self, kind: str, a: int, b: int, ty: int | None = None) -> int:
        return self.add(f"prim.{kind}", ty=self.int32 if ty is None else ty, a=a, b=b)

    def floats(self, kind: str, a: int, b: int) -> int:
        return self.binary(kind, a, b, self.float32)

    def cast(self, ty: int, value: int) -> int:
        return self.add("prim.Cast", ty=ty, value=value)

    def call(self, name: str, ty: int, *arguments: int) -> int:
        return self.add("ir.Call", ty=ty, op=self.plain("ir.Op", name), args=self.array(*arguments))

    def bind(self, variable: int, value: int) -> int:
        return self.add("tirx.Bind", var=variable, value=value)

    def sequence(self, *statements: int) -> int:
        return self.add("tirx.SeqStmt", seq=self.array(*statements))

    def program(self, body: int) -> Document:
        root = self.add("tirx.PrimFunc", params=self.array(self.x), body=body)
        return {"nodes": self.nodes, "root_index": root}
