"""Hashes that must never change, and the distinct rows."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cdmpp.data.labels import distinct_rows, hash_rows, splitmix64

MASK = 2**64 - 1


def splitmix64_python(x: int) -> int:
    """The published algorithm in plain integers."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def test_published_vector():
    # First output of splitmix64 seeded with 0, and with 1234567 (the reference implementation's).
    assert splitmix64(np.array([0, 1234567], dtype=np.uint64)).tolist() == [0xE220A8397B1DCDAF, 6457827717110365317]


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
