"""What the run results of a search say of its next candidates: a Gaussian process on log residuals.

The network stays as it is. Its log residuals on the programs of one task that were run are taken for samples
of a smooth function of the program's features, of an offset, and of the network's own answer (whose spread
among programs that it finds fast is too wide or too narrow). All is in closed form: tens of milliseconds for
some hundred programs. docs/tuning.md says how kernel and features were chosen.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cdmpp.data.writing import replacing
from cdmpp.errors import ArtifactError
from cdmpp.features.encode import EncodedPrograms

Array = np.ndarray[Any, np.dtype[Any]]

FORMAT = "cdmpp-online-1"
#: A failed run is learned as so many times slower than the slowest that succeeded, or was predicted.
FAILED_FACTOR = 4.0
#: Residuals further than this from their median are cut there before the fit.
CLIP = 1.5
#: Standard deviations (natural log) of the offset and of a unit of the network's own answer.
OFFSET, SLOPE = 0.5, 0.5
#: Lengths, standard deviations and noises, of which the marginal likelihood picks a triple.
LENGTHS, AMPLITUDES, NOISES = (0.5, 1.0, 2.0, 4.0, 8.0), (0.15, 0.3, 0.6), (0.05, 0.1, 0.2)
#: Feature units (powers of two of a column) that make a distance of one.
UNIT = float(np.sqrt(20.0))
#: A magnitude is a base-2 logarithm of a double.
_LARGEST = 1000.0


def summary(encoded: Sequence[EncodedPrograms]) -> Array:
    """Programs as vectors, (n, columns): log2 of each column summed over a program's leaves."""
    rows = []
    for each in encoded:
        # Flags are summed as they come out of the same formula: they only tell programs apart.
        raw = np.exp2(np.clip(each.leaves[0].astype(np.float64), -_LARGEST, _LARGEST)) - 1
        rows.append(np.log2(1 + np.maximum(raw.sum(axis=0), 0.0)))
    return np.array(rows) / UNIT


@dataclass
class Learned:
    """What was run of one task: features (n, columns), log seconds predicted and measured, both (n,)."""

    features: Array = field(default_factory=lambda: np.zeros((0, 0)))
    base: Array = field(default_factory=lambda: np.zeros(0))
    log_s: Array = field(default_factory=lambda: np.zeros(0))


class OnlineResiduals:
    """Residuals of one task's programs; learns from runs, corrects predictions.

    Parameters
    ----------
    learned : Learned, optional
        What was run before.
    """

    def __init__(self, learned: Learned | None = None) -> None:
        self.learned = learned or Learned()
        self._process = _fit(self.learned) if len(self) else None

    def __len__(self) -> int:
        return len(self.learned.log_s)

    def learn(self, encoded: Sequence[EncodedPrograms], base: Array, seconds: Sequence[float | None]) -> None:
        """Add run results.

        Parameters
        ----------
        encoded : sequence of EncodedPrograms, length n
        base : (n,)
            log of the seconds that the network predicts.
        seconds : sequence of float or None, length n
            Measured; None for a run that failed.
        """
        before = self.learned
        good = [float(np.log(s)) for s in seconds if s is not None]
        slowest = max([*good, *before.log_s.tolist()], default=float(np.max(base)))
        failed = slowest + np.log(FAILED_FACTOR)
        log_s = np.array([failed if s is None else np.log(s) for s in seconds])
        rows = summary(encoded)
        self.learned = Learned(
            np.concatenate([before.features, rows]) if len(self) else rows,
            np.concatenate([before.base, base]),
            np.concatenate([before.log_s, log_s]),
        )
        self._process = _fit(self.learned)

    def correction(self, encoded: Sequence[EncodedPrograms], base: Array) -> Array:
        """What to add to the log of the predicted seconds, (n,)."""
        if self._process is None or not len(encoded):
            return np.zeros(len(encoded))
        return self._process.mean(summary(encoded), base)


class _Process:
    """Residuals given those of the programs that were run."""

    def __init__(self, learned: Learned, gap: Array, length: float, amplitude: float, noise: float) -> None:
        residual = learned.log_s - learned.base
        self._features, self._length, self._amplitude = learned.features, length, amplitude
        self._middle, self._centre = float(learned.base.mean()), float(np.median(residual))
        self._base = learned.base - self._middle
        used = np.clip(residual - self._centre, -CLIP, CLIP)
        covariance = self._kernel(gap, self._base)
        covariance[np.diag_indices(len(used))] += noise**2
        factor = np.linalg.cholesky(covariance)
        half = np.linalg.solve(factor, used)
        self._weight = np.linalg.solve(factor.T, half)
        self.log_likelihood = float(-0.5 * half @ half - np.log(np.diag(factor)).sum())

    def _kernel(self, gap: Array, base: Array) -> Array:
        """Prior covariance; Matern 5/2 in the features."""
        r = np.sqrt(5.0) * gap / self._length
        near = (1 + r + r * r / 3) * np.exp(-r)
        return np.asarray(OFFSET**2 + self._amplitude**2 * near + SLOPE**2 * np.outer(base, self._base))

    def mean(self, features: Array, base: Array) -> Array:
        """Expected residuals, (n,)."""
        kernel = self._kernel(_gaps(features, self._features), base - self._middle)
        return np.asarray(self._centre + kernel @ self._weight)


def _fit(learned: Learned) -> _Process:
    """The process whose scales make the measured residuals most likely."""
    gap = _gaps(learned.features, learned.features)
    tried = [_Process(learned, gap, *scales) for scales in itertools.product(LENGTHS, AMPLITUDES, NOISES)]
    return max(tried, key=lambda process: process.log_likelihood)


def _gaps(one: Array, other: Array) -> Array:
    """Distances between rows."""
    square = (one**2).sum(axis=1)[:, None] + (other**2).sum(axis=1)[None, :] - 2 * one @ other.T
    return np.asarray(np.sqrt(np.maximum(square, 0.0)))


def write_state(
    path: str | os.PathLike[str], online: Mapping[str, OnlineResiduals], reference: Mapping[str, float], model_id: str
) -> None:
    """Write what was learned of some tasks as safetensors, aside first.

    Parameters
    ----------
    path : path
    online : mapping of task to OnlineResiduals
    reference : mapping of task to float
        Unit of the task's scores, log seconds.
    model_id : str
        The model on top of which it was learned.
    """
    from safetensors.numpy import save_file

    tensors = {
        f"{i}.{name}": np.ascontiguousarray(value)
        for i, each in enumerate(online.values())
        for name, value in vars(each.learned).items()
    }
    about = {"tasks": list(online), "reference": dict(reference)}
    with replacing(Path(path)) as aside:
        save_file(tensors, aside, {"format": FORMAT, "model_id": model_id, "about": json.dumps(about)})


def read_state(path: str | os.PathLike[str]) -> tuple[dict[str, OnlineResiduals], dict[str, float], str]:
    """What :func:`write_state` wrote.

    Raises
    ------
    ArtifactError
        Not such a file, or a damaged one.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "np") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise ValueError(f"its format is not {FORMAT}")
            about = json.loads(metadata["about"])
            online = {
                task: OnlineResiduals(
                    Learned(*(file.get_tensor(f"{i}.{name}") for name in ("features", "base", "log_s")))
                )
                for i, task in enumerate(about["tasks"])
            }
            return online, {task: float(at) for task, at in about["reference"].items()}, metadata["model_id"]
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise ArtifactError(
            f"{path} is not what a cost model saved: {error}", hint="begin anew without the file"
        ) from None
