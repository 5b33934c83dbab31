"""Selection of programs to measure on a device, from a pool, with a model's predictions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np

from cdmpp.data.measure.call_problems import call_problem
from cdmpp.data.measure.store import StoredProgram
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
P = TypeVar("P")

#: Share of the device's memory that a program may take; bytes where its size is not known.
MEMORY_SHARE, UNKNOWN_MEMORY_BYTES = 0.6, 4e9
#: Maximum programs of a pool; a larger pool is sampled with a seed.
MAX_POOL = 20_000
#: Seconds per program besides its runs: allocating and filling tensors, selecting a kernel.
_OVERHEAD_S = 0.15
#: The same for a TVM program, which is built and loaded.
_BUILD_S = 1.0
#: Share of programs that are timed in a second round.
_AGAIN = 0.3
#: Loops that are bound to a GPU's blocks and threads, in TVM JSON.
_GPU_TAGS = ("blockIdx.", "threadIdx.")
#: Programs with a longer predicted latency are not selected.
LONGEST_S = 2.0


@dataclass(frozen=True)
class Selection(Generic[P]):
    """Programs to measure, in order of choice."""

    programs: tuple[P, ...]
    expected_s: Array  # predicted latency of each on the device
    estimate_s: float  # estimated seconds to measure all of them (:func:`measuring_s`)
    pool: int  # number of candidate programs
    # Programs of the pool that could not be, by reason: "no PyTorch call" (only with ``framework="pytorch"``), "memory"
    # (not of TVM programs), "needs a GPU" (TVM programs with bound threads), "not sampled" (of a pool larger than
    # :data:`MAX_POOL`), "not predictable", "too long".
    left_out: Counter[str]


def select(
    artifact: Artifact,
    device: DeviceSpec,
    pool: Sequence[OperatorSpec],
    k: int,
    *,
    sampler: str = "variance",
    seed: int = 0,
    protocol: str = "kernel",
    framework: str = "",
) -> Selection[OperatorSpec]:
    """Choose k operators of a pool to measure on a device. The selection uses the same data as adaptation
    (:func:`cdmpp.train.adaptation.records.survey`), except latencies."""
    measurable = [spec for spec in pool if framework != "pytorch" or not call_problem(spec.canonical())]
    limit = MEMORY_SHARE * device.memory_bytes if device.memory_bytes else UNKNOWN_MEMORY_BYTES
    fitting = [spec for spec in measurable if needed_bytes(spec, gpu=device.kind == "gpu") <= limit]
    left_out = Counter({"no PyTorch call": len(pool) - len(measurable), "memory": len(measurable) - len(fitting)})

    def row(spec: OperatorSpec) -> Measurement:
        return Measurement(
            spec.text(),
            "operator",
            device.name,
            1.0,
            program_hash=spec.hash(),
            protocol=protocol,
            framework=framework,
            device_spec=device,
        )

    return _select(artifact, device, fitting, row, k, sampler, seed, left_out)


def select_scheduled(
    artifact: Artifact, device: DeviceSpec, pool: Sequence[StoredProgram], k: int, *, sampler: str, seed: int
) -> Selection[StoredProgram]:
    """Choose k TVM programs of a pool, by the features of the model's part for TVM programs."""
    runnable = [p for p in pool if device.kind == "gpu" or not any(tag in p.tvm_json for tag in _GPU_TAGS)]
    left_out = Counter({"needs a GPU": len(pool) - len(runnable)})

    def row(p: StoredProgram) -> Measurement:
        row = Measurement(p.tvm_json, "tvm_json", device.name, 1.0, program_hash=p.hash, task=p.task, backend="tvm")
        return replace(row, device_spec=device)

    selection = _select(artifact.part(scheduled=True), device, runnable, row, k, sampler, seed, left_out)
    return replace(selection, estimate_s=selection.estimate_s + _BUILD_S * k)


def _select(
    artifact: Artifact,
    device: DeviceSpec,
    programs: list[P],
    row: Callable[[P], Measurement],
    k: int,
    sampler: str,
    seed: int,
    left_out: Counter[str],
) -> Selection[P]:
    """Choose k of the programs; ``row`` returns a program's record with any latency, which is not read."""
    if not programs:
        raise DataError(
            f"none of the {left_out.total()} programs of the pool can be measured on {device.name}{_reasons(left_out)}",
            hint="name another pool with --pool, or another --framework",
        )
    if len(programs) > MAX_POOL:
        sample = np.sort(np.random.default_rng(seed).choice(len(programs), MAX_POOL, replace=False))
        left_out["not sampled"] = len(programs) - MAX_POOL
        programs = [programs[i] for i in sample.tolist()]
    records = device_records([row(program) for program in programs], device, artifact)
    known = survey(InferencePipeline(artifact), records, FeatureCache(schedule=artifact.reads_schedules))
    expected = np.exp(known.point[known.query])
    left_out["not predictable"] = len(programs) - len(known.rows)
    short = np.flatnonzero(expected <= LONGEST_S)
    left_out["too long"] = len(expected) - len(short)
    if k > len(short):
        raise DataError(
            f"cannot choose k = {k} programs: the pool has {len(short)} that can be measured{_reasons(left_out)}",
            hint="a smaller --k, or another --pool",
        )
    chosen = short[choose_rows(known, short, k, sampler, seed)]
    selected = tuple(programs[i] for i in records.origin[known.rows[chosen]].tolist())
    return Selection(selected, expected[chosen], float(measuring_s(expected[chosen]).sum()), len(short), +left_out)


def _reasons(left_out: Counter[str]) -> str:
    counts = ", ".join(f"{reason} {count:,}" for reason, count in left_out.items() if count)
    return f" (left out: {counts})" if counts else ""


def choose_rows(
    known: Survey, rows: Array, k: int, sampler: str, seed: int, settings: ResidualSettings | None = None
) -> Array:
    """Positions in ``rows`` (rows of the survey) of the rows to measure; latencies are not read.

    KMeans uses the features of the residual process: sizes and ratios, and the network's view. With the view, ten
    programs of a held-out device reduced the mean error to 16.7 %, without it to 18.5 %. Features of scheduled
    GPU programs keep their scales: columns that hardly vary would otherwise weigh as much as the spilled registers.
    """
    query, scales = known.query[rows], settings or known.features.settings

    def covariance(a: Array, b: Array) -> Array:
        left, right = (known.features.take(query[part]) for part in (a, b))
        return kernel(left, right, scales)

    features = known.features.take(query)
    points = np.concatenate([features.numeric, scales.view * features.view], axis=1)
    return choose(sampler, points, features.family, k, seed, covariance, standardise=not features.launched)


def measuring_s(latency_s: Array, settings: TimingSettings | None = None) -> Array:
    """Approximate seconds of ``cdmpp measure`` for each program of these latencies."""
    plan = settings or TimingSettings()
    repeat = np.maximum(plan.repeat_s, latency_s)
    rounds = (1 + _AGAIN) * np.maximum(plan.total_s, plan.min_repeats * repeat)
    once = latency_s > plan.once_s
    return np.asarray(_OVERHEAD_S + latency_s + np.where(once, latency_s, rounds))
