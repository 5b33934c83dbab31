"""Selection of programs to measure on a device, from a pool, with a model's predictions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cdmpp.data.measure.runtime.call_problems import call_problem
from cdmpp.data.measure.timing import TimingSettings
from cdmpp.data.physics import needed_bytes
from cdmpp.data.records import Measurement
from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import DataError
from cdmpp.model.adapter import ResidualSettings, kernel
from cdmpp.model.artifact.model import Artifact
from cdmpp.model.inference.pipeline import InferencePipeline
from cdmpp.programs.operators import OperatorSpec
from cdmpp.train.adaptation.records import Survey, device_records, survey
from cdmpp.train.adaptation.samplers import choose
from cdmpp.train.evaluation.cache import FeatureCache

Array = np.ndarray[Any, np.dtype[Any]]

#: Share of the device's memory that a program may take; bytes where its size is not known.
MEMORY_SHARE, UNKNOWN_MEMORY_BYTES = 0.6, 4e9
#: Maximum programs of a pool; a larger pool is sampled with a seed.
MAX_POOL = 20_000
#: Seconds per program besides its runs: allocating and filling tensors, selecting a kernel.
_OVERHEAD_S = 0.15
#: Share of programs that are timed in a second round.
_AGAIN = 0.3
#: Programs with a longer predicted latency are not selected.
LONGEST_S = 2.0


@dataclass(frozen=True)
class Selection:
    """Programs to measure, in order of choice.

    Attributes
    ----------
    programs : tuple of OperatorSpec
    expected_s : float64 array
        Predicted latency of each on the device, in seconds.
    estimate_s : float
        Estimated seconds to measure all of them (:func:`measuring_s`).
    pool : int
        Number of candidate programs.
    left_out : Counter of str
        Programs of the pool that could not be, by reason: "no PyTorch call" (only with ``framework="pytorch"``),
        "memory", "not sampled" (of a pool larger than :data:`MAX_POOL`), "not predictable", "too long".
    """

    programs: tuple[OperatorSpec, ...]
    expected_s: Array
    estimate_s: float
    pool: int
    left_out: Counter[str]


def select(
    artifact: Artifact,
    device: DeviceSpec,
    pool: Sequence[OperatorSpec],
    k: int,
    *,
    sampler: str = "kmeans",
    seed: int = 0,
    protocol: str = "kernel",
    framework: str = "",
    settings: ResidualSettings | None = None,
) -> Selection:
    """Choose k programs of a pool to measure on a device.

    The selection uses the same data as adaptation (:func:`cdmpp.train.adaptation.records.survey`), except latencies.

    Raises
    ------
    DataError
        ``k`` is larger than the number of candidates, or there are none.
    """
    candidates = find_candidates(
        artifact, device, pool, seed=seed, protocol=protocol, framework=framework, longest_s=LONGEST_S
    )
    short, left_out = candidates.rows, candidates.left_out
    if k > len(short):
        raise DataError(
            f"cannot choose k = {k} programs: the pool has {len(short)} that can be measured{_reasons(left_out)}",
            hint="a smaller --k, or another --pool FILE",
        )
    chosen = short[choose_rows(candidates.survey, short, k, sampler, seed, settings)]
    programs = tuple(candidates.program(int(row)) for row in chosen)
    expected_s = candidates.expected_s[chosen]
    return Selection(programs, expected_s, float(measuring_s(expected_s).sum()), len(short), +left_out)


@dataclass(frozen=True)
class Candidates:
    """Programs of a pool that a device can run, with predictions.

    Attributes
    ----------
    programs : sequence of OperatorSpec
    origin : int array
        Position in ``programs`` of each row of the survey.
    survey : Survey
    expected_s : float64 array
        Predicted latency of each row of the survey, in seconds.
    rows : int array
        Rows of the survey that take no longer than the limit.
    left_out : Counter of str
        As in :class:`Selection`.
    """

    programs: Sequence[OperatorSpec]
    origin: Array
    survey: Survey
    expected_s: Array
    rows: Array
    left_out: Counter[str]

    def program(self, row: int) -> OperatorSpec:
        """Program of a row of the survey."""
        return self.programs[int(self.origin[row])]


def find_candidates(
    artifact: Artifact,
    device: DeviceSpec,
    pool: Sequence[OperatorSpec],
    *,
    seed: int,
    protocol: str,
    framework: str,
    longest_s: float,
) -> Candidates:
    """Predict the programs of a pool that fit into a device's memory.

    Raises
    ------
    DataError
        No program fits.
    """
    measurable = [spec for spec in pool if framework != "pytorch" or not call_problem(spec.canonical())]
    limit = MEMORY_SHARE * device.memory_bytes if device.memory_bytes else UNKNOWN_MEMORY_BYTES
    fitting = [spec for spec in measurable if needed_bytes(spec, gpu=device.kind == "gpu") <= limit]
    left_out = Counter({"no PyTorch call": len(pool) - len(measurable), "memory": len(measurable) - len(fitting)})
    if len(fitting) > MAX_POOL:
        sample = np.sort(np.random.default_rng(seed).choice(len(fitting), MAX_POOL, replace=False))
        left_out["not sampled"] = len(fitting) - MAX_POOL
        fitting = [fitting[i] for i in sample.tolist()]
    if not fitting:
        raise DataError(
            f"none of the {len(pool)} programs of the pool can be measured on {device.name}"
            f" with {limit / 1e9:.3g} GB{_reasons(left_out)}",
            hint="name another pool with --pool FILE, or another --framework",
        )
    # Nothing is measured yet: records need a latency, which is not read.
    rows = [
        Measurement(
            spec.text(),
            "operator",
            device.name,
            1.0,
            program_hash=spec.hash(),
            protocol=protocol,
            framework=framework,
            device_spec=device,
        )
        for spec in fitting
    ]
    records = device_records(rows, device, artifact)
    known = survey(InferencePipeline(artifact), records, FeatureCache(schedule=artifact.reads_schedules))
    expected = np.exp(known.point[known.query])
    left_out["not predictable"] = len(fitting) - len(known.rows)
    short = np.flatnonzero(expected <= longest_s)
    left_out["too long"] = len(expected) - len(short)
    return Candidates(fitting, records.origin[known.rows], known, expected, short, left_out)


def selection_points(known: Survey, rows: Array, settings: ResidualSettings | None = None) -> Array:
    """Features that KMeans chooses by, (rows, columns): those of the residual process."""
    features = known.features.take(known.query[rows])
    view = (settings or ResidualSettings()).view
    return np.concatenate([features.numeric, view * features.view], axis=1)


def _reasons(left_out: Counter[str]) -> str:
    counts = ", ".join(f"{reason} {count:,}" for reason, count in left_out.items() if count)
    return f" (left out: {counts})" if counts else ""


def choose_rows(
    known: Survey, rows: Array, k: int, sampler: str, seed: int, settings: ResidualSettings | None = None
) -> Array:
    """Positions in ``rows`` (rows of the survey) of the rows to measure; latencies are not read.

    KMeans uses the features of the residual process: sizes and ratios, and the network's view. With the view, ten
    programs of a held-out device reduced the mean error to 16.7 %, without it to 18.5 %.
    """
    query, scales = known.query[rows], settings or ResidualSettings()

    def covariance(a: Array, b: Array) -> Array:
        one, other = (known.features.take(query[part]) for part in (a, b))
        return kernel(one, other, scales)

    points = selection_points(known, rows, scales)
    return choose(sampler, points, known.features.take(query).family, k, seed, covariance)


def measuring_s(latency_s: Array, settings: TimingSettings | None = None) -> Array:
    """Approximate seconds of ``cdmpp measure`` for each program of these latencies."""
    plan = settings or TimingSettings()
    repeat = np.maximum(plan.repeat_s, latency_s)
    rounds = (1 + _AGAIN) * np.maximum(plan.total_s, plan.min_repeats * repeat)
    once = latency_s > plan.once_s
    return np.asarray(_OVERHEAD_S + latency_s + np.where(once, latency_s, rounds))
