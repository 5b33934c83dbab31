"""Samplers: one contract for all, and what each promises beyond it."""

from typing import Any

import numpy as np
import pytest

from cdmpp.errors import DataError
from cdmpp.train.adaptation.samplers import MAX_VARIANCE_ROWS, SAMPLERS, choose

Array = np.ndarray[Any, np.dtype[Any]]


def programs(rows: int = 400, seed: int = 0) -> tuple[Array, Array]:
    """Features in clumps on different scales, and four families of very different size."""
    rng = np.random.default_rng(seed)
    families = rng.choice(4, rows, p=[0.7, 0.2, 0.09, 0.01])
    families[:4] = range(4)
    clump = rng.normal(size=(12, 5))[rng.integers(12, size=rows)]
    return (clump + 0.1 * rng.normal(size=(rows, 5))) * [1, 10, 0.1, 1000, 0] + 5, families


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("k", [1, 7, 40, 400])
def test_every_sampler_gives_k_distinct_rows_and_the_same_ones_again(sampler: str, k: int) -> None:
    features, families = programs()
    chosen = choose(sampler, features, families, k, seed=3)
    assert chosen.shape == (k,) and chosen.dtype == np.int64
    assert len(set(chosen.tolist())) == k and chosen.min() >= 0 and chosen.max() < 400
    assert chosen.tolist() == choose(sampler, features, families, k, seed=3).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_another_seed_chooses_otherwise(sampler: str) -> None:
    features, families = programs(6000 if sampler == "variance" else 400)  # few rows: all are candidates
    assert set(choose(sampler, features, families, 20, 0)) != set(choose(sampler, features, families, 20, 1))


@pytest.mark.parametrize("sampler", ["kmeans", "variance"])
def test_the_order_of_the_rows_does_not_matter(sampler: str) -> None:
    features, families = programs(3000)
    shuffled = np.random.default_rng(9).permutation(3000)
    direct = choose(sampler, features, families, 15, 0)
    renumbered = shuffled[choose(sampler, features[shuffled], families[shuffled], 15, 0)]
    assert direct.tolist() == renumbered.tolist()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("k", [4, 5, 12])
def test_kmeans_leaves_no_family_out(seed: int, k: int) -> None:
    features, families = programs()
    chosen = choose("kmeans", features, families, k, seed)
    assert set(families[chosen]) == {0, 1, 2, 3}


def test_kmeans_takes_one_row_of_each_clump() -> None:
    rng = np.random.default_rng(0)
    clump = np.repeat(np.arange(6), 50)
    features = 100.0 * rng.normal(size=(6, 3))[clump] + rng.normal(size=(300, 3))
    chosen_clumps = [set(clump[choose("kmeans", features, np.zeros(300, int), 6, seed)]) for seed in range(8)]
    # k-means++ may put two centres into one clump; it may not do so habitually.
    assert sum(f == set(range(6)) for f in chosen_clumps) >= 5


def test_kmeans_keeps_the_scales_of_features_on_request() -> None:
    rng = np.random.default_rng(0)
    features = np.stack([np.repeat([-5.0, 5.0], 50), 1e-3 * rng.normal(size=100)], axis=1)
    sides = [features[choose("kmeans", features, np.zeros(100, int), 2, s, standardise=False), 0] for s in range(5)]
    assert all(sorted(side) == [-5.0, 5.0] for side in sides)
    small = features * [1e-3, 1.0]  # columns of about one scale: both count
    chosen = choose("kmeans", small * [1e-4, 1.0], np.zeros(100, int), 2, 0, standardise=False)
    assert np.ptp(features[chosen, 1]) > 1e-3


@pytest.mark.parametrize("sampler", ["kmeans", "variance"])
def test_equal_programs_are_taken_once_before_any_is_taken_twice(sampler: str) -> None:
    features = np.repeat(np.arange(6.0)[:, None] ** 2, 10, axis=0)
    features[0] = -0.0
    families = np.zeros(60, dtype=int)
    for k in (3, 6):
        assert len(np.unique(features[choose(sampler, features, families, k, 0)])) == k
    twice = choose(sampler, features, families, 9, 0)
    assert len(set(twice.tolist())) == 9 and len(np.unique(features[twice])) == 6


def test_variance_reduction_beats_chance_on_its_own_measure() -> None:
    features, families = programs(600)
    from cdmpp.train.adaptation.samplers import NOISE, _standardised, default_kernel

    everything = np.arange(600)
    prior = default_kernel(_standardised(features, np.ones(600)), families)(everything, everything)

    def left(rows: Array) -> float:
        within = prior[np.ix_(rows, rows)] + NOISE**2 * np.eye(len(rows))
        return float(np.trace(prior - prior[:, rows] @ np.linalg.solve(within, prior[rows])))

    reduced = left(choose("variance", features, families, 12, 0))
    assert all(reduced < left(choose("random", features, families, 12, seed)) for seed in range(10))


def test_variance_reduction_uses_the_kernel_it_is_given() -> None:
    features, families = programs(50)
    kernel_rows: list[Array] = []

    def kernel(a: Array, b: Array) -> Array:
        kernel_rows.extend([a, b])
        # Row 17 tells of all others, which tell of nothing but themselves.
        out = (a[:, None] == b[None]).astype(float)
        return np.asarray(out + 0.9 * ((a[:, None] == 17) | (b[None] == 17)))

    assert choose("variance", features, families, 3, 0, kernel)[0] == 17
    assert set(np.concatenate(kernel_rows)) == set(range(50))  # row numbers of the features, not of a subset


@pytest.mark.parametrize("k", [0, -1, 401])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_k_out_of_range_is_refused(sampler: str, k: int) -> None:
    with pytest.raises(DataError, match=f"k = {k} of 400"):
        choose(sampler, *programs(), k, 0)


@pytest.mark.slow
def test_programs_beyond_the_most_of_variance_reduction_are_chosen_at_random() -> None:
    few, many = (choose("variance", *programs(1500), k, 0) for k in (MAX_VARIANCE_ROWS, MAX_VARIANCE_ROWS + 100))
    assert np.array_equal(many[:MAX_VARIANCE_ROWS], few) and len(set(many.tolist())) == MAX_VARIANCE_ROWS + 100


def test_other_refusals() -> None:
    with pytest.raises(DataError, match="no sampler"):
        choose("farthest", *programs(), 5, 0)
    features, families = programs()
    features[3, 2] = np.nan
    with pytest.raises(ValueError, match="finite"):
        choose("kmeans", features, families, 5, 0)
