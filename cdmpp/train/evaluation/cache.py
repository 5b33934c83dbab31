"""Disk cache of features of TVM programs, which avoids parsing their JSON again.

Only programs given as TVM JSON are cached. Features of operators are computed as arrays from
the lowered template of their structural class, 71,000 attention shapes in 2.2 s and 123,000 convolutions in
0.5 s, which is faster than reading them back.

The key is a hash of the program's text, not the structural hash that a record claims for it: making sure of
the latter takes as long as encoding, and a false one would put wrong features into everybody's cache.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from cdmpp import __version__
from cdmpp.features.class_features import PROGRAM_COLUMNS
from cdmpp.features.encode import EncodedPrograms
from cdmpp.features.schedule import SCHEDULE_HASH, SCHEDULE_WIDTH
from cdmpp.features.schema import SCHEMA_HASH, WIDTH
from cdmpp.utils.cache import cache_dir

logger = logging.getLogger(__name__)

_DIGEST_BYTES = 32


class FeatureCache:
    """One small file per program, by default below :func:`cdmpp.utils.cache.cache_dir`; each feature schema and version
    has a subfolder. An unreadable folder or file counts as empty. ``schedule``: with the schedule's columns
    (``NetworkConfig.schedule``)."""

    def __init__(self, folder: Path | None = None, *, schedule: bool = False) -> None:
        schema = f"{SCHEMA_HASH}-{SCHEDULE_HASH}" if schedule else SCHEMA_HASH
        self.schedule = schedule
        self.width = WIDTH + SCHEDULE_WIDTH if schedule else WIDTH
        self.folder = (folder or cache_dir()) / f"features-{schema}-{__version__}"
        self._writable = True

    def get(self, text: str) -> EncodedPrograms | None:
        """Features of a program, or None when they are missing or damaged."""
        try:
            content = self._path(text).read_bytes()
        except OSError:
            return None
        digest, payload = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        if hashlib.sha256(payload).digest() != digest:
            return None
        try:
            arrays = load(payload)
            dtype, family = arrays["names"].tobytes().decode().split("\0")
            encoded = EncodedPrograms(arrays["leaves"], arrays["positions"], arrays["totals"], dtype, family)
        except (SafetensorError, KeyError, ValueError):
            return None
        fits = encoded.leaves.shape[2:] == (self.width,) and encoded.totals.shape == (1, len(PROGRAM_COLUMNS))
        return encoded if fits else None

    def put(self, text: str, encoded: EncodedPrograms) -> None:
        """Store a program's features; a temporary file is renamed, so that no partial file is read."""
        if not self._writable:
            return
        names = np.frombuffer(f"{encoded.dtype}\0{encoded.family}".encode(), dtype=np.uint8)
        payload = save(
            {
                "leaves": np.ascontiguousarray(encoded.leaves),
                "positions": np.ascontiguousarray(encoded.positions),
                "totals": np.ascontiguousarray(encoded.totals),
                "names": names,
            }
        )
        path = self._path(text)
        aside = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            aside.write_bytes(hashlib.sha256(payload).digest() + payload)
            aside.replace(path)
        except OSError as error:
            # With a read-only home or a full disk the evaluation continues without cache.
            logger.info("features are not kept: %s", error)
            self._writable = False
            aside.unlink(missing_ok=True) if aside.parent.is_dir() else None

    def _path(self, text: str) -> Path:
        key = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        return self.folder / key[:2] / key[2:]
