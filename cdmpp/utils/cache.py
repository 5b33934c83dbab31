"""The user's cache folder."""

from __future__ import annotations

import os
from pathlib import Path

ENVIRONMENT = "CDMPP_CACHE"


def cache_dir() -> Path:
    """``$CDMPP_CACHE``, else ``~/.cache/cdmpp``."""
    given = os.environ.get(ENVIRONMENT)
    return Path(given) if given else Path("~/.cache/cdmpp").expanduser()
