"""Losses against plain numpy."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from cdmpp.model.nn.config import LEVELS
from cdmpp.model.nn.losses import RANKING_SCALE, pinball_loss, ranking_loss, relative_error_loss
from tests.model.nn.synthetic import TINY, network, random_inputs


def test_pinball_is_the_published_formula() -> None:
    rng = np.random.default_rng(1)
    target, quantiles = rng.standard_normal(40), rng.standard_normal((40, len(LEVELS)))
    error = target[:, None] - quantiles
    expected = np.where(error > 0, np.array(LEVELS) * error, (np.array(LEVELS) - 1) * error).mean()
    loss = pinball_loss(torch.from_numpy(quantiles), torch.from_numpy(target))
    assert float(loss) == pytest.approx(expected, rel=1e-9)


def test_relative_error_is_the_percentage_error_where_that_is_sane() -> None:
    point = torch.tensor([0.0, 0.2, -0.2, 0.9])
    target = torch.zeros(4)
    percentage = np.abs(np.expm1(point.numpy())).mean()
    smooth = float(torch.nn.functional.smooth_l1_loss(point, target, beta=0.2))
    assert float(relative_error_loss(point, target)) == pytest.approx(percentage + 0.1 * smooth, rel=1e-6)


def test_relative_error_grows_linearly_beyond_e_times() -> None:
    # The derivative at the seam is e on both sides; a start that is 1e8 times too high has a finite gradient.
    point = torch.tensor([1.0 - 1e-4, 1.0 + 1e-4, 18.0], requires_grad=True)
    loss = relative_error_loss(point, torch.zeros(3))
    loss.backward()
    assert point.grad is not None
    np.testing.assert_allclose(3 * point.grad.numpy(), np.e + 0.1, rtol=1e-3)


@pytest.mark.parametrize("head", ["structured", "ratio"])
@pytest.mark.parametrize("offset", [0.0, 20.0, -20.0])
def test_gradients_are_finite_however_wrong_the_start(head: str, offset: float) -> None:
    net = network(config=replace(TINY, head=head)).train()
    mask = torch.arange(4).expand(32, -1) < 3
    point, quantiles = net(mask=mask, **random_inputs(rows=32, leaves=4))
    target = point.detach() + offset + torch.randn(32, generator=torch.Generator().manual_seed(3))
    (relative_error_loss(point, target) + pinball_loss(quantiles, target)).backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
    assert any(float(p.grad.abs().max()) > 0 for p in net.parameters() if p.grad is not None)


def test_ranking_loss_is_zero_where_the_differences_agree() -> None:
    generator = torch.Generator().manual_seed(0)
    measured = torch.randn(9, generator=generator)
    first, second = torch.triu_indices(9, 9, offset=1)
    assert float(ranking_loss(measured + 3.0, measured, first, second)) == pytest.approx(0, abs=1e-6)
    predicted = (measured + 0.3 * torch.randn(9, generator=generator)).requires_grad_()
    loss = ranking_loss(predicted, measured, first, second)
    # By hand: Kullback-Leibler divergence of two Bernoulli variables, scaled.
    p, q = (
        1 / (1 + np.exp(-(v[first] - v[second]).detach().numpy().astype(float) / RANKING_SCALE))
        for v in (measured, predicted)
    )
    divergence = p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))
    assert loss.item() == pytest.approx(RANKING_SCALE * divergence.mean(), rel=1e-3)
    loss.backward()
    # One constant for all moves nothing.
    assert predicted.grad is not None
    assert float(predicted.grad.sum()) == pytest.approx(0, abs=1e-6)
    assert float(predicted.grad.abs().max()) > 0


def test_ranking_loss_without_pairs_is_nothing() -> None:
    none = torch.zeros(0, dtype=torch.long)
    predicted = torch.ones(3, requires_grad=True)
    loss = ranking_loss(predicted, torch.zeros(3), none, none)
    loss.backward()
    assert loss.item() == 0
    assert predicted.grad is not None
    assert (predicted.grad == 0).all()
