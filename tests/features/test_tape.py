"""Recorded arithmetic gives for other sizes what computing anew gives."""

import numpy as np
import pytest

from cdmpp.features.affine import Num, maximum, minimum, where
from cdmpp.features.class_features import ClassFeatures
from cdmpp.features.tape import Tape
from tests.features.shapes import random_specs


def formula(m: Num, n: Num) -> list[Num]:
    area = m * n
    tiles = -(-m // 16) * maximum(n // 8, 1)
    return [area, where(m > n, tiles, area), minimum(m * n, 1000) / tiles, np.log2(1 + m * 1.0), 7]


def test_repeats_arithmetic_for_other_sizes() -> None:
    first = {"m": np.array([3, 40, 500]), "n": np.array([9, 8, 7])}
    tape = Tape(first)
    tape.finish(formula(**tape.traced))
    for sizes in (first, {"m": np.array([1000, 2]), "n": np.array([1, 90])}):
        repeated = tape.repeat(sizes)
        assert repeated is not None
        for value, expected in zip(repeated, formula(**sizes), strict=True):
            np.testing.assert_array_equal(value, expected)


def test_numbers_give_what_arrays_of_one_give() -> None:
    tape = Tape({"m": np.array([3, 40]), "n": np.array([9, 8])})
    tape.finish(formula(**tape.traced))
    for m, n in ((1000, 1), (2, 90), (1 << 40, 3)):
        numbers, arrays = tape.repeat({"m": m, "n": n}), tape.repeat({"m": np.array([m]), "n": np.array([n])})
        assert numbers is not None and arrays is not None
        assert [float(value) for value in numbers] == [float(np.reshape(value, -1)[0]) for value in arrays]


def test_another_outcome_of_a_comparison_is_noticed() -> None:
    tape = Tape({"m": np.array([4, 8])})
    m = tape.traced["m"]
    tape.finish([m + 1 if (m > 2) else m - 1])
    repeated = tape.repeat({"m": np.array([3])})
    assert repeated is not None and repeated[0].tolist() == [4]
    assert tape.repeat({"m": np.array([3, 1])}) is None


def test_equal_numbers_of_different_types_stay_apart() -> None:
    tape = Tape({"m": np.array([4])})
    m = tape.traced["m"]
    tape.finish([m * 1, m * 1.0])
    repeated = tape.repeat({"m": np.array([5])})
    assert repeated is not None and [value.dtype.kind for value in repeated] == ["i", "f"]


@pytest.mark.slow
def test_features_do_not_depend_on_the_sizes_that_a_class_met_first() -> None:
    by_class: dict[str, list[dict[str, int]]] = {}
    for spec in random_specs(120, seed=5):
        by_class.setdefault(spec.structural_class(), []).append(spec.bindings())
    for name, members in by_class.items():
        arrays = [{field: np.array([size]) for field, size in sizes.items()} for sizes in members]
        used = ClassFeatures(name)
        for sizes in arrays:
            for part, fresh in zip(used.compute(sizes, 1), ClassFeatures(name).compute(sizes, 1), strict=True):
                np.testing.assert_array_equal(part, fresh)
