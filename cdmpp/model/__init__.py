"""The model: network, inference pipeline, artifact on disk, domain and calibration, adapter, collectives.

It turns encoded programs and devices into latencies. What makes queries from what users write belongs in
:mod:`cdmpp.predict`, what fits the weights in :mod:`cdmpp.train`.
"""
