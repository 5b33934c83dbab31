"""Predictions by a service: sync and async clients with the interface of a predictor in this process."""

from cdmpp.client.answers import ServedPrediction
from cdmpp.client.asynchronous import AsyncPredictorClient
from cdmpp.client.sync import PredictorClient

__all__ = ["AsyncPredictorClient", "PredictorClient", "ServedPrediction"]
