"""QSync's indicator against simulated rounding, and the statistics read by PyTorch hooks."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from cdmpp.errors import DataError
from cdmpp.plan.precision.network import indicator, variances
from cdmpp.plan.precision.schema import StatisticsForm, TensorForm
from cdmpp.plan.precision.torch_statistics import operator_statistics


def tensor(elements: int, norm2: float, max_abs: float) -> TensorForm:
    return TensorForm(elements=elements, norm2=norm2, max_abs=max_abs)


def statistics(values: np.ndarray) -> TensorForm:
    return tensor(values.size, float(np.sum(values**2)), float(np.abs(values).max()))


def rounded(values: np.ndarray, step: float, random: np.random.Generator) -> np.ndarray:
    """Values rounded stochastically to multiples of the step."""
    return np.floor(values / step + random.random(values.shape)) * step


@pytest.mark.parametrize("dtype", ["int8", "float16", "bfloat16"])
def test_rounding_a_linear_layer_stays_within_the_indicator(dtype: str) -> None:
    """Mean of ||W rounded(v) - W v||^2, plus that of rounded weights, over many roundings."""
    random = np.random.default_rng(0)
    v, w = random.normal(size=64), random.normal(size=(32, 64)) / 8
    operator = StatisticsForm(input=statistics(v), weight=statistics(w))
    exact = w @ v
    error = np.mean(
        [
            np.sum((w @ rounded(v, operator.input.step(dtype), random) - exact) ** 2)
            + np.sum((rounded(w, operator.weight.step(dtype), random) @ v - exact) ** 2)  # type: ignore[union-attr]
            for _ in range(200)
        ]
    )
    forward, _ = variances(operator, dtype)
    assert error < forward
    # The Cauchy-Schwarz inequality is loose by up to D: 64 for the input, 32 x 64 for the weights.
    assert forward < 500 * error


def test_the_mean_error_of_a_step_is_a_sixth_of_its_square() -> None:
    random = np.random.default_rng(1)
    values = random.normal(size=20_000)
    operator = StatisticsForm(input=statistics(values))
    error = rounded(values, operator.input.step("int8"), random) - values
    assert np.sum(error**2) == pytest.approx(variances(operator, "int8")[0], rel=0.05)


def test_float16_computed_by_hand() -> None:
    # Root mean square 3: exponent 2, step 2^(2 - 9).
    values = tensor(10, 90.0, 5.0)
    assert values.step("float16") == 2.0**-7
    assert values.step("int8") == 5.0 / 127
    assert values.step("float32") == 0.0
    operator = StatisticsForm(input=values, weight=tensor(4, 1.0, 1.0), gradient=tensor(2, 8.0, 2.0))
    # Weights: root mean square 1/2, exponent 0; gradient: root mean square 2, exponent 2.
    forward = (1.0 * 2.0**-14 * 10 + 90.0 * 2.0**-18 * 4) / 6
    backward = (8.0 * 2.0**-14 * 10 + 90.0 * 2.0**-14 * 2) / 6
    assert variances(operator, "float16") == pytest.approx((forward, backward))
    errors = indicator({"a": operator}, {"a": 2, "b": 5}, gamma=3.0)["a"]
    assert errors["float16"] == pytest.approx(3.0 * (5 - 2) * forward + 2 * backward)
    assert errors["float32"] == 0.0
    # Gradients of an int8 operator are float16.
    int8 = variances(operator, "int8")
    assert int8[1] == pytest.approx((8.0 * (5 / 127) ** 2 * 10 + 90.0 * 2.0**-14 * 2) / 6)


def test_empty_and_zero_tensors_add_no_error() -> None:
    assert variances(StatisticsForm(input=tensor(0, 0.0, 0.0)), "int8") == (0.0, 0.0)
    assert variances(StatisticsForm(input=tensor(9, 0.0, 0.0)), "float16") == (0.0, 0.0)


def test_statistics_of_a_small_network() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    x = torch.randn(5, 8)
    kept = [p.detach().clone() for p in net.parameters()]
    statistics_by_name = operator_statistics(net, (x,), lambda y: y.square().mean())
    assert list(statistics_by_name) == ["0", "1", "2"]
    first, relu, last = statistics_by_name.values()
    assert first.input.elements == 40
    assert first.input.norm2 == pytest.approx(float(x.square().sum()))
    assert first.weight is not None and first.weight.elements == 128
    assert relu.weight is None
    y = net(x).detach()
    # d mean(y^2) / dy = 2 y / size
    assert last.gradient.norm2 == pytest.approx(float((2 * y / y.numel()).square().sum()), rel=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(kept, net.parameters(), strict=True))
    assert all(p.grad is None for p in net.parameters())
    added = indicator(statistics_by_name, {"0": 1, "1": 2, "2": 3})
    for errors in added.values():
        assert errors["int8"] > errors["float16"] >= errors["float32"] == 0.0
    # The last operator's output reaches no later operator, and an activation has no backward error.
    assert added["2"]["float16"] == pytest.approx(3 * variances(last, "float16")[1])


def test_the_documented_example_plans_its_network() -> None:
    path = Path(__file__).parents[2] / "docs" / "examples" / "sensitivities.py"
    answer = runpy.run_path(str(path))["main"]()
    t4, v100 = answer["devices"]
    assert list(t4["dtypes"]) == ["0", "1", "2", "3", "4"]
    assert 0 <= v100["sensitivity"] < t4["sensitivity"]
    assert answer["iteration_s"] <= answer["iteration_limit_s"]


def test_a_loss_that_is_not_a_scalar_is_refused() -> None:
    with pytest.raises(DataError, match="5 elements"):
        operator_statistics(nn.Linear(2, 1), (torch.ones(5, 2),), lambda y: y)
