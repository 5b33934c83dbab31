"""Predictions by a service: sync and async clients with the interface of a predictor in this process."""

from cdmpp.predict.client.clients import AsyncPredictorClient, PredictorClient
from cdmpp.predict.client.messages import ServedPrediction

__all__ = ["AsyncPredictorClient", "PredictorClient", "ServedPrediction"]
