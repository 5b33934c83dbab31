"""PrimFuncs with forbidden behaviour: each takes one float32 vector of 64 and writes another."""

_HEAD = """
@T.prim_func
def main(A: T.Buffer((64,), "float32"), B: T.Buffer((64,), "float32")):
    T.func_attr({"global_symbol": "main", "tirx.noalias": True})
"""
_BODIES = {
    "crashes": """
    for i in range(64):
        B[i] = A[T.Cast("int64", i) + T.int64(1000000000000)]
""",
    "hangs": """
    for i in range(64):
        B[i] = T.float32(0)
        for k in range(T.int64(4000000000000)):
            B[i] = B[i] + T.sin(A[i] + T.Cast("float32", k))
""",
    "eats": """
    C = T.alloc_buffer((T.int64(40000000000),), "float32")
    for i in range(T.int64(40000000000)):
        C[i] = A[i % T.int64(64)]
    for i in range(64):
        B[i] = C[T.Cast("int64", i) * T.int64(600000000)]
""",
}


def bad_programs() -> dict[str, str]:
    """What it does -> TVM JSON."""
    import tvm
    from tvm.script import tirx

    return {
        name: tvm.ir.save_json(tvm.script.from_source(_HEAD + body, extra_vars={"T": tirx}))
        for name, body in _BODIES.items()
    }
