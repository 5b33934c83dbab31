"""Removed with the last planner that is not typed yet."""

from __future__ import annotations

from collections.abc import Iterator

from cdmpp.compose.pricing import Cost, PredictedCost
from cdmpp.compose.request import PriceRequest
from cdmpp.prediction import Prediction


def asked_of(field: float | PredictedCost, path: str) -> list[PriceRequest]:
    """Programs of a cost."""
    return field.price_requests(path) if isinstance(field, PredictedCost) else []


def cost_of(field: float | PredictedCost, prices: Iterator[Prediction]) -> Cost:
    """A cost."""
    return field.with_prices(prices).cost if isinstance(field, PredictedCost) else Cost.given(float(field))
