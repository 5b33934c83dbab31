"""Online correction of a search's predictions, and optimistic latencies of its candidates.

The network is unchanged. The log residuals of a task's measured programs are modelled by a Gaussian process: as samples
of a smooth function of the program's features, plus an offset, plus a multiple of the network's prediction, whose
spread among fast programs is too wide or too narrow. The fit is in closed form and takes tens of milliseconds for a
hundred programs. docs/tuning.md explains the choice of kernel and features.

What is unlike all measured programs is worth a trial: a cost model only gives scores, and MetaSchedule measures the
best of them, which are often near-duplicates. :class:`ResidualSpread` is the standard deviation of the residuals'
smooth part, given the programs that are measured or picked. :func:`optimistic` picks candidates one by one, each as if
the earlier picks were measured already (GP-BUCB: Desautels, Krause and Burdick, 2014).
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cdmpp.errors import ArtifactError
from cdmpp.features.encode import EncodedPrograms
from cdmpp.features.schedule import FIRST_WIDTH
from cdmpp.features.schema import WIDTH
from cdmpp.utils.files import check_regular, parse_json
from cdmpp.utils.writing import replacing

Array = np.ndarray[Any, np.dtype[Any]]

FORMAT = "cdmpp-online-1"
#: Factor of a failed run over the slowest successful or predicted one.
FAILED_FACTOR = 4.0
#: Maximum distance of residuals from their median; larger ones are clipped before the fit.
CLIP = 1.5
#: Prior standard deviations (natural log) of the offset and of the slope over the network's prediction.
OFFSET, SLOPE = 0.5, 0.15
#: Length scales, standard deviations and noises; the marginal likelihood selects a triple.
LENGTHS, AMPLITUDES, NOISES = (0.5, 1.0, 2.0, 4.0, 8.0), (0.15, 0.3, 0.6), (0.05, 0.1, 0.2)
#: Length scale, standard deviation and noise before the first measurement.
_FIRST = (2.0, 0.3, 0.1)
#: Feature units (powers of two of a column) of a distance of one.
UNIT = float(np.sqrt(20.0))
#: Columns of a leaf that count in a distance: those with which the scales above were chosen, and that files hold.
_COLUMNS = WIDTH + FIRST_WIDTH
#: A magnitude is a base-2 logarithm of a double.
_LARGEST = 1000.0


def summary(encoded: Sequence[EncodedPrograms]) -> Array:
    """Return programs as vectors, (n, columns): log2 of each column, summed over a program's leaves."""
    rows = []
    for program in encoded:
        # Flags use the same formula; they only distinguish programs.
        leaves = program.narrow(_COLUMNS).leaves[0].astype(np.float64)
        raw = np.exp2(np.clip(leaves, -_LARGEST, _LARGEST)) - 1
        rows.append(np.log2(1 + np.maximum(raw.sum(axis=0), 0.0)))
    return np.array(rows) / UNIT


class Scales(NamedTuple):
    """Length scale, standard deviation (natural log) of the smooth part, and standard deviation of a measurement."""

    length: float
    amplitude: float
    noise: float


def matern(left: Array, other: Array, length: float) -> Array:
    """Correlation (Matern 5/2) of the rows of two summaries, (rows of one, rows of other)."""
    return _matern(_gaps(left, other), length)


@dataclass
class Learned:
    """Measured programs of one task: features (n, columns), predicted and measured log seconds, both (n,)."""

    features: Array = field(default_factory=lambda: np.zeros((0, 0)))
    base: Array = field(default_factory=lambda: np.zeros(0))
    log_s: Array = field(default_factory=lambda: np.zeros(0))


class OnlineResiduals:
    """Residuals of one task's programs: learns from runs and corrects predictions. ``learned``: earlier
    measurements."""

    def __init__(self, learned: Learned | None = None) -> None:
        self.learned = learned or Learned()
        self._process = _fit(self.learned) if len(self) else None

    def __len__(self) -> int:
        return len(self.learned.log_s)

    @property
    def scales(self) -> Scales:
        """Scales that the measurements select; before the first, usual ones."""
        return Scales(*_FIRST) if self._process is None else self._process.scales

    def learn(self, rows: Array, base: Array, seconds: Sequence[float | None]) -> None:
        """Add run results: summaries of the programs (n, columns), log seconds that the network predicted, and measured
        seconds, None for a failed run."""
        before = self.learned
        good = [float(np.log(s)) for s in seconds if s is not None]
        slowest = max([*good, *before.log_s.tolist()], default=float(np.max(base)))
        failed = slowest + np.log(FAILED_FACTOR)
        log_s = np.array([failed if s is None else np.log(s) for s in seconds])
        self.learned = Learned(
            np.concatenate([before.features, rows]) if len(self) else rows,
            np.concatenate([before.base, base]),
            np.concatenate([before.log_s, log_s]),
        )
        self._process = _fit(self.learned)

    def correction(self, rows: Array, base: Array) -> Array:
        """Return the correction of the predicted log seconds, (n,), of programs with these summaries, (n, columns)."""
        if self._process is None or not len(rows):
            return np.zeros(len(rows))
        return self._process.mean(rows, base)


class _Process:
    """Posterior of the residuals, given those of the measured programs."""

    def __init__(self, learned: Learned, gap: Array, scales: Scales) -> None:
        residual = learned.log_s - learned.base
        self._features, self.scales = learned.features, scales
        self._middle, self._centre = float(learned.base.mean()), float(np.median(residual))
        self._base = learned.base - self._middle
        used = np.clip(residual - self._centre, -CLIP, CLIP)
        covariance = self._kernel(gap, self._base)
        covariance[np.diag_indices(len(used))] += scales.noise**2
        factor = np.linalg.cholesky(covariance)
        half = np.linalg.solve(factor, used)
        self._weight = np.linalg.solve(factor.T, half)
        self.log_likelihood = float(-0.5 * half @ half - np.log(np.diag(factor)).sum())

    def _kernel(self, gap: Array, base: Array) -> Array:
        """Prior covariance; Matern 5/2 in the features."""
        near = _matern(gap, self.scales.length)
        return np.asarray(OFFSET**2 + self.scales.amplitude**2 * near + SLOPE**2 * np.outer(base, self._base))

    def mean(self, features: Array, base: Array) -> Array:
        """Expected residuals, (n,)."""
        kernel = self._kernel(_gaps(features, self._features), base - self._middle)
        return np.asarray(self._centre + kernel @ self._weight)


def _fit(learned: Learned) -> _Process:
    """Return the process with the scales of the largest marginal likelihood."""
    gap = _gaps(learned.features, learned.features)
    tried = [_Process(learned, gap, Scales(*s)) for s in itertools.product(LENGTHS, AMPLITUDES, NOISES)]
    return max(tried, key=lambda process: process.log_likelihood)


def _matern(gap: Array, length: float) -> Array:
    r = np.sqrt(5.0) * gap / length
    return np.asarray((1 + r + r * r / 3) * np.exp(-r))


def _gaps(left: Array, other: Array) -> Array:
    """Distances between rows."""
    square = (left**2).sum(axis=1)[:, None] + (other**2).sum(axis=1)[None, :] - 2 * left @ other.T
    return np.asarray(np.sqrt(np.maximum(square, 0.0)))


def write_state(
    path: str | os.PathLike[str], online: Mapping[str, OnlineResiduals], reference: Mapping[str, float], model_id: str
) -> None:
    """Write the learned state of tasks as safetensors; the file is replaced atomically.

    ``reference``: reference of the task's scores, in log seconds.
    ``model_id``: id of the base model.
    """
    from safetensors.numpy import save_file

    tensors = {
        f"{i}.{name}": np.ascontiguousarray(value)
        for i, residuals in enumerate(online.values())
        for name, value in vars(residuals.learned).items()
    }
    about = {"tasks": list(online), "reference": dict(reference)}
    with replacing(Path(path)) as aside:
        save_file(tensors, aside, {"format": FORMAT, "model_id": model_id, "about": json.dumps(about)})


def read_state(path: str | os.PathLike[str]) -> tuple[dict[str, OnlineResiduals], dict[str, float], str]:
    """Read a file of :func:`write_state`. Raises ArtifactError: the file has another format, or is damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        check_regular(path)
        with safe_open(path, "np") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise ValueError(f"its format is not {FORMAT}")
            about = parse_json(metadata["about"])
            online = {
                task: OnlineResiduals(
                    Learned(*(file.get_tensor(f"{i}.{name}") for name in ("features", "base", "log_s")))
                )
                for i, task in enumerate(about["tasks"])
            }
            return online, {task: float(at) for task, at in about["reference"].items()}, metadata["model_id"]
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise ArtifactError(
            f"{path} was not saved by a cost model: {error}", hint="start again without the file"
        ) from None


#: Candidates of one call that are picked: as many as the trials of a round.
PICKS = 16


class ResidualSpread:
    """Covariance of the residuals of candidates, given observed programs: measured, or picked for measuring. Both are
    summaries, (n, columns) and (m, columns)."""

    def __init__(self, candidates: Array, observed: Array, scales: Scales) -> None:
        self._candidates, self._scales = candidates, scales
        self.variance = np.full(len(candidates), scales.amplitude**2)
        self._reductions: list[Array] = []
        if len(observed):
            covariance = self._prior(observed, observed)
            covariance[np.diag_indices(len(observed))] += scales.noise**2
            self._reductions = list(np.linalg.solve(np.linalg.cholesky(covariance), self._prior(observed, candidates)))
            self.variance -= np.square(self._reductions).sum(axis=0)

    @property
    def deviation(self) -> Array:
        """Standard deviation of the residual of each candidate, (n,)."""
        return np.asarray(np.sqrt(np.maximum(self.variance, 0.0)))

    def observe(self, index: int) -> None:
        """Condition on one more program, a candidate."""
        column = self._prior(self._candidates[index : index + 1], self._candidates)[0]
        if self._reductions:
            reductions = np.array(self._reductions)
            column = column - reductions[:, index] @ reductions
        column /= np.sqrt(max(self.variance[index], 0.0) + self._scales.noise**2)
        self._reductions.append(column)
        self.variance = self.variance - column**2

    def _prior(self, left: Array, right: Array) -> Array:
        return self._scales.amplitude**2 * matern(left, right, self._scales.length)


def optimistic(log_s: Array, spread: ResidualSpread, explore: float, picks: int = PICKS) -> tuple[Array, list[int]]:
    """Predicted latencies less a multiple of their spread.

    ``log_s`` (n,) are expected seconds; ``spread`` of the n candidates is conditioned on the picks, ``picks`` at most;
    ``explore`` standard deviations are subtracted. Returns optimistic log seconds (n,), where candidates like a better
    one have less subtracted, and the positions of the picks, in order.
    """
    values, picked = np.array(log_s, dtype=float), list[int]()
    open_ = np.ones(len(values), dtype=bool)
    for _ in range(min(picks, len(values))):
        values[open_] = log_s[open_] - explore * spread.deviation[open_]
        best = int(np.where(open_, values, np.inf).argmin())
        open_[best] = False
        picked.append(best)
        spread.observe(best)
    values[open_] = log_s[open_] - explore * spread.deviation[open_]
    return values, picked
