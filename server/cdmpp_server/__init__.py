"""HTTP service around :class:`cdmpp.LatencyPredictor` (FastAPI).

``cdmpp_server.app:create_app`` is the application factory; ``python -m cdmpp_server`` runs it with uvicorn.
"""
