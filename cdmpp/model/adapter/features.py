"""Adapter features of queries: standardised sizes and ratios, codes of names, and the peers' predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cdmpp.model.adapter.residuals import AdapterFeatures
from cdmpp.model.nn.inputs import FAMILIES, QUESTION_COLUMNS, SUMMARY_COLUMNS, query_inputs, stack_devices
from cdmpp.model.nn.rows import BLOCK_ROWS, QueryBatch
from cdmpp.model.nn.weights import Weights
from cdmpp.programs.query_options import BACKENDS, FRAMEWORKS, PROTOCOLS

Array = np.ndarray[Any, np.dtype[Any]]

#: Inputs of the network that define the distance between two queries on one device.
NUMERIC = (
    "flops",
    "bytes",
    "output_elements",
    "batch",
    "m",
    "n",
    "k",
    "spatial_0",
    "spatial_1",
    "spatial_2",
    "reduce_0",
    "log_compute_us",
    "log_memory_us",
    "cache_ratio",
    "outputs_per_unit",
)
_COLUMNS = [(*SUMMARY_COLUMNS, *QUESTION_COLUMNS).index(name) for name in NUMERIC]
_FIRST_FAMILY = SUMMARY_COLUMNS.index(f"family_{FAMILIES[0]}")


@dataclass(frozen=True)
class Names:
    """Texts by code: operator with dtype, and protocol with backend and framework."""

    operators: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()


class FeatureMaker:
    """Makes :class:`AdapterFeatures`.

    Parameters
    ----------
    weights : Weights
        Weights that hold the mean and spread of every numeric feature in the training set.
    names : Names, optional
        Texts by code; an unknown text has the code -1. Without ``names``, new texts get new codes, which
        :attr:`names` lists.
    """

    def __init__(self, weights: Weights, names: Names | None = None) -> None:
        self._weights, self._grows = weights, names is None
        known = names or Names()
        self._operators = {name: i for i, name in enumerate(known.operators)}
        self._settings = {name: i for i, name in enumerate(known.settings)}

    @property
    def names(self) -> Names:
        """Texts by code."""
        return Names(tuple(self._operators), tuple(self._settings))

    def features(self, batch: QueryBatch, peers: Array, view: Array) -> AdapterFeatures:
        """Features of queries.

        Parameters
        ----------
        batch : QueryBatch
            n queries.
        peers, view : (n, trained devices), (n, VIEW_COLUMNS)
            Fields of :class:`cdmpp.model.raw_predictions.RawPredictions`.
        """
        rows = batch.rows
        matrix = stack_devices(batch.specs)
        numeric = np.empty((len(rows), len(NUMERIC)), dtype=np.float32)
        for start in range(0, len(rows), BLOCK_ROWS):
            part = rows.take(np.arange(start, min(start + BLOCK_ROWS, len(rows))))
            inputs = query_inputs(
                batch.store.summary[part.program], matrix[part.device], part.backend, part.protocol, part.framework
            )[0]
            numeric[start : start + len(part)] = self._weights.standardise(inputs)[:, _COLUMNS]
        one_hot = batch.store.summary[:, _FIRST_FAMILY : _FIRST_FAMILY + len(FAMILIES)]
        return AdapterFeatures(
            numeric=numeric,
            operator=self._operator(batch)[rows.program],
            family=one_hot.argmax(axis=1).astype(np.int32)[rows.program],
            setting=self._setting(rows.protocol, rows.backend, rows.framework),
            peers=peers.astype(np.float32),
            view=view,
        )

    def _operator(self, batch: QueryBatch) -> Array:
        """Operator code per program key."""
        used = np.unique(batch.kind[batch.rows.program])
        table = np.full(len(batch.kinds), -1, dtype=np.int32)
        for kind in used.tolist():
            table[kind] = self._code(self._operators, "|".join(batch.kinds[kind]))
        return table[batch.kind]

    def _setting(self, protocol: Array, backend: Array, framework: Array) -> Array:
        distinct, inverse = np.unique(np.stack([protocol, backend, framework], axis=1), axis=0, return_inverse=True)
        codes = [self._code(self._settings, setting_text(p, b, f)) for p, b, f in distinct.astype(int).tolist()]
        return np.array(codes, dtype=np.int32)[inverse.reshape(-1)]

    def _code(self, table: dict[str, int], name: str) -> int:
        return table.setdefault(name, len(table)) if self._grows else table.get(name, -1)


def setting_text(protocol: int, backend: int, framework: int) -> str:
    """Protocol, backend and framework of a query as one text."""
    launcher = FRAMEWORKS[framework] if framework >= 0 else ""
    return "|".join((PROTOCOLS[protocol], BACKENDS[backend], launcher))


def family_names(codes: Sequence[int]) -> list[str]:
    """Names of family codes."""
    return [FAMILIES[code] for code in codes]
