"""A population's features are those of its programs, one by one."""

import json
from types import FunctionType

import numpy as np
import pytest

from cdmpp.errors import InvalidProgramError
from cdmpp.features.addresses import moves, places
from cdmpp.features.encode import COMPILE_FROM, encode_many, encode_tvm_json
from cdmpp.features.leaf_tables import PARTS, tables
from cdmpp.features.schedule import _columns
from cdmpp.features.schedule import columns as schedule_columns
from cdmpp.features.walk import build_ast
from cdmpp.programs.tvm_json import load
from cdmpp.utils.jit import COMPILED
from tests.features.builder import Builder


def program(extent: int) -> str:
    b = Builder()
    return json.dumps(b.program(b.loop(b.integer(extent), b.store())))


def test_a_population_gives_what_its_programs_give() -> None:
    texts = [program(extent) for extent in (8, 4, 8, 1)]
    for schedule in (False, True):
        for text, found in zip(texts, encode_many(texts, schedule=schedule), strict=True):
            alone = encode_tvm_json(text, schedule=schedule)
            assert not isinstance(found, InvalidProgramError)
            np.testing.assert_array_equal(found.leaves, alone.leaves)
            np.testing.assert_array_equal(found.positions, alone.positions)
            np.testing.assert_array_equal(found.totals, alone.totals)
            assert (found.dtype, found.family) == (alone.dtype, alone.family)


def test_a_program_that_cannot_be_encoded_is_an_error_in_its_place() -> None:
    good, bad = program(8), program(0)
    first, second, third, fourth = encode_many([bad, good, "no JSON", load(good)])
    assert isinstance(first, InvalidProgramError) and "has the size 0" in first.message
    assert isinstance(third, InvalidProgramError) and "not JSON" in third.message
    for found in (second, fourth):
        assert not isinstance(found, InvalidProgramError)
        assert found.leaves.shape[1] == 1


@pytest.mark.slow  # compiles them, once for a checkout
def test_compiled_columns_are_those_of_plain_python() -> None:
    texts = [program(extent) for extent in range(1, COMPILE_FROM + 1)]
    alone = [encode_tvm_json(text, schedule=True) for text in texts]
    together = encode_many(texts, schedule=True)
    assert (PARTS.compiled is not None) == COMPILED
    for one, found in zip(alone, together, strict=True):
        assert not isinstance(found, InvalidProgramError)
        np.testing.assert_array_equal(found.leaves, one.leaves)


@pytest.mark.slow  # compiles them, once for a checkout
def test_parts_of_the_columns_stay_plain_beside_the_compiled_ones() -> None:
    # Other threads call them, and a compiled part has no form that Python could call.
    PARTS.compile()
    assert all(isinstance(part, FunctionType) for part in (moves, places, _columns))
    text = program(4)
    schedule_columns(tables([build_ast(*load(text))]))
