"""A product of 64 x 64 matrices in TVM, unscheduled and in tiles of 8 x 16 x 4."""

from typing import Any


def matmul() -> Any:
    """Unscheduled."""
    import tvm
    from tvm import te

    a, b = (te.placeholder((64, 64), name=n) for n in "ab")
    r = te.reduce_axis((0, 64), name="r")
    c = te.compute((64, 64), lambda i, j: te.sum(a[i, r] * b[r, j], axis=r), name="c")
    return tvm.s_tir.Schedule(te.create_prim_func([a, b, c]))


def tiled_matmul() -> tuple[Any, Any, dict[str, Any]]:
    """The schedule, its block, and the loops i0, j0, k0, i1, k1 and j1 from the outermost."""
    schedule = matmul()
    block = schedule.get_sblock("c")
    i, j, k = schedule.get_loops(block)
    loops = {}
    for name, loop, size in (("i", i, 8), ("j", j, 16), ("k", k, 4)):
        loops[f"{name}0"], loops[f"{name}1"] = schedule.split(loop, [None, size])
    schedule.reorder(*(loops[name] for name in ("i0", "j0", "k0", "i1", "k1", "j1")))
    return schedule, block, loops
