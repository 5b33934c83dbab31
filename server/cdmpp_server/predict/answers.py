"""Cache of rendered predictions: repeated queries are answered without the predictor."""

from __future__ import annotations

from typing import Any

from cdmpp.predict.predictor import RowKey
from cdmpp.utils.lru import Lru
from cdmpp_server.predict.render import RenderedAnswer

#: Memory of a rendered answer and its key besides its text, approximately.
_ANSWER_BYTES = 600
#: Share of the memory for predictions that the predictor's own rows get; the rest is for rendered answers.
ROWS_SHARE = 0.35
Levels = tuple[float, ...]


class AnswerCache:
    """Rendered answers of all models of a service, by query, program name and quantile levels."""

    def __init__(self, max_bytes: int) -> None:
        self._answers: Lru[RenderedAnswer] = Lru(max_bytes)

    def get(self, key: RowKey, name: str, levels: Levels) -> RenderedAnswer | None:
        """The answer of a query on a program of this name at these levels, if it is cached."""
        return self._answers.get((*key, name, levels))

    def put(self, key: RowKey, name: str, levels: Levels, answer: RenderedAnswer) -> None:
        """Cache an answer."""
        entry: tuple[Any, ...] = (*key, name, levels)
        self._answers.put(entry, answer, len(answer.text) + _ANSWER_BYTES)
