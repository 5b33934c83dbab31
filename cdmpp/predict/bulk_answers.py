"""Answers in bulk, as arrays; the other half of :mod:`cdmpp.predict.bulk`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cdmpp.errors import DataError
from cdmpp.features.tensor_bytes import Layout, expect_format, numbers, read, texts, within, write

Array = np.ndarray[Any, np.dtype[Any]]

ANSWERS_FORMAT = "cdmpp-feature-answers-1"
#: Labels of :attr:`FeatureAnswers.domain` by code.
DOMAINS = ("in", "near", "out")
_FIGURES: Layout = {
    **{name: ("f64", ("rows",)) for name in ("latency_s", "lower_s", "upper_s")},
    "quantiles": ("f64", ("rows", "levels")),
    "domain": ("i8", ("rows",)),
    "domain_score": ("f64", ("rows",)),
    "roofline_s": ("f64", ("rows",)),
}


@dataclass(frozen=True)
class FeatureAnswers:
    """Answers to :class:`FeatureQueries`, arrays of their n rows in their order.

    Attributes
    ----------
    latency_s, lower_s, upper_s : float64, (n,)
        Seconds, as in :class:`cdmpp.predict.prediction.Prediction`.
    quantiles : float64, (n, len(levels))
        Seconds at each of ``levels``.
    domain : int8, (n,)
        Index into :data:`DOMAINS`.
    domain_score, roofline_s : float64, (n,)
    levels : tuple of float
    model_id : str
    """

    latency_s: Array
    lower_s: Array
    upper_s: Array
    quantiles: Array
    domain: Array
    domain_score: Array
    roofline_s: Array
    levels: tuple[float, ...]
    model_id: str

    def __len__(self) -> int:
        return len(self.latency_s)

    @property
    def labels(self) -> list[str]:
        """``domain`` in words."""
        return [DOMAINS[code] for code in self.domain.tolist()]

    @classmethod
    def none(cls, levels: tuple[float, ...], model_id: str) -> FeatureAnswers:
        """Answers to no queries."""
        empty = np.zeros(0)
        return cls(
            latency_s=empty,
            lower_s=empty,
            upper_s=empty,
            quantiles=np.zeros((0, len(levels))),
            domain=np.zeros(0, dtype=np.int8),
            domain_score=empty,
            roofline_s=empty,
            levels=levels,
            model_id=model_id,
        )

    @classmethod
    def concat(cls, parts: Sequence[FeatureAnswers]) -> FeatureAnswers:
        """Rows of ``parts``, which are answers of one model to the same levels and not empty."""
        if len({(part.model_id, part.levels) for part in parts}) != 1:
            raise DataError("answers of several models or levels do not make one table")
        joined: dict[str, Any] = {name: np.concatenate([getattr(part, name) for part in parts]) for name in _FIGURES}
        return replace(parts[0], **joined)

    def take(self, rows: Array) -> FeatureAnswers:
        """Some rows."""
        return replace(self, **{name: getattr(self, name)[rows] for name in _FIGURES})

    def to_bytes(self) -> bytes:
        """Serialise as safetensors."""
        return write(
            {name: getattr(self, name) for name in _FIGURES},
            _FIGURES,
            {"format": ANSWERS_FORMAT, "model_id": self.model_id, "levels": json.dumps(self.levels)},
        )

    @classmethod
    def from_bytes(cls, body: bytes | bytearray | memoryview) -> FeatureAnswers:
        """Read what :meth:`to_bytes` wrote.

        Raises
        ------
        DataError
            Not such bytes.
        """
        tensors, metadata = read(body, _FIGURES)
        expect_format(metadata, ANSWERS_FORMAT)
        levels = numbers(texts(metadata, "levels"))
        if tensors["quantiles"].shape[1] != len(levels) or "model_id" not in metadata:
            raise DataError("the answers name no model, or not the levels of their quantiles")
        within("domain", tensors["domain"], 0, len(DOMAINS) - 1)
        return cls(**tensors, levels=levels, model_id=metadata["model_id"])
