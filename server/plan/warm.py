"""What a planning process does before its first request: imports, and a look at the compiled loops.

Compiling takes seconds on a fresh machine, which no request's budget should pay for; afterwards the compiled
code lies in a folder (``NUMBA_CACHE_DIR``) and is loaded.
"""

from __future__ import annotations

import logging
from typing import Any

from cdmpp.compose.solve import finish
from cdmpp.compose.watch import Watch
from cdmpp.errors import CdmppError
from cdmpp.planning.kinds import KINDS

_log = logging.getLogger(__name__)
#: A small request of each kind that compiles something.
REQUESTS: dict[str, dict[str, Any]] = {}


def warm() -> None:
    """Import every planner, and solve a small request of each kind that compiles something."""
    for kind in KINDS.values():
        kind.models()
    for name, value in REQUESTS.items():
        try:
            finish(KINDS[name].read(value), [], Watch(1.0))
        except CdmppError as error:
            _log.warning("%s could not be tried at the start: %s", name, error)
