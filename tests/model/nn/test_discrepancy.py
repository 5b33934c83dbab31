"""Discrepancies of two batches against plain numpy."""

import numpy as np
import pytest
import torch

from cdmpp.model.nn.losses import (
    DISCREPANCIES,
    KERNEL_WIDTHS,
    bounded,
    central_moment_discrepancy,
    correlation_alignment,
    maximum_mean_discrepancy,
)


def numpy_cmd(source: np.ndarray, target: np.ndarray, moments: int) -> float:
    """CMD as in Zellinger et al. 2017, values in [a, b] = [-1, 1]."""
    width = 2.0
    total = np.linalg.norm(source.mean(0) - target.mean(0)) / width
    for k in range(2, moments + 1):
        central_s = ((source - source.mean(0)) ** k).mean(0)
        central_t = ((target - target.mean(0)) ** k).mean(0)
        total += np.linalg.norm(central_s - central_t) / width**k
    return float(total)


@pytest.mark.parametrize("moments", [1, 2, 5])
def test_cmd_is_the_published_formula(moments: int) -> None:
    rng = np.random.default_rng(0)
    source, target = np.tanh(rng.standard_normal((300, 8))), np.tanh(rng.standard_normal((200, 8)) + 0.5)
    discrepancy = central_moment_discrepancy(torch.from_numpy(source), torch.from_numpy(target), moments)
    assert float(discrepancy) == pytest.approx(numpy_cmd(source, target, moments), rel=1e-9)


def test_cmd_is_zero_for_equal_batches_and_symmetric() -> None:
    a, b = torch.tanh(torch.randn(50, 4)), torch.tanh(torch.randn(60, 4))
    assert float(central_moment_discrepancy(a, a)) == 0
    assert float(central_moment_discrepancy(a, b)) == pytest.approx(float(central_moment_discrepancy(b, a)))


def batches(shift: float = 0.5, scale: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(2)
    return np.tanh(rng.standard_normal((40, 6))), np.tanh(scale * rng.standard_normal((30, 6)) + shift)


def test_mmd_is_the_published_formula() -> None:
    source, target = batches()
    both = np.concatenate([source, target])
    squared = ((both[:, None] - both[None]) ** 2).sum(-1)
    kernel = np.mean([np.exp(-squared / (squared.mean() * w)) for w in KERNEL_WIDTHS], axis=0)
    expected = kernel[:40, :40].mean() + kernel[40:, 40:].mean() - 2 * kernel[:40, 40:].mean()
    discrepancy = maximum_mean_discrepancy(torch.from_numpy(source), torch.from_numpy(target))
    assert float(discrepancy) == pytest.approx(expected, rel=1e-9)


def test_coral_is_the_published_formula() -> None:
    source, target = batches()
    gap = np.cov(source, rowvar=False) - np.cov(target, rowvar=False)
    discrepancy = correlation_alignment(torch.from_numpy(source), torch.from_numpy(target))
    assert float(discrepancy) == pytest.approx((gap**2).sum() / (4 * 6**2), rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", DISCREPANCIES)
def test_descending_brings_batches_together(name: str) -> None:
    source, target = batches(scale=0.2)
    distance = DISCREPANCIES[name]
    fixed = torch.from_numpy(source)
    moving = torch.atanh(torch.from_numpy(target)).requires_grad_()
    optimiser = torch.optim.Adam([moving], lr=0.05)
    discrepancies = []
    for _ in range(60):
        optimiser.zero_grad()
        loss = distance(fixed, bounded(moving))
        loss.backward()
        optimiser.step()
        discrepancies.append(loss.item())
    assert 0 <= discrepancies[-1] < 0.5 * discrepancies[0]
