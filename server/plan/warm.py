"""Compiled loops, looked at before anybody waits for them.

Compiling takes seconds on a fresh machine, which no search's budget should pay for; afterwards the compiled
code lies in a folder (``NUMBA_CACHE_DIR``) and is loaded. A planning process solves a small request of a kind
before its first of that kind, and of the others when it has nothing to do.
"""

from __future__ import annotations

import logging
from typing import Any

from cdmpp.compose.solve import finish
from cdmpp.compose.watch import Watch
from cdmpp.errors import CdmppError
from cdmpp.planning.kinds import KINDS

_log = logging.getLogger(__name__)
_STAGES = {"stages": 2, "micro_batches": 2, "forward_s": 1, "backward_s": 2}
#: A small request of each form that compiles something, by kind.
REQUESTS: dict[str, list[dict[str, Any]]] = {
    "simulate": [{"stages": [{"forward_s": 1, "backward_s": 2}], "micro_batches": 2}],
    "split": [{"layers": [{"forward_s": 1, "backward_s": 2}], "ranks": 1, "micro_batches": 2}],
    "pipeline": [
        {
            "models": [{**_STAGES, "direction": "down"}, {**_STAGES, "direction": "up"}],
            "ranks": 2, "max_steps": 1000,
        },
    ],
    "rl": [
        {
            "lengths": {"samples": [1, 2]}, "samples_per_step": 2, "decode": {"a_s": 1}, "draws": 2,
            "pools": [{"name": "a", "units": 1}],
        },
    ],
    "compress": [
        {
            "tensors": [{"name": "a", "bytes": 1, "backward": 1}], "workers": 2, "link": {"alpha_s": 1},
            "compressors": [
                {"name": "c", "ratio": 1, "gpu": {"compress_s_per_byte": 0, "decompress_s_per_byte": 0}}
            ],
            "max_steps": 10,
        },
    ],
}  # fmt: skip


class Warmth:
    """What has been compiled in this process."""

    def __init__(self) -> None:
        self._cold = {name: forms for name, forms in REQUESTS.items() if name in KINDS}

    def __bool__(self) -> bool:
        """Whether there is something left to compile."""
        return bool(self._cold)

    def warm(self, kind: str | None = None) -> None:
        """Compile what a kind needs, or any that is left; does nothing the second time."""
        name = kind if kind is not None else next(iter(self._cold), None)
        for value in self._cold.pop(name, []) if name is not None else []:
            try:
                finish(KINDS[str(name)].read(value), [], Watch(1.0))
            except CdmppError as error:
                _log.warning("%s could not be tried: %s", name, error)
