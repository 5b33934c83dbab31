"""How far a query lies from what was trained on.

The score adds two parts: the distance of the program's summary to the nearest of some hundred centres of
the training programs, in units of the distance that 99 % of the training programs keep; and a step for
what no training row had (this device with this operator, type and protocol; this operator at all).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from cdmpp.nn.inputs import SUMMARY_COLUMNS

Array = np.ndarray[Any, np.dtype[Any]]
Label = Literal["in", "near", "out"]
#: Best first.
LABELS: tuple[Label, ...] = ("in", "near", "out")

#: Columns of the summary in which distance is measured.
_COLUMNS = tuple(
    SUMMARY_COLUMNS.index(name)
    for name in (
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
        "leaves",
    )
)
#: Points whose distances are computed together.
_BLOCK = 512
NEAR_STEP, OUT_STEP, PART_STEP = 1.0, 2.0, 0.5
#: Scores up to the first are "in", up to the second "near".
THRESHOLDS = (1.0, 2.0)


def worst(labels: Iterable[Label | None]) -> Label | None:
    """The one of several answers that a figure made of all of them has; None without any."""
    return max((label for label in labels if label is not None), key=LABELS.index, default=None)


class Context(NamedTuple):
    """What a query has in common with training rows, or not."""

    device: str
    operator: str
    dtype: str
    protocol: str
    backend: str
    framework: str = ""

    def keys(self) -> tuple[str, str, str, str, str]:
        """Keys in :attr:`Domain.contexts`: the whole, the operator, its type, its protocol, who launched."""
        whole = "|".join((self.device, self.operator, self.dtype, self.protocol, self.backend))
        operator = f"{self.operator}|{self.backend}"
        launched = f"{self.device}&{self.framework}"
        return whole, operator, f"{operator}|{self.dtype}|*", f"{operator}|*|{self.protocol}", launched


@dataclass(frozen=True)
class Domain:
    """Centres of the training programs and the contexts that training rows had.

    Attributes
    ----------
    centres : float32, (centres, columns)
    reach : float
        Distance that 99 % of the training programs keep to their centre.
    contexts : frozenset of str
        The keys (:meth:`Context.keys`) of every training row, and ``device&`` for every device.
    """

    centres: Array
    reach: float
    contexts: frozenset[str]

    @classmethod
    def fit(cls, summary: Array, contexts: frozenset[str], seed: int, centres: int = 1024) -> Domain:
        """From the summaries of the distinct training programs (k-means on a seeded sample)."""
        from sklearn.cluster import MiniBatchKMeans

        points = summary[:, _COLUMNS].astype(np.float32)
        rng = np.random.default_rng(seed)
        sample = points[rng.choice(len(points), min(len(points), 40_000), replace=False)]
        means = MiniBatchKMeans(min(centres, len(sample)), random_state=seed, n_init=1, batch_size=4096)
        found = means.fit(sample).cluster_centers_.astype(np.float32)
        bare = cls(found, 1.0, contexts)
        return cls(found, float(np.quantile(bare.distance(sample), 0.99)), contexts)

    def tensors(self) -> dict[str, Array]:
        """What goes into the safetensors file."""
        return {"centres": self.centres}

    def manifest(self) -> dict[str, Any]:
        """What goes into the manifest."""
        return {"reach": self.reach, "thresholds": list(THRESHOLDS), "contexts": sorted(self.contexts)}

    @classmethod
    def load(cls, tensors: dict[str, Array], manifest: dict[str, Any]) -> Domain:
        """Back from :meth:`tensors` and :meth:`manifest`."""
        return cls(tensors["centres"], float(manifest["reach"]), frozenset(manifest["contexts"]))

    def distance(self, points: Array) -> Array:
        """Distance of points (n, columns) to the nearest centre, in units of ``reach``."""
        out = np.full(len(points), np.inf)
        centres = self.centres.astype(np.float64)
        squares = (centres**2).sum(axis=1)
        for start in range(0, len(points), _BLOCK):
            part = points[start : start + _BLOCK].astype(np.float64)
            own = (part**2).sum(axis=1)[:, None]
            # A matrix product finds the centres that may be nearest. Its last digits depend on how many rows
            # there are, so those few are compared again, each row on its own.
            rough = own + squares - 2.0 * (part @ centres.T)
            near = rough.min(axis=1, keepdims=True) + 1e-9 * (own + squares.max(initial=0.0))
            rows, columns = np.nonzero(rough <= near)
            gaps = np.zeros(len(rows))
            for point, centre in zip(part.T, centres.T, strict=True):
                gaps += (point[rows] - centre[columns]) ** 2
            np.minimum.at(out, start + rows, gaps)
        return np.asarray(np.sqrt(out) / max(self.reach, 1e-9))

    def score(self, summary: Array, contexts: Sequence[Context]) -> Array:
        """Domain score of queries.

        Parameters
        ----------
        summary : (n, len(SUMMARY_COLUMNS))
        contexts : sequence of Context, length n
        """
        steps = np.array([self.step(c) for c in contexts]) if len(contexts) else np.zeros(0)
        scores: Array = self.program_distance(summary) + steps
        return scores

    def program_distance(self, summary: Array) -> Array:
        """The part of the score that depends on the program alone: its capped :meth:`distance`."""
        capped: Array = np.minimum(self.distance(summary[:, _COLUMNS]), 10.0)
        return capped

    def step(self, context: Context) -> float:
        """0 for a context of the training set; more for each part that is new to it.

        A new combination of known parts costs :data:`NEAR_STEP`, an operator that training never had
        :data:`OUT_STEP`, each further new part (device, type, protocol, framework) :data:`PART_STEP`.
        """
        exact, operator, dtype, protocol, launched = context.keys()
        device = f"{context.device}&"
        new = [
            device not in self.contexts,
            dtype not in self.contexts,
            protocol not in self.contexts,
            bool(context.framework) and device in self.contexts and launched not in self.contexts,
        ]
        if operator not in self.contexts:
            return OUT_STEP + PART_STEP * sum(new)
        if exact in self.contexts and not any(new):
            return 0.0
        return NEAR_STEP + PART_STEP * max(sum(new) - 1, 0)


def label(score: float) -> Label:
    """Name of a score."""
    if score <= THRESHOLDS[0]:
        return "in"
    return "near" if score <= THRESHOLDS[1] else "out"
