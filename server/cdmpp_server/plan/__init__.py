"""Replay and plans over HTTP: an endpoint for every planner of :mod:`cdmpp.plan.registry`.

Planning processes (``python -m cdmpp_server.plan``) validate and solve requests. They serve no HTTP and have no model:
between the two jobs, the service prices the programs with the model of ``/predict``. ``__main__.py`` and ``work.py``
run in these processes; :mod:`cdmpp_server.processes` is the side of the service.
"""
