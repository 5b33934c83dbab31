"""The residual process against a plain computation, its independence of company, its leave-one-out."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cdmpp.model.adapter import (
    COMPILED,
    LAUNCHED,
    NUMERIC,
    AdapterFeatures,
    ResidualProcess,
    ResidualSettings,
    centred,
    kernel,
    prior_variance,
)
from cdmpp.model.nn.launch_inputs import KERNEL_WIDTH

Array = np.ndarray[Any, np.dtype[Any]]
FIXED = ResidualSettings(outlier=0.0, amplitudes=(1.0,), noises=(1.0,))


def features(rows: int, seed: int = 0, peers: int = 3) -> AdapterFeatures:
    rng = np.random.default_rng(seed)
    peer_logs = rng.normal(0, 0.5, (rows, peers)).astype(np.float32)
    peer_logs[rng.random(peer_logs.shape) < 0.2] = np.nan
    return AdapterFeatures(
        numeric=rng.normal(size=(rows, 4)).astype(np.float32),
        operator=rng.integers(-1, 4, rows),
        family=rng.integers(0, 2, rows),
        setting=rng.integers(0, 2, rows),
        peers=peer_logs,
        view=rng.normal(size=(rows, 5)).astype(np.float32),
    )


def plain_kernel(a: AdapterFeatures, b: AdapterFeatures, s: ResidualSettings) -> Array:
    """One pair at a time, as the docstrings have it."""
    one, other = centred(a.peers), centred(b.peers)
    out = np.empty((len(a), len(b)))
    for i in range(len(a)):
        for j in range(len(b)):
            value = s.constant**2 + s.peers**2 * float(one[i] @ other[j])
            if a.family[i] == b.family[j]:
                apart = [a.numeric[i].astype(float) - b.numeric[j], s.view * (a.view[i].astype(float) - b.view[j])]
                gap = np.linalg.norm(np.concatenate(apart))
                value += s.family**2 + s.sizes**2 * np.exp(-gap / s.length)
            value += s.operator**2 * (a.operator[i] == b.operator[j] >= 0)
            value += s.setting**2 * (a.setting[i] == b.setting[j])
            out[i, j] = value
    return out


def test_the_kernel_is_what_its_parts_say() -> None:
    a, b = features(12), features(7, 1)
    assert kernel(a, b, FIXED) == pytest.approx(plain_kernel(a, b, FIXED), abs=1e-12)
    assert prior_variance(a, FIXED) == pytest.approx(np.diag(kernel(a, a, FIXED)), abs=1e-12)
    assert np.linalg.eigvalsh(kernel(a, a, FIXED)).min() > -1e-9


def test_mean_and_variance_against_a_plain_solution() -> None:
    known, queries = features(20), features(9, 2)
    residual = np.random.default_rng(3).normal(0.1, 0.1, 20)
    process = ResidualProcess(known, residual, replace(FIXED, clip=10.0))
    covariance = plain_kernel(known, known, FIXED) + FIXED.noise**2 * np.eye(20)
    cross = plain_kernel(queries, known, FIXED)
    mean, variance = process.mean_and_variance(queries)
    assert mean == pytest.approx(cross @ np.linalg.solve(covariance, residual), abs=1e-9)
    left = np.diag(plain_kernel(queries, queries, FIXED) - cross @ np.linalg.solve(covariance, cross.T))
    assert variance == pytest.approx(left, abs=1e-9)


def test_leave_one_out_is_a_fit_without_the_row() -> None:
    known = features(15)
    residual = np.random.default_rng(4).normal(0, 0.1, 15)
    settings = replace(FIXED, clip=10.0)
    mean, variance = ResidualProcess(known, residual, settings).leave_one_out()
    for row in range(15):
        rest = np.delete(np.arange(15), row)
        without = ResidualProcess(known.take(rest), residual[rest], settings)
        expected, spread = without.mean_and_variance(known.take(np.array([row])))
        assert mean[row] == pytest.approx(expected[0], abs=1e-9)
        assert variance[row] == pytest.approx(spread[0] + settings.noise**2, abs=1e-9)


def test_an_outlier_is_clipped_and_a_constant_is_learned() -> None:
    known = features(40)
    residual = np.full(40, 0.3)
    residual[7] = 5.0
    clipped, open_ = (
        ResidualProcess.fit(known, residual, ResidualSettings(clip=clip, outlier=0.0)) for clip in (0.4, 10.0)
    )
    mean, variance = clipped.mean_and_variance(features(30, 8))
    assert np.abs(mean - 0.3).max() < 0.15 and np.abs(mean - 0.3).mean() < 0.05
    assert np.abs(mean - 0.3).mean() < 0.5 * np.abs(open_.mean_and_variance(features(30, 8))[0] - 0.3).mean()
    assert (variance >= 0).all()


def test_families_far_apart_keep_their_offsets() -> None:
    known = features(40)
    residual = np.where(known.family == 0, -1.0, 1.0)
    mean, _ = ResidualProcess.fit(known, residual).mean_and_variance(known)
    assert np.abs(mean - residual).max() < 0.1


def test_slow_outlier_loses_weight_and_fast_one_keeps_it() -> None:
    known, residual = features(40), np.zeros(40)
    at = known.take(np.array([7]))
    means = {}
    for value in (1.0, -1.0):
        residual[7] = value
        for limit in (0.0, 1.5):
            process = ResidualProcess(known, residual, replace(FIXED, clip=10.0, outlier=limit))
            means[value, limit] = process.mean_and_variance(at)[0][0]
    assert means[1.0, 1.5] < 0.5 * means[1.0, 0.0]
    assert means[-1.0, 1.5] == pytest.approx(means[-1.0, 0.0], rel=0.05)


def test_scheduled_programs_have_their_own_scales() -> None:
    few = features(3)
    cpu = replace(few, numeric=np.ones((3, len(NUMERIC) + KERNEL_WIDTH), np.float32))
    cpu.numeric[:, len(NUMERIC) :] = 0  # no launch
    gpu = replace(few, numeric=1 - cpu.numeric)
    assert (few.settings, cpu.settings, gpu.settings) == (ResidualSettings(), COMPILED, LAUNCHED)
    process = ResidualProcess.fit(gpu, np.array([0.1, 0.2, 2.0]))
    assert process.settings.outlier == LAUNCHED.outlier > 0


def test_likelihood_chooses_small_scales_for_noise_and_large_ones_for_structure() -> None:
    known, rng = features(150), np.random.default_rng(9)
    noise = ResidualProcess.fit(known, rng.normal(0, 0.05, 150)).settings
    offsets = 0.35 * (2 * known.family - 1) + 0.2 * known.numeric[:, 0]
    structure = ResidualProcess.fit(known, offsets).settings
    assert noise.family < structure.family
    assert structure.noise < noise.noise * 1.01


def test_stored_and_loaded_process_predicts_the_same() -> None:
    process = ResidualProcess.fit(features(25), np.random.default_rng(10).normal(0, 0.2, 25))
    again = ResidualProcess.load(process.tensors(), process.manifest())
    queries = features(11, 12)
    for mine, theirs in zip(process.mean_and_variance(queries), again.mean_and_variance(queries), strict=True):
        assert (mine == theirs).all()


def test_nothing_measured_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        ResidualProcess(features(0), np.zeros(0), FIXED)
