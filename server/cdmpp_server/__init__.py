"""HTTP service around :class:`cdmpp.LatencyPredictor` (FastAPI).

``cdmpp_server.app:create_app`` is the application factory; ``python -m cdmpp_server`` runs it with uvicorn.
"""

import os

# OpenBLAS stops its threads whenever the process forks, which uvloop does to start a worker. A matrix product in
# another thread would then wait for them without end. With one thread there is nothing to stop. It is set here
# because OpenBLAS reads it when numpy is imported.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
