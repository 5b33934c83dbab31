"""Vectorised checks and hashes equal those of the specifications; hashes that must never change."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdmpp.data.labels import distinct_rows, hash_rows
from cdmpp.data.table import contradictory, integer_fields, make_block
from cdmpp.errors import InvalidProgramError
from cdmpp.programs.operators import make_operator, operator_types
from cdmpp.programs.vectors import output_hw

FLAGS = {
    "linear": [{"bias": False}, {"bias": True}],
    "conv2d": [{"direction": d, "bias": b} for d in ("fwd", "bwd_data", "bwd_weight") for b in (False, True)],
    "copy": [{"transposed": False}, {"transposed": True}],
    "add": [{"inputs": n} for n in (2, 3, 4)],
}


def random_size(rng, low, high):
    """Small sizes mostly, now and then a huge one or a boundary."""
    kind = rng.random()
    if kind < 0.75:
        return rng.randint(low, min(8, high))
    if kind < 0.93:
        return rng.randint(low, min(4096, high))
    return rng.choice([low, high, rng.randint(low, high)])


def random_sizes(operator, count, seed):
    rng = random.Random(seed)
    fields = integer_fields(operator)
    return {
        f.name: np.array([random_size(rng, f.low, f.high) for _ in range(count)], dtype=np.int64)
        for f in fields
        if f.name != "inputs"
    }


@pytest.mark.parametrize("operator", sorted(operator_types()))
def test_check_and_hash_equal_the_specification(operator):
    count = 300
    accepted = 0
    for number, flags in enumerate(FLAGS.get(operator, [{}])):
        sizes = random_sizes(operator, count, seed=number)
        block = make_block(operator, "float16", flags, sizes, np.arange(count))
        wrong = contradictory(operator, block.flags, block.sizes)
        hashes = block.hashes()
        for row in range(count):
            try:
                spec = make_operator(block.fields(row))
            except InvalidProgramError:
                assert wrong[row], block.fields(row)
                continue
            assert not wrong[row], block.fields(row)
            assert hashes[row] == spec.hash()
            assert {name: int(column[row]) for name, column in block.sizes.items()} == spec.sizes()
            accepted += 1
    assert accepted > count // 20


@pytest.mark.parametrize("operator", sorted(operator_types()))
def test_ranges_and_defaults_are_the_model_s(operator):
    smallest = {f.name: f.low for f in integer_fields(operator)}
    spec = make_operator({"operator": operator, **smallest})
    assert list(spec.sizes()) == list(smallest)
    for field in integer_fields(operator):
        for value in (field.low - 1, field.high + 1):
            with pytest.raises(InvalidProgramError):
                make_operator({"operator": operator, **smallest, field.name: value})


def test_limit_of_elements_is_exact():
    # 2^48 passes, one more does not: float64 must not blur the border.
    m = np.array([2**24, 2**24 + 1, 2**24], dtype=np.int64)
    n = np.array([2**24, 2**24, 2**24 - 1], dtype=np.int64)
    wrong = contradictory("softmax", {}, {"rows": m, "cols": n})
    assert wrong.tolist() == [False, True, False]


def test_block_needs_every_required_size():
    with pytest.raises(ValueError, match="needs k"):
        make_block("linear", "float32", {}, {"m": np.ones(1, np.int64), "n": np.ones(1, np.int64)}, np.arange(1))


def test_output_extents_count_the_places_of_the_kernel():
    rng = np.random.default_rng(0)
    names = [
        f"{name}_{axis}" if len(name) > 1 else name + axis for axis in "hw" for name in ("k", "stride", "pad", "dil")
    ]
    sizes = {name: rng.integers(1, 5, 200) for name in names}
    sizes |= {axis: rng.integers(16, 40, 200) for axis in "hw"}
    sizes |= dict.fromkeys(("n", "c_in", "c_out"), np.ones(200, dtype=np.int64))
    columns = output_hw(sizes)
    for row in range(200):
        single = {name: int(column[row]) for name, column in sizes.items()}
        for axis, column in zip("hw", columns, strict=True):
            reach = (single["k" + axis] - 1) * single["dil_" + axis]
            last = single[axis] + 2 * single["pad_" + axis] - 1
            assert column[row] == sum(at + reach <= last for at in range(0, last + 1, single["stride_" + axis]))
        spec = make_operator({"operator": "conv2d", **single})
        assert spec.output_hw() == output_hw(single) == (columns[0][row], columns[1][row])


MASK = 2**64 - 1


def splitmix64_python(x: int) -> int:
    """The published algorithm in plain integers."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


@given(st.lists(st.tuples(*[st.integers(-(2**63), 2**63 - 1)] * 2), min_size=1, max_size=20), st.integers(0, 9))
def test_hash_equals_plain_integers(rows, seed):
    columns = [np.array(column, dtype=np.int64) for column in zip(*rows, strict=True)]
    for row, found in zip(rows, hash_rows(seed, columns).tolist(), strict=True):
        state = splitmix64_python(seed)
        for value in row:
            state = splitmix64_python(state ^ splitmix64_python(value & MASK))
        assert found == state


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=40))
def test_distinct_rows(rows):
    columns = [np.array(column, dtype=np.int64) for column in zip(*rows, strict=True)]
    first, inverse = distinct_rows(columns)
    assert [rows[i] for i in first] == list(dict.fromkeys(rows))
    assert [rows[first[i]] for i in inverse] == rows
