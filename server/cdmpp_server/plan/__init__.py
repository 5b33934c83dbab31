"""Replay and plans over HTTP: an endpoint for every kind of :mod:`cdmpp.planning.registry`.

Requests are read and solved in planning processes (``python -m cdmpp_server.plan``), which know nothing of HTTP
and hold no model; between reading and solving the service prices the programs with the model of
``/predict``. ``pool.py`` is the service's side, ``__main__.py`` and ``work.py`` the process's.
"""
