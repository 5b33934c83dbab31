"""Rules that leave rows of doubtful meaning out of training; the rows stay in every evaluation.

An importer states them per source (:attr:`cdmpp.data.importers.Importer.doubtful`). Unlike the rules of
:mod:`cdmpp.data.physics` they depend on columns that records do not keep, so records store their reasons.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from cdmpp.data.labels import Labels, Mask

DOUBTFUL = {
    "fused": "the compiler fused the layer into its neighbour: the latency does not grow with the tokens",
    "other_kernel": "a limit of the model switches to another kernel (sliding window: an explicit mask)",
    "stand_in": "the operator has no specification; another one of equal arithmetic and traffic is predicted",
    "composite": "the timed region contains further operators",
    "no_sizes": "the source states no lengths; the smallest are predicted",
    "paged_copy": "a copy per page of the cache, from the host",
}


def with_doubts(excluded: Labels, doubtful: Mapping[str, Mask]) -> Labels:
    """``excluded`` with the reasons of ``doubtful`` in rows that have none; earlier reasons come first."""
    if not doubtful:
        return excluded
    names = (*excluded.names, *(name for name in doubtful if name not in excluded.names))
    codes = excluded.codes.copy()
    free = np.array([not name for name in excluded.names])[codes]
    for name, rows in doubtful.items():
        if name not in DOUBTFUL:
            raise ValueError(f"unknown reason {name!r}; known: {', '.join(DOUBTFUL)}")
        codes[rows & free] = names.index(name)
        free &= ~rows
    return Labels(codes, names)
