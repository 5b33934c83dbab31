"""Predictions by a service: sync and async clients with the interface of a predictor in this process."""

from cdmpp.predict.client.answers import ServedPrediction
from cdmpp.predict.client.asynchronous import AsyncPredictorClient
from cdmpp.predict.client.sync import PredictorClient

__all__ = ["AsyncPredictorClient", "PredictorClient", "ServedPrediction"]
