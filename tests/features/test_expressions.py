"""Numbers on their way to an index, and names of values: counted by hand, then as TVM writes them.

TVM's ``resize2d`` computes its coordinates in float32; its ``group_norm`` names what it adds to two sums.
"""

import json
from typing import Any

import numpy as np
import pytest

from cdmpp.features.encode import encode_tvm_json
from tests.features.builder import Builder
from tests.features.raw import raw_leaves


def leaves(b: Builder, body: int) -> list[dict[str, float]]:
    """Columns of every leaf in their own units."""
    text = json.dumps(b.program(body))
    assert np.isfinite(encode_tvm_json(text, schedule=True).leaves).all()
    return raw_leaves(encode_tvm_json(text))


def assert_columns(found: dict[str, float], **expected: float) -> None:
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-5, abs=1e-5)


# -- names of values -------------------------------------------------------------------------------------


def centred(b: Builder, i: int, *, named: bool) -> int:
    """x[i] = (y[i] - s[0] * 0.125) ** 2, by a product with itself."""
    y, s = b.buffer("y", [8]), b.buffer("s", [1])
    statements = []

    def name(text: str, value: int) -> int:
        if not named:
            return value
        variable = b.variable(text, b.float32)
        statements.append(b.bind(variable, value))
        return variable

    mean = name("mean", b.floats("Mul", b.load(b.integer(0), s), b.number(0.125)))
    difference = name("difference", b.floats("Sub", b.load(i, y), mean))
    return b.sequence(*statements, b.store(i, b.floats("Mul", difference, difference)))


def test_arithmetic_of_a_named_value_is_counted_where_it_is_stored() -> None:
    result = []
    for named in (True, False):
        b = Builder()
        i = b.variable("i")
        (leaf,) = leaves(b, b.loop(b.integer(8), centred(b, i, named=named), i))
        result.append(leaf)
    # Per element one product of two differences, each with a product of its own: as written out.
    assert_columns(
        result[0],
        trips=8,
        float_add=16,
        float_mul=24,
        flops=40,
        read_0_touched_bytes=32,
        read_0_unique_bytes=32,
        read_1_touched_bytes=32,
        read_1_unique_bytes=4,
        other_reads=0,
    )
    assert result[0] == result[1]


def test_a_name_that_nothing_stores_costs_nothing() -> None:
    b = Builder()
    unused = b.bind(b.variable("v", b.float32), b.call("tirx.exp", b.float32, b.load(b.integer(0))))
    (leaf,) = leaves(b, b.loop(b.integer(8), b.sequence(unused, b.store())))
    assert_columns(leaf, trips=8, flops=0, float_math=0, read_0_touched_bytes=0)


def test_sums_of_two_results() -> None:
    """TVM's form of a reduction to a pair: both sums are named before they are stored."""
    b = Builder()
    y, s, q = b.buffer("y", [16]), b.buffer("s", [1]), b.buffer("q", [1])
    i, zero = b.variable("i"), b.integer(0)
    one, two = (b.variable(name, b.float32) for name in ("v_s", "v_q"))
    body = b.sequence(
        b.bind(one, b.floats("Add", b.load(zero, s), b.load(i, y))),
        b.bind(two, b.floats("Add", b.load(zero, q), b.floats("Mul", b.load(i, y), b.load(i, y)))),
        b.store(zero, one, s),
        b.store(zero, two, q),
    )
    first, second = leaves(b, b.loop(b.integer(16), body, i))
    assert_columns(first, trips=16, reduce_trips=16, flops=16, float_add=16, store_also_read=1)
    assert_columns(second, flops=32, float_add=16, float_mul=16, float_fma=16, store_also_read=1)
    for leaf in (first, second):
        assert_columns(leaf, read_0_touched_bytes=64, read_0_unique_bytes=64, store_unique_bytes=4)


# -- numbers in indices ----------------------------------------------------------------------------------


def coordinate(b: Builder, i: int, how: str = "Mul") -> int:
    """(i + 0.5) * 0.5 - 0.5: where output i lies in an image of half the size."""
    middle = b.floats("Add", b.cast(b.float32, i), b.number(0.5))
    scaled = b.floats(how, middle, b.number(0.5 if how == "Mul" else 2.0))
    return b.floats("Sub", scaled, b.number(0.5))


def clamped(b: Builder, index: int, last: int = 3) -> int:
    return b.binary("Max", b.binary("Min", index, b.integer(last)), b.integer(0))


@pytest.mark.parametrize("how", ["Mul", "Div"])
@pytest.mark.parametrize("rounding", ["tirx.floor", "tirx.ceil", "tirx.round"])
def test_the_nearest_neighbour_of_an_image(how: str, rounding: str) -> None:
    b = Builder()
    y, i = b.buffer("y", [4]), b.variable("i")
    index = clamped(b, b.cast(b.int32, b.call(rounding, b.float32, coordinate(b, i, how))))
    (leaf,) = leaves(b, b.loop(b.integer(8), b.store(i, b.load(index, y)), i))
    # Eight outputs read four elements twice each, half an element further each time.
    assert_columns(
        leaf,
        trips=8,
        flops=0,
        float_math=0,
        float_cast=0,
        indirect=0,
        predicated=0,
        read_0_touched_bytes=32,
        read_0_unique_bytes=16,
        read_0_reuse=2,
        read_0_stride=2,
        read_0_run_bytes=16,
        store_unique_bytes=32,
    )


def test_a_window_of_a_large_image_is_not_all_of_it() -> None:
    b = Builder()
    y, i = b.buffer("y", [1000]), b.variable("i")
    index = b.cast(b.int32, b.call("tirx.floor", b.float32, coordinate(b, i)))
    (leaf,) = leaves(b, b.loop(b.integer(8), b.store(i, b.load(index, y)), i))
    # From -0.25 to 3.25, both ends rounded outwards: six elements at most.
    assert_columns(leaf, read_0_touched_bytes=32, read_0_unique_bytes=24, read_0_stride=2)


def test_linear_interpolation() -> None:
    b = Builder()
    y, i = b.buffer("y", [4]), b.variable("i")
    floor = b.call("tirx.floor", b.float32, coordinate(b, i))
    below = b.cast(b.int32, floor)
    above = b.binary("Add", below, b.integer(1))
    share = b.floats("Sub", coordinate(b, i), floor)
    value = b.floats(
        "Add",
        b.floats("Mul", b.load(clamped(b, below), y), b.floats("Sub", b.number(1.0), share)),
        b.floats("Mul", b.load(clamped(b, above), y), share),
    )
    (leaf,) = leaves(b, b.loop(b.integer(8), b.store(i, value), i))
    # A coordinate: an addition, a subtraction, a product, a cast. A share: two coordinates, a subtraction and
    # a floor. The value: two shares, two products, a subtraction and an addition.
    assert_columns(
        leaf,
        float_add=8 * (2 + 2 * (1 + 2 * 2)),
        float_mul=8 * (2 + 2 * 2),
        float_math=8 * 2,
        float_cast=8 * 2 * 2,
        float_fma=8,
        flops=8 * (12 + 6 + 2),
        other_reads=0,
        indirect=0,
        read_0_touched_bytes=32,
        read_0_unique_bytes=16,
        read_1_touched_bytes=32,
        read_1_unique_bytes=16,
    )


def test_arithmetic_on_a_loaded_index_stays_unknown() -> None:
    """A gather from a table: however the loaded number is scaled, it is an index of that table."""
    b = Builder()
    y, ids, i = b.buffer("y", [100, 8]), b.buffer("ids", [4], "int32"), b.variable("i")
    row = b.add("ir.TensorLoad", ty=b.int32, source=ids, indices=b.array(i))
    for _ in range(5):
        row = b.binary("Mul", row, b.integer(1 << 30))
    read = b.add("ir.TensorLoad", ty=b.float32, source=y, indices=b.array(row, b.integer(0)))
    (leaf,) = leaves(b, b.loop(b.integer(4), b.store(i, read), i))
    assert_columns(leaf, indirect=1, read_0_touched_bytes=16, read_0_unique_bytes=16)


# -- as TVM writes them ----------------------------------------------------------------------------------


def lowered(*tensors: Any) -> list[dict[str, float]]:
    """Leaves of a computation that TVM lowers."""
    tvm = pytest.importorskip("tvm")
    from tvm import te

    return raw_leaves(encode_tvm_json(str(tvm.ir.save_json(te.create_prim_func(list(tensors))))))


@pytest.mark.tvm
def test_group_norm() -> None:
    from tvm import te, topi

    data = te.placeholder((1, 4, 2, 2), name="x")
    gamma, beta = (te.placeholder((4,), name=name) for name in ("gamma", "beta"))
    result = lowered(data, gamma, beta, topi.nn.group_norm(data, gamma, beta, 2, 1, [2, 3]))
    working = [leaf for leaf in result if leaf["flops"]]
    # x and its square are summed over 16 elements; then (x - sum / n) * rsqrt(sum2 / n - (sum / n)^2 + eps)
    # * gamma + beta: four divisions, three products, four additions, a root.
    assert [leaf["flops"] for leaf in working] == pytest.approx([16, 32, 16 * 12], rel=1e-5)
    assert_columns(working[0], float_add=16, reduce_trips=8, read_0_touched_bytes=64, read_0_unique_bytes=64)
    assert_columns(working[1], float_add=16, float_mul=16, reduce_trips=8)
    assert_columns(working[2], float_div=64, float_mul=48, float_add=64, float_math=16)


@pytest.mark.tvm
def test_resize2d() -> None:
    from tvm import te, topi

    data = te.placeholder((1, 2, 4, 4), name="x")
    (leaf,) = lowered(data, topi.image.resize2d(data, (0.0,) * 4, (8, 8), method="linear"))
    # Three linear interpolations of four operations and two shares; a share is two coordinates of three
    # operations, a subtraction and a floor.
    flops = 3 * (4 + 2 * (2 * 3 + 2))
    assert_columns(
        leaf,
        trips=128,
        flops=128 * flops,
        other_reads=1,
        indirect=0,
        read_0_touched_bytes=128 * 4,
        read_0_unique_bytes=2 * 4 * 4 * 4,
        read_2_unique_bytes=2 * 4 * 4 * 4,
    )
