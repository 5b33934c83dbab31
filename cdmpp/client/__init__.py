"""Predictions by a service: sync and async clients with the interface of a predictor in this process.

It turns calls into requests to the service. What the service answers is computed in the rooms below.
"""

from cdmpp.client.clients import AsyncPredictorClient, PredictorClient
from cdmpp.client.messages import ServedPrediction

__all__ = ["AsyncPredictorClient", "PredictorClient", "ServedPrediction"]
