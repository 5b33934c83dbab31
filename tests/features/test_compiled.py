"""Counts of compiled leaves, on programs that can be counted by hand."""

from math import inf

import pytest

from cdmpp.features.addresses import LINE_BYTES, SETS, moves, places
from cdmpp.features.affine import AffineRange, crossings, floor_divide, floor_modulo
from cdmpp.features.ast import OPERATIONS, Access, Buffer, CompactAST, Leaf, Loop
from cdmpp.features.leaf_tables import tables
from cdmpp.features.schedule import ORDER
from cdmpp.features.schedule import columns as schedule_columns
from cdmpp.features.walk import build_ast
from cdmpp.programs.tvm_json import load

PLAIN = "serial"


def tensor(name: str, *shape: int, inside: bool = False) -> Buffer:
    return Buffer(name, "float32", "global", list(shape), not inside)


def at(buffer: Buffer, *indices: dict[int, float]) -> Access:
    return Access(buffer, [AffineRange(0, 1 << 20, dict(steps)) for steps in indices])


def counts(**given: int) -> list[int]:
    return [given.get(name, 0) for name in OPERATIONS]


def columns(ast: CompactAST, index: int = 0) -> dict[str, float]:
    return dict(zip(ORDER, schedule_columns(tables([ast]))[index].tolist(), strict=True))


def leaf(path: tuple[int, ...], store: Access, *reads: Access, reduces: tuple[int, ...] = (), **more: int) -> Leaf:
    given = counts(**more)
    return Leaf("x", path, store, list(reads), given, "float32", 0, len(path), reduce_loops=frozenset(reduces))


def matmul(order: str, kinds: dict[str, str] | None = None, step: int = 0, n: int = 64) -> CompactAST:
    """C[i, j] += A[i, k] * B[k, j], 64 x n x 64; loops in the given order, outermost first."""
    loops = [Loop(name, n if name == "j" else 64, (kinds or {}).get(name, PLAIN), step, name == "k") for name in order]
    i, j, k = (order.index(name) for name in "ijk")
    a, b, c = tensor("a", 64, 64), tensor("b", 64, n), tensor("c", 64, n)
    body = leaf(
        (0, 1, 2),
        at(c, {i: 1}, {j: 1}),
        at(a, {i: 1}, {k: 1}),
        at(b, {k: 1}, {j: 1}),
        reduces=(k,),
        float_add=1,
        float_mul=1,
        float_fma=1,
    )
    return CompactAST([body], loops, [a, b, c])


def test_a_vector_loop_of_the_schedule_counts_in_vectors() -> None:
    counts = columns(matmul("ikj", {"j": "vectorized"}))
    assert counts["lanes"] == 64
    assert counts["vector_by_schedule"] == 1
    assert counts["vector_ops"] == pytest.approx(64**3 / 8)
    assert counts["accumulator_vectors"] == 8
    # Eight vectors stay in registers over the reduction around them: each is stored once.
    assert counts["kept_over"] == 64
    assert counts["vector_stores"] == pytest.approx(64 * 64 / 8)
    assert counts["chained_ops"] == pytest.approx(64**3 / 8 / 8)
    assert counts["whole_vectors"] == 1
    assert counts["odd_updates"] == 0


def test_vectors_of_an_odd_length_are_stored_at_every_step() -> None:
    counts = columns(matmul("ikj", {"j": "vectorized"}, n=12))
    assert counts["whole_vectors"] == 0
    assert counts["kept_over"] == 1
    assert counts["odd_updates"] == counts["vector_stores"] == 64 * 64 * 2


def test_the_compiler_vectorises_where_the_store_is_contiguous() -> None:
    inner = columns(matmul("ikj"))
    assert (inner["vector_by_compiler"], inner["lanes"]) == (1, 64)
    assert inner["contiguous_reads"] == 1
    # A reduction inside stays a chain of additions unless it is unrolled away.
    chained = columns(matmul("ijk"))
    assert chained["lanes"] == 1
    assert chained["vector_ops"] == 64**3
    unrolled = columns(matmul("ijk", step=64))
    assert unrolled["body"] == 64
    assert (unrolled["vector_by_compiler"], unrolled["lanes"]) == (1, 64)
    # Along i neighbours are a row apart.
    assert columns(matmul("kji"))["vector_by_compiler"] == 0


def repeated(inside: int, kind: str = PLAIN) -> CompactAST:
    """A sum over ``inside`` elements, computed for each of 100 iterations that need it once."""
    x, total, out = tensor("x", inside), tensor("sum", 1, inside=True), tensor("out", 100)
    loops = [Loop("i", 100, kind), Loop("k", inside, PLAIN, 0, True)]
    adds = leaf((0, 1), at(total, {}), at(x, {1: 1}), reduces=(1,), float_add=1)
    uses = leaf((0,), at(out, {0: 1}), at(total, {}), float_mul=1)
    return CompactAST([adds, uses], loops, [x, total, out])


def test_a_sum_that_depends_on_nothing_around_it_is_moved_out_if_it_is_straight_code() -> None:
    counts = columns(repeated(16))
    assert (counts["repeats"], counts["hoisted"], counts["inside"]) == (100, 100, 16)
    assert counts["vector_trips"] == 16
    long = columns(repeated(10_000))
    assert (long["repeats"], long["hoisted"]) == (100, 1)
    assert long["vector_trips"] == 1_000_000
    spread = columns(repeated(10_000, "parallel"))
    assert (spread["repeats"], spread["repeats_parallel"]) == (1, 100)


def test_a_parallel_loop_is_entered_once_for_all_its_leaves() -> None:
    ast = repeated(16, "parallel")
    assert [columns(ast, i)["regions"] for i in (0, 1)] == [1, 0]


def test_rows_a_power_of_two_apart_share_a_set() -> None:
    # A column of 64 rows: 64 lines in one set, in two, or each in its own.
    for row, sets in ((1024, 1), (512, 2), (1040, SETS)):
        x, y = tensor("x", 64, row), tensor("y", 1)
        t = tables([CompactAST([leaf((0,), at(y, {}), at(x, {0: 1}, {}))], [Loop("i", 64, PLAIN)], [x, y])])
        # Lines, sets and pages of the read, in no loop and in one.
        still, column = moves(t, places(t), 0).levels.reshape(2, 2, 3)[1]
        assert column[:2].tolist() == [64, sets]
        assert still.tolist() == [1, 1, 1]

    def walk(row: int) -> dict[str, float]:
        x, y = tensor("x", 64, row), tensor("y", 1)
        loops = [Loop("j", 16, PLAIN), Loop("i", 64, PLAIN)]
        return columns(CompactAST([leaf((0, 1), at(y, {}), at(x, {1: 1}, {0: 1}))], loops, [x, y]))

    # 16 columns of one line each: in their own sets the lines are still there for the next column.
    assert walk(1040)["read_0_lines_32768"] == pytest.approx(64)
    assert walk(1024)["read_0_lines_32768"] == pytest.approx(64 * 16)
    assert walk(1024)["footprint"] == walk(1040)["footprint"]
    assert walk(1024)["footprint_in_sets"] > 10 * walk(1040)["footprint_in_sets"]


def test_an_intermediate_is_as_large_as_one_iteration_needs() -> None:
    inside = tensor("t", 256, 256, inside=True)
    x, y = tensor("x", 256, 256), tensor("y", 256, 256)
    loops = [Loop("i", 256, PLAIN), Loop("j", 256, PLAIN), Loop("k", 256, PLAIN)]
    writes = leaf((0, 1), at(inside, {0: 1}, {1: 1}), at(x, {0: 1}, {1: 1}))
    reads = leaf((0, 2), at(y, {0: 1}, {2: 1}), at(inside, {0: 1}, {2: 1}))
    ast = CompactAST([writes, reads], loops, [inside, x, y])
    assert places(tables([ast])).size[:2].tolist() == [1, 256]
    counts = columns(ast)
    assert (counts["compact_store_bytes"], counts["on_stack"]) == (1024, 1)
    assert counts["store_lines_32768"] == pytest.approx(1024 / LINE_BYTES)
    assert columns(ast, 1)["intermediate_bytes"] == 1024


def fused(rows: int, size: int, transposed: bool = False) -> CompactAST:
    """A fused loop of 64 over rows of ``size``, as // and % leave it."""
    x, y = tensor("x", rows, size), tensor("y", rows, size)
    loops = [Loop("o", rows * size // 64, PLAIN), Loop("v", 64, "vectorized")]
    whole = AffineRange(0, rows * size - 1, {0: 64, 1: 1})
    index = [floor_divide(whole, AffineRange(size, size)), floor_modulo(whole, AffineRange(size, size))]
    for part in index:
        part.crossings = crossings(whole, size, loops)
    read = index[::-1] if transposed else index
    return CompactAST([leaf((0, 1), Access(y, index), Access(x, read))], loops, [x, y])


def test_a_fused_loop_is_divided_only_where_it_crosses_rows() -> None:
    assert columns(fused(64, 64))["split_indices"] == 0
    # Rows of 160 are crossed at odd places, but store and read lie alike: one address runs through both.
    assert columns(fused(64, 160))["split_indices"] == 0
    crossed = columns(fused(160, 160, transposed=True))
    assert crossed["split_indices"] == 160 * 160
    assert (crossed["lanes"], crossed["vector_by_schedule"]) == (64, 1)


def broadcast(lanes: int, size: int, kind: str) -> dict[str, float]:
    """A row added to each row of ``size``, 18,432 elements, fused and split into parallel tasks of ``lanes``."""
    tir = pytest.importorskip("cdmpp.programs.frontends.tir")
    rows = 384 * 48 // size
    source = f"""
from tvm.script import tirx as T
@T.prim_func(s_tir=True)
def main(A: T.Buffer(({rows}, {size}), "float32"), B: T.Buffer(({size},), "float32"),
         C: T.Buffer(({rows}, {size}), "float32")):
    for o in T.parallel({384 * 48 // lanes}):
        for v in T.{kind}({lanes}):
            with T.sblock("C"):
                vi = T.axis.spatial({rows}, (o * {lanes} + v) // {size})
                vj = T.axis.spatial({size}, (o * {lanes} + v) % {size})
                C[vi, vj] = A[vi, vj] + B[vj]
"""
    nodes, root = load(tir.program_from_tvmscript(source).tvm_json or "")
    return columns(build_ast(nodes, root))


@pytest.mark.parametrize(
    ("lanes", "size", "kind", "loads", "divisions"),
    [
        # 64 lanes begin at multiples of 16. For each 64 elements LLVM emits 16 vpmuldq (remainders of the lanes),
        # 46 vpextrd of indices, and 16 vmovss and 48 vinsertps that load B one by one.
        (64, 48, "vectorized", 384 * 6 + 384 * 48, 384 * 48),
        # 16 lanes stay in a row: two vmovups each, and one remainder, an imul.
        (16, 48, "vectorized", 2 * 384 * 6, 1152),
        # 96 lanes begin at a row, and all elements of B are known: no division. A vector of 96 counts as one of 128.
        (96, 48, "vectorized", 2 * 384 * 8, 0),
        (64, 32, "vectorized", 2 * 384 * 6, 0),
        # A scalar loop: vmovss, and a remainder each time.
        (64, 48, "serial", 2 * 384 * 48, 2 * 384 * 48),
    ],
)
def test_lanes_that_cross_rows_are_loaded_one_by_one(
    lanes: int, size: int, kind: str, loads: int, divisions: int
) -> None:
    counts = broadcast(lanes, size, kind)
    assert counts["vector_loads"] == pytest.approx(loads)
    assert counts["split_indices"] == pytest.approx(divisions)


def test_nothing_is_undefined_without_loops() -> None:
    x = tensor("x", 1)
    counts = columns(CompactAST([leaf((), at(x, {}))], [], [x]))
    assert all(0 <= value < inf for value in counts.values())
    assert counts["vector_trips"] == 1


@pytest.mark.parametrize(("exponent", "is_call"), [(2.0, False), (-1.0, False), (0.5, False), (3.0, True)])
def test_power_that_llvm_makes_a_product_is_no_call(exponent: float, is_call: bool) -> None:
    tvm = pytest.importorskip("tvm")
    x = tvm.te.placeholder((64,), name="x")
    power = tvm.te.compute((64,), lambda i: tvm.tirx.pow(x[i], tvm.tirx.const(exponent, "float32")))
    nodes, root = load(str(tvm.ir.save_json(tvm.te.create_prim_func([x, power]))))
    (found,) = build_ast(nodes, root).leaves
    operations = dict(zip(OPERATIONS, found.counts, strict=True))
    assert (operations["float_math"], operations["float_mul"]) == (int(is_call), int(not is_call))
    assert (found.library_calls > 0) == is_call
