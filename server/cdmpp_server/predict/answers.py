"""Rendered predictions, cached beside the predictor's own rows."""

from __future__ import annotations

from cdmpp.predict.predictor import ROW_BYTES, CachedRow, RowKey
from cdmpp.utils.lru import Lru
from cdmpp_server.predict.admission import CACHED_WORK
from cdmpp_server.predict.programs import Known, KnownDevice
from cdmpp_server.predict.render import Answer

#: Memory of a rendered answer besides its text, approximately.
_ANSWER_BYTES = 400
#: Rendered answers per row, for different quantiles or names; the oldest is dropped.
MAX_ANSWERS = 8
Levels = tuple[float, ...]


def answer_key(model_id: str, program: Known, device: KnownDevice, protocol: str, framework: str | None) -> RowKey:
    """The key of a query in the predictor's cache."""
    return model_id, program.hash, program.backend, device.cache_key, device.spec.name, protocol, framework


def find_answer(cache: Lru[CachedRow], key: RowKey, name: str, levels: Levels) -> Answer | None:
    """The rendered answer of a query for a program of this name at these quantiles, if it is cached."""
    row = cache.get(key)
    if row is not None:
        for program, quantiles, answer in row[1]:
            if program == name and quantiles == levels:
                kept: Answer = answer
                return kept
    return None


def work_of(cache: Lru[CachedRow], key: RowKey) -> float:
    """Cost of a query without a rendered answer, in rows of a new operator."""
    return 1.0 if cache.get(key) is None else CACHED_WORK


def keep_answer(cache: Lru[CachedRow], key: RowKey, name: str, levels: Levels, answer: Answer) -> None:
    """Cache a rendered answer, if the predictor's row is still cached."""
    row = cache.get(key)
    if row is not None:
        answers = (*row[1], (name, levels, answer))[-MAX_ANSWERS:]
        size = sum(len(rendered.text) + _ANSWER_BYTES for _, _, rendered in answers)
        cache.put(key, (row[0], answers), ROW_BYTES + size)
