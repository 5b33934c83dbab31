"""HTTP service around :class:`cdmpp.LatencyPredictor` (FastAPI).

``server.app:create_app`` is the application factory; ``python -m server`` runs it with uvicorn.
"""
