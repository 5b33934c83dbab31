"""Choice of the operators of a library job (``cdmpp measure --export-library``). Needs torch, as the job does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cdmpp.data.measure.kit.export_library import Variant, extra_variants, new_sizes, variants_of
from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import DataError
from cdmpp.model.artifact.model import Artifact
from cdmpp.programs.operators import OperatorSpec
from cdmpp.train.adaptation.samplers import choose
from cdmpp.train.adaptation.select import (
    MEMORY_SHARE,
    UNKNOWN_MEMORY_BYTES,
    Candidates,
    find_candidates,
    selection_points,
)

#: Operators with a longer predicted latency are not chosen: thousands must fit into half an hour.
LONGEST_S = 0.05
#: Share of operators without a specification.
EXTRA_SHARE = 0.2
#: Shares of attention by forced backends, and of composed and compiled forms, of operators with a specification. The
#: other operators are single calls of PyTorch's own choice.
_FORCED_SHARE, _MODULE_SHARE = 0.15, 0.2
#: New sizes that are drawn for each operator of the pool.
_DRAWS = 3


@dataclass(frozen=True)
class LibraryChoice:
    """Chosen variants, and the predicted latency of each in seconds (NaN: no prediction)."""

    variants: tuple[Variant, ...]
    expected_s: tuple[float, ...]


def choose_variants(
    artifact: Artifact, device: DeviceSpec, pool: Sequence[OperatorSpec], count: int, *, seed: int = 0
) -> LibraryChoice:
    """Choose operators to measure by KMeans over families, types, implementations and sizes.

    Half of the operators with a specification are of the pool, half have new sizes. One in five operators has no
    specification yet; all of these are new.

    Parameters
    ----------
    artifact : Artifact
        Its features and predictions are the space of KMeans.
    device : DeviceSpec
    pool : sequence of OperatorSpec
        Operators of the model's training data.
    count : int
        Number of items: an operator in one implementation.
    seed : int

    Raises
    ------
    DataError
        The pool has too few operators that PyTorch can run.
    """
    rng = np.random.default_rng([seed, 20])
    extra = round(EXTRA_SHARE * count)
    trained = (count - extra) // 2
    limit = MEMORY_SHARE * device.memory_bytes if device.memory_bytes else UNKNOWN_MEMORY_BYTES
    variants: list[Variant] = []
    expected_s: list[float] = []
    runnable = [spec for spec in pool if any(variants_of(spec, "training", limit))]
    new = [spec for spec in new_sizes(runnable, rng, _DRAWS) if any(variants_of(spec, "new", limit))]
    for specs, origin, number in ((runnable, "training", trained), (new, "new", count - extra - trained)):
        if number:
            chosen, seconds = _choose(artifact, device, specs, origin, number, seed, limit)
            variants += chosen
            expected_s += seconds
    variants += extra_variants([variant.operator for variant in variants], extra, rng)
    expected_s += [float("nan")] * (len(variants) - len(expected_s))
    return LibraryChoice(tuple(variants), tuple(expected_s))


def _choose(
    artifact: Artifact,
    device: DeviceSpec,
    specs: Sequence[OperatorSpec],
    origin: str,
    count: int,
    seed: int,
    memory_bytes: float,
) -> tuple[list[Variant], list[float]]:
    """Choose variants of operators by KMeans, in groups of implementations; a small group is taken whole."""
    candidates = find_candidates(
        artifact, device, specs, seed=seed, protocol="kernel", framework="pytorch", longest_s=LONGEST_S
    )
    groups: dict[str, list[tuple[int, Variant]]] = {"forced": [], "module": [], "plain": []}
    for row in candidates.rows.tolist():
        for variant in variants_of(candidates.program(row), origin, memory_bytes):
            group = "module" if variant.implementation != "library" else "forced" if variant.sdpa else "plain"
            groups[group].append((row, variant))
    numbers = {
        "forced": min(len(groups["forced"]), round(_FORCED_SHARE * count)),
        "module": min(len(groups["module"]), round(_MODULE_SHARE * count)),
    }
    numbers["plain"] = count - sum(numbers.values())
    if numbers["plain"] > len(groups["plain"]):
        raise DataError(
            f"cannot choose {numbers['plain']} operators with origin {origin!r} that PyTorch runs as one call: "
            f"there are {len(groups['plain'])}",
            hint="a smaller --count, or more programs: --pool FILE",
        )
    chosen: list[tuple[int, Variant]] = []
    for group, number in numbers.items():
        if number:
            chosen += _by_kmeans(candidates, groups[group], number, seed)
    return [variant for _, variant in chosen], [float(candidates.expected_s[row]) for row, _ in chosen]


def _by_kmeans(
    candidates: Candidates, members: Sequence[tuple[int, Variant]], count: int, seed: int
) -> list[tuple[int, Variant]]:
    """Choose by features, with a family for each operator, element type and implementation."""
    keys = [(v.operator["operator"], v.operator["dtype"], v.kind) for _, v in members]
    codes = {key: code for code, key in enumerate(sorted(set(keys)))}
    families = np.array([codes[key] for key in keys])
    points = selection_points(candidates.survey, np.array([row for row, _ in members]))
    return [members[i] for i in choose("kmeans", points, families, count, seed).tolist()]
