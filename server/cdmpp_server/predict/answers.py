"""Rendered predictions, cached beside the predictor's own rows."""

from __future__ import annotations

from cdmpp.lru import Lru
from cdmpp.predictor import ROW_BYTES, CachedRow, RowKey
from cdmpp_server.predict.devices import KnownDevice
from cdmpp_server.predict.programs import Known
from cdmpp_server.predict.render import Answer

#: Memory of a rendered answer besides its text, approximately.
_ANSWER_BYTES = 400
Levels = tuple[float, ...]


def answer_key(model_id: str, program: Known, device: KnownDevice, protocol: str, framework: str | None) -> RowKey:
    """The key of a query in the predictor's cache."""
    return model_id, program.hash, program.backend, device.digest, device.spec.name, protocol, framework


def find_answer(cache: Lru[CachedRow], key: RowKey, name: str, levels: Levels) -> Answer | None:
    """The rendered answer of a query for a program of this name at these quantiles, if it is cached."""
    row = cache.get(key)
    if row is None:
        return None
    answer: Answer | None = row.rendered.get((name, levels))
    return answer


def keep_answer(cache: Lru[CachedRow], key: RowKey, name: str, levels: Levels, answer: Answer) -> None:
    """Cache a rendered answer, if the predictor's row is still cached."""
    row = cache.get(key)
    if row is not None:
        row.rendered[name, levels] = answer
        size = sum(len(rendered.text) + _ANSWER_BYTES for rendered in list(row.rendered.values()))
        cache.put(key, row, ROW_BYTES + size)
