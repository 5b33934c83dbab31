"""Invariants of the features of any operator."""

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cdmpp.errors import InvalidProgramError
from cdmpp.features.class_features import PROGRAM_COLUMNS
from cdmpp.features.encode import EncodedPrograms, encode_operator, operator_ast
from cdmpp.features.leaf import element_bytes
from cdmpp.features.schema import COLUMN, COLUMNS
from cdmpp.programs.elements import DTYPE_BYTES
from cdmpp.programs.operators import OperatorSpec, make_operator
from tests.features.shapes import random_specs

SPECS = st.integers(0, 10_000).map(lambda seed: random_specs(1, seed)[0])
#: Magnitudes are rounded to float32 after log2: a relative error of about 1e-5 in the size itself.
SLACK = 2e-5


def column(encoded: EncodedPrograms, name: str) -> np.ndarray[Any, Any]:
    return np.asarray(encoded.leaves[0, :, COLUMN[name]], dtype=np.float64)


@pytest.mark.slow
@settings(max_examples=150)
@given(SPECS)
def test_invariants_of_every_leaf(spec: OperatorSpec) -> None:
    encoded = encode_operator(spec)
    assert encoded.leaves.dtype == np.float32
    assert encoded.leaves.shape[2] == len(COLUMNS)
    assert np.isfinite(encoded.leaves).all()
    for slot in ("store", "read_0", "read_1", "read_2"):
        touched, unique = column(encoded, f"{slot}_touched_bytes"), column(encoded, f"{slot}_unique_bytes")
        assert (unique <= touched + SLACK).all()
        assert (column(encoded, f"{slot}_run_bytes") <= unique + SLACK).all()
        scopes = sum(column(encoded, f"{slot}_scope_{s}") for s in ("global", "shared", "local"))
        assert ((scopes == 1) == (column(encoded, f"{slot}_element_bytes") > 0)).all()
    assert (column(encoded, "store_unique_bytes") <= column(encoded, "store_buffer_bytes") + SLACK).all()
    # Spatial and reducing loops make up the trips; logarithms of 1 + x, so only roughly a sum.
    parts = np.exp2(column(encoded, "spatial_trips")) - 1, np.exp2(column(encoded, "reduce_trips")) - 1
    np.testing.assert_allclose(parts[0] * parts[1], np.exp2(column(encoded, "trips")) - 1, rtol=1e-3)
    # Each leaf stands at its own place, in order.
    assert (np.diff(encoded.positions) > 0).all()
    assert encoded.positions[0] >= 0


@settings(max_examples=150)
@given(SPECS)
def test_invariants_of_every_program(spec: OperatorSpec) -> None:
    flops, moved, matrix, fraction, outputs, blocks = encode_operator(spec).totals[0]
    moves_data = spec.operator in ("copy", "embedding")
    assert (flops == 0) == moves_data
    # No less than one element read and the output written.
    assert moved >= outputs * DTYPE_BYTES[spec.dtype]
    assert matrix in (0, 1)
    assert 0 < fraction <= 1
    assert outputs >= 1
    assert blocks == 0
    assert len(PROGRAM_COLUMNS) == 6


@settings(max_examples=60)
@given(SPECS, st.integers(2, 4))
def test_a_larger_axis_is_no_less_work(spec: OperatorSpec, factor: int) -> None:
    sizes = spec.sizes()
    name = next(iter(sizes))
    try:
        larger = make_operator(spec.model_dump() | {name: sizes[name] * factor})
    except InvalidProgramError:
        assume(False)
    small, large = encode_operator(spec).totals[0], encode_operator(larger).totals[0]
    assert large[0] >= small[0] * (1 - 1e-5)
    assert large[1] >= small[1] * (1 - 1e-5)


@settings(max_examples=60)
@given(SPECS)
def test_positions_are_twice_the_rank_less_the_depth(spec: OperatorSpec) -> None:
    ast = operator_ast(spec)
    assert [leaf.position for leaf in ast.leaves] == [2 * leaf.rank - leaf.depth for leaf in ast.leaves]
    # CDMPP's own words: the place in the depth-first sequence that marks entries and exits (root first).
    sequence: list[int | None] = [0]
    depth = 0
    for rank, level, _, _ in ast.outline:
        sequence += [None] * (depth - level + 1)  # leave what is not above this node
        sequence.append(rank)
        depth = level
    assert [sequence.index(leaf.rank) for leaf in ast.leaves] == [leaf.position for leaf in ast.leaves]


def test_bytes_of_element_types() -> None:
    known = {
        "float32": 4,
        "float16": 2,
        "bfloat16": 2,
        "int8": 1,
        "int64": 8,
        "bool": 1,
        "uint1": 1,
        "int4": 0.5,
        "float32x4": 16,
        "float8_e4m3fn": 1,
        "float8_e5m2x4": 4,
        "float4_e2m1fn": 0.5,
        "float64": 8,
        "handle": 4,
    }
    assert {name: element_bytes(name) for name in known} == known
