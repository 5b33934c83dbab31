"""How sampled errors hang together."""

import numpy as np
import pytest

from cdmpp.predict.prediction import Prediction
from cdmpp.predict.requests.request import PriceRequest
from cdmpp.simulate.replay.solver import spread_of


def price(name: str, lower: float, upper: float, device: str = "t4") -> Prediction:
    return Prediction(
        name, name, device, "library", "kernel", None, "m", 1.0, lower, upper, {"0.1": lower, "0.9": upper}
    )


def asked(device: str = "t4") -> PriceRequest:
    return PriceRequest("nodes.0.program", {"operator": "x"}, device)


def test_quantiles_are_the_ends_of_the_interval() -> None:
    factors = spread_of([asked()], [price("a", 0.8, 1.5)]).factors(200_000, 0, 0.0)[:, 0]
    assert np.quantile(factors, [0.1, 0.5, 0.9]) == pytest.approx([0.8, 1.0, 1.5], rel=0.01)


@pytest.mark.parametrize("correlation", [0.0, 0.5, 1.0])
def test_correlation_is_between_programs_of_a_device(correlation: float) -> None:
    prices = [price("a", 0.8, 1.25), price("b", 0.8, 1.25), price("a", 0.8, 1.25), price("a", 0.8, 1.25, "l4")]
    spread = spread_of([asked(), asked(), asked(), asked("l4")], prices)
    logs = np.log(spread.factors(50_000, 0, correlation))
    correlations = np.corrcoef(logs.T)
    assert correlations[0, 1] == pytest.approx(correlation, abs=0.02)
    assert correlations[0, 2] == pytest.approx(1.0)  # equal programs
    assert correlations[0, 3] == pytest.approx(0.0, abs=0.02)  # another device
    assert np.quantile(logs[:, 0], 0.9) == pytest.approx(np.log(1.25), rel=0.02)


def test_what_is_certain_stays() -> None:
    factors = spread_of([asked()], [price("a", 1.0, 1.0)]).factors(10, 0, 0.3)
    assert (factors == 1.0).all()
