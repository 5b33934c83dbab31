"""QSync's indicator against what rounding does, and the statistics that PyTorch hooks read."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from cdmpp.errors import DataError
from cdmpp.planning.precision.indicator import OperatorStatistics, TensorStatistics, indicator, variances
from cdmpp.planning.precision.torch_statistics import operator_statistics


def statistics(values: np.ndarray) -> TensorStatistics:
    return TensorStatistics(values.size, float(np.sum(values**2)), float(np.abs(values).max()))


def rounded(values: np.ndarray, step: float, chance: np.random.Generator) -> np.ndarray:
    """Stochastically, to multiples of the step."""
    return np.floor(values / step + chance.random(values.shape)) * step


@pytest.mark.parametrize("dtype", ["int8", "float16", "bfloat16"])
def test_rounding_a_linear_layer_stays_within_the_indicator(dtype: str) -> None:
    """||W rounded(v) - W v||^2 and its twin for the weights, on average over roundings."""
    chance = np.random.default_rng(0)
    v, w = chance.normal(size=64), chance.normal(size=(32, 64)) / 8
    of = OperatorStatistics(statistics(v), statistics(w))
    exact = w @ v
    seen = np.mean(
        [
            np.sum((w @ rounded(v, of.input.step(dtype), chance) - exact) ** 2)
            + np.sum((rounded(w, of.weight.step(dtype), chance) @ v - exact) ** 2)  # type: ignore[union-attr]
            for _ in range(200)
        ]
    )
    forward, _ = variances(of, dtype)
    assert seen < forward
    assert forward < 500 * seen  # D of Cauchy-Schwarz is what it is loose by: 64, and 32 x 64 on the weights


def test_the_mean_error_of_a_step_is_a_sixth_of_its_square() -> None:
    chance = np.random.default_rng(1)
    values = chance.normal(size=20_000)
    of = OperatorStatistics(statistics(values))
    error = rounded(values, of.input.step("int8"), chance) - values
    assert np.sum(error**2) == pytest.approx(variances(of, "int8")[0], rel=0.05)


def test_float16_by_hand() -> None:
    # Root mean square 3: exponent 2, step 2^(2 - 9).
    tensor = TensorStatistics(10, 90.0, 5.0)
    assert tensor.step("float16") == 2.0**-7
    assert tensor.step("int8") == 5.0 / 127
    assert tensor.step("float32") == 0.0
    of = OperatorStatistics(tensor, TensorStatistics(4, 1.0, 1.0), TensorStatistics(2, 8.0, 2.0))
    # Weights: root mean square 1/2, exponent 0; gradient: root mean square 2, exponent 2.
    forward = (1.0 * 2.0**-14 * 10 + 90.0 * 2.0**-18 * 4) / 6
    backward = (8.0 * 2.0**-14 * 10 + 90.0 * 2.0**-14 * 2) / 6
    assert variances(of, "float16") == pytest.approx((forward, backward))
    found = indicator({"a": of}, {"a": 2, "b": 5}, gamma=3.0)["a"]
    assert found["float16"] == pytest.approx(3.0 * (5 - 2) * forward + 2 * backward)
    assert found["float32"] == 0.0
    # Gradients of an int8 operator are float16.
    int8 = variances(of, "int8")
    assert int8[1] == pytest.approx((8.0 * (5 / 127) ** 2 * 10 + 90.0 * 2.0**-14 * 2) / 6)


def test_nothing_and_zeros_add_nothing() -> None:
    assert variances(OperatorStatistics(TensorStatistics(0, 0.0, 0.0)), "int8") == (0.0, 0.0)
    assert variances(OperatorStatistics(TensorStatistics(9, 0.0, 0.0)), "float16") == (0.0, 0.0)


def test_statistics_of_a_small_net() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    x = torch.randn(5, 8)
    kept = [p.detach().clone() for p in net.parameters()]
    found = operator_statistics(net, (x,), lambda y: y.square().mean())
    assert list(found) == ["0", "1", "2"]
    first, relu, last = found.values()
    assert first.input.elements == 40
    assert first.input.norm2 == pytest.approx(float(x.square().sum()))
    assert first.weight is not None and first.weight.elements == 128
    assert relu.weight is None
    y = net(x).detach()
    assert last.gradient is not None
    # d mean(y^2) / dy = 2 y / size
    assert last.gradient.norm2 == pytest.approx(float((2 * y / y.numel()).square().sum()), rel=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(kept, net.parameters(), strict=True))
    assert all(p.grad is None for p in net.parameters())
    added = indicator(found, {"0": 1, "1": 2, "2": 3})
    for one in added.values():
        assert one["int8"] > one["float16"] >= one["float32"] == 0.0
    # The last operator's output meets no later operator, and an activation has no backward error.
    assert added["2"]["float16"] == pytest.approx(3 * variances(last, "float16")[1])


def test_the_example_plans_what_it_watched() -> None:
    path = Path(__file__).parents[2] / "docs" / "examples" / "sensitivities.py"
    answer = runpy.run_path(str(path))["main"]()
    t4, v100 = answer["devices"]
    assert list(t4["dtypes"]) == ["0", "1", "2", "3", "4"]
    assert 0 <= v100["sensitivity"] < t4["sensitivity"]
    assert answer["iteration_s"] <= answer["iteration_limit_s"]


def test_a_loss_of_many_values_is_refused() -> None:
    with pytest.raises(DataError, match="5 elements"):
        operator_statistics(nn.Linear(2, 1), (torch.ones(5, 2),), lambda y: y)
