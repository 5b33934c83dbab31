"""HTTP service around :class:`cdmpp.LatencyPredictor` (FastAPI)."""
