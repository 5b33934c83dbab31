"""Choice of the schedules of a task to measure, from a drawn pool: predicted fastest, and active choice.

Active choice takes programs on which the members of an ensemble disagree, and that differ from those already taken:
the next one has the largest standard deviation of the predicted log latency times the distance to its nearest taken
program, in standardised features. Sums over the leaves are the features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cdmpp.data.measure.sampling import SampledProgram
from cdmpp.errors import CdmppError, DataError
from cdmpp.features.encode import EncodedPrograms, encode_tvm_json

Array = np.ndarray[Any, np.dtype[Any]]
#: Log seconds of programs, (programs,).
Member = Callable[[Sequence[EncodedPrograms]], Array]

#: Least standard deviation of predicted log latencies: where members agree, the distance decides.
LEAST_DEVIATION = 0.01


class EnsembleChooser:
    """Adds schedules of a pool to the random ones of a task: ``good`` ones, with the lowest mean of the predicted log
    latencies, and ``active`` ones.

    ``members`` are trained models, at least two for active choice; ``pool`` is the number of schedules to draw besides
    the random ones, ``names`` the ids of the members for the description.
    """

    def __init__(self, members: Sequence[Member], *, pool: int, good: int, active: int, names: Sequence[str]) -> None:
        if len(members) < (2 if active else 1):
            raise DataError(
                f"{len(members)} models cannot choose {good} good and {active} active schedules",
                hint="--model once for good schedules, twice or more for active ones",
            )
        self.members, self.pool, self.good, self.active = tuple(members), pool, good, active
        self.description: dict[str, Any] = {"pool": pool, "good": good, "active": active, "models": list(names)}

    def __call__(self, programs: Sequence[SampledProgram], schedules: int) -> list[SampledProgram]:
        """Return the default, ``schedules`` random draws, then good and active ones in turns. ``programs``: the default
        first, then the pool in the order of the draws."""
        taken, pool = list(programs[: 1 + schedules]), list(programs[1 + schedules :])
        everything = [*taken, *pool]
        encoded = [(i, e) for i, program in enumerate(everything) if (e := _encode(program)) is not None]
        chosen = self._choose([e for _, e in encoded], sum(i < len(taken) for i, _ in encoded))
        further = [replace(everything[encoded[i][0]], origin=origin) for i, origin in chosen]
        random = taken[1:]
        mixed = [p for i in range(max(len(random), len(further))) for p in (*further[i : i + 1], *random[i : i + 1])]
        return [*taken[:1], *mixed]

    def _choose(self, encoded: Sequence[EncodedPrograms], taken: int) -> list[tuple[int, str]]:
        """Positions and origins; the first ``taken`` programs are measured anyway."""
        if len(encoded) <= taken:
            return []
        log_s = np.stack([member(encoded) for member in self.members])
        order = taken + np.argsort(log_s.mean(0)[taken:], kind="stable")
        good = [int(i) for i in order[: self.good]]
        features = np.stack([e.leaves[0].sum(0) for e in encoded]).astype(float)
        scale = features.std(0)
        features = features[:, scale > 0] / scale[scale > 0]
        deviation = np.maximum(log_s.std(0), LEAST_DEVIATION)
        near = np.full(len(encoded), np.inf)
        for i in (*range(taken), *good):
            near = np.minimum(near, np.linalg.norm(features - features[i], axis=1))
        active: list[int] = []
        for _ in range(min(self.active, len(encoded) - taken - len(good))):
            score = deviation * near
            score[[*range(taken), *good, *active]] = -1.0
            best = int(score.argmax())
            active.append(best)
            near = np.minimum(near, np.linalg.norm(features - features[best], axis=1))
        return [(i, "good") for i in good] + [(i, "active") for i in active]


def _encode(program: SampledProgram) -> EncodedPrograms | None:
    """Features; None for a program that cannot be encoded, which is not chosen."""
    try:
        return encode_tvm_json(program.tvm_json, schedule=True)
    except CdmppError:
        return None
