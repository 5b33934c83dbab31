"""Residuals of profiles: the spread of measured around predicted durations, within sources and between them.

A residual is what an interval needs beside the bounds of its kernels to hold :data:`SHARE` of the measured durations.
Every model on a device of a source weighs about the same, however many rows it has, and :data:`OWN` times as much where
it ran on the profile's engine.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cdmpp.llm.engines.profile import EngineProfile
from cdmpp.model.domain.score import LABELS, Label

#: Share of measured durations that an interval holds, and quantile of a normal distribution at its ends.
SHARE, TO_BOUND = 0.8, 1.2816
#: Weight of the profile's own engine, and rows of a model by which few of them weigh less.
OWN, FEW = 4.0, 4
FIELDS = ("residual", "near_residual", "out_residual")


class Miss(NamedTuple):
    """A measured duration: engine (or kind), its source with the model, domain, and the residual that it needs."""

    engine: str
    source: Any
    domain: Label
    needed: float


def needed(figures: Any, seconds: float, *, widest: bool = False) -> float:
    """The residual with which an interval holds a measured duration. ``figures``: point, lower and upper bound with a
    residual of 0. ``widest``: whether the wider of kernels and residual counts, not the root of their squares."""
    point, lower, upper = np.log(np.asarray(figures) / seconds)
    bound = upper - point if point < 0 else point - lower
    beyond = float(point**2 if widest and abs(point) > bound else max(0.0, point**2 - bound**2))
    return beyond**0.5 / TO_BOUND if abs(point) > bound else 0.0


def plain(profile: EngineProfile) -> EngineProfile:
    """The profile without residuals."""
    return profile.model_copy(update=dict.fromkeys(FIELDS, 0.0))


def spread(misses: Sequence[Miss], engine: str) -> float:
    """The residual that so many misses need.

    Of n sources a further one is beyond the quantile ``SHARE (n + 1) / n`` as often as wanted.
    """
    if not misses:
        return 0.0
    sizes = Counter(miss.source for miss in misses)
    weights = np.array([(OWN if miss.engine == engine else 1.0) / (FEW + sizes[miss.source]) for miss in misses])
    sources = Counter[Any]()
    for miss, weight in zip(misses, weights.tolist(), strict=True):
        sources[miss.source] += weight
    level = SHARE * (1 + sum(weight**2 for weight in sources.values()) / weights.sum() ** 2)
    values = np.array([miss.needed for miss in misses])
    order = np.argsort(values)
    at = int(np.searchsorted(np.cumsum(weights[order]), level * weights.sum()))
    return float(values[order][min(at, len(values) - 1)])


def residuals(misses: Iterable[Miss], engine: str) -> dict[str, float]:
    """Residuals by domain, none below that of a better one."""
    known, least, update = list(misses), 0.0, {}
    for field, label in zip(FIELDS, LABELS, strict=True):
        least = max(least, spread([miss for miss in known if miss.domain == label], engine))
        update[field] = round(least, 3)
    return update


def truth_parser(description: str | None) -> argparse.ArgumentParser:
    """Options of a study of published durations of whole systems."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawTextHelpFormatter)
    configs = "folder of the models' config.json, with aliases.csv (default: model_configs beside the tables)"
    parser.add_argument("--public-data", type=Path, help="folder of the public tables")
    parser.add_argument("--configs", type=Path, help=configs)
    parser.add_argument("--model", type=Path, help="model folder (default: the shipped model)")
    parser.add_argument("--render", action="store_true", help="render the stored result")
    return parser
