"""Physical bounds of predictions.

No kernel computes faster than the device's peak, or moves its bytes faster than the memory, or the L2 cache if they
fit, delivers them. A fused pass over memory takes little more than its bytes need. The limits repair answers where the
network extrapolates; ``benchmarks/agreement.py`` counts how often they act.

A TVM program on a CPU takes at least its call, its calls of the C library, the vectors of its loops, the additions of
a long sum, and the start of each parallel region. Of 40,594 measured programs 0.33 % are faster than this bound, 0.14 %
by more than a tenth (calls that the compiler moved out of a loop, exponentials of infinity).
"""

from __future__ import annotations

from dataclasses import replace
from statistics import NormalDist
from typing import Any

import numpy as np

from cdmpp.data.physics import L2_SPEED
from cdmpp.features.schedule import SCHEDULE_COLUMNS, SCHEDULE_WIDTH
from cdmpp.features.schema import COLUMNS, WIDTH
from cdmpp.model.domain.calibration import scale_quantiles
from cdmpp.model.inference.consistency import ADJUSTMENTS
from cdmpp.model.nn.config import LEVELS
from cdmpp.model.nn.figures import stack_devices
from cdmpp.model.nn.inputs import CACHE, GPU, SUMMARY_COLUMNS, roofline_s
from cdmpp.model.nn.rows import QueryBatch
from cdmpp.model.raw_predictions import RawPredictions
from cdmpp.programs.query_options import BACKENDS, PROTOCOLS

Array = np.ndarray[Any, np.dtype[Any]]

#: A prediction is at least this share of its bound. Winograd needs 1 / 2.5 of a convolution's operations.
SHARE, CONVOLUTION_SHARE = 0.9, 0.9 / 2.5
#: A fused pass over memory takes at most so many times what its bytes need from the memory (its inputs need not be in a
#: cache), and so many seconds more for launch and latency.
FUSED_FACTOR, FUSED_S, CALL_S = 3.0, 8e-6, 20e-6
#: Log distances of the quantiles from a limit of the point, which limit them.
_MARGINS = 0.2 * np.array([NormalDist().inv_cdf(level) for level in LEVELS])
#: Bytes over those of the encoded program, which counts a buffer that is read in two halves as one half.
_BYTES = {"silu_and_mul": 1.5}
_AT = {name: i for i, name in enumerate(SUMMARY_COLUMNS)}
#: Of a TVM program on a CPU, in cycles at the nominal clock: its call, one call of the C library such as an exponential
#: (7.5 were measured), each addition of a sum of :data:`CHAIN` terms or more that no vector shares, and how many
#: elements each lane of a core computes in a cycle, of 16 lanes or more.
TVM_CALL, LIBRARY_CALL, ADDITION, CHAIN, PER_LANE, MIN_LANES = 18.0, 6.5, 0.75, 64, 2.5, 16
#: Seconds in which TVM starts several threads and waits for them (0.87 µs were measured at best).
REGION_S = 0.8e-6
_FLAGS = ("computes_float32", "inner_is_reduce")
_LEAF = (*_FLAGS, "parallel", "inside", "sure_calls", "regions", "float_add", "reduce_0", "lanes", "body")
_ISSUE = [(*COLUMNS, *SCHEDULE_COLUMNS).index(name) for name in _LEAF]
_EAGER, _LIBRARY = PROTOCOLS.index("eager"), BACKENDS.index("library")


def limit(batch: QueryBatch, fast: Array, slow: Array, output: RawPredictions) -> RawPredictions:
    """Predictions of n queries within the physical bounds.

    ``fast``: (n,), share of the bound that measured kernels reach, 1 where none is faster. ``slow``: (n,), how many
    times slower than :data:`FUSED_FACTOR` says the fused kernel was measured to be; infinite where it has no upper
    limit.
    """
    rows = batch.rows
    summary, device = batch.store.summary[rows.program], stack_devices(batch.specs)[rows.device]
    compute, memory = roofline_s(summary, device)
    compute = np.where(summary[:, _AT["family_conv"]] > 0, compute * CONVOLUTION_SHARE / SHARE, compute)
    low = SHARE * fast * np.maximum(compute, _least_memory_s(batch, summary, device, memory))
    low = np.where(rows.backend == _LIBRARY, low, np.where(fast > 0, _issue_s(batch), 0.0))
    fused = (summary[:, _AT["family_vector"]] > 0) & (device[:, GPU] > 0) & (rows.backend == _LIBRARY)
    longest_fused = FUSED_FACTOR * np.maximum(compute, memory) + FUSED_S + CALL_S * (rows.protocol == _EAGER)
    high = np.where(fused, slow * longest_fused, np.inf)
    with np.errstate(divide="ignore"):
        return between(output, np.log(low), np.log(high))


def _issue_s(batch: QueryBatch) -> Array:
    """Seconds that programs given as TIR take on a CPU at least, (n,); 0 for any other query."""
    rows, store, out = batch.rows, batch.store, np.zeros(len(batch.rows))
    on_cpu = np.array([spec.kind == "cpu" for spec in batch.specs])[rows.device]
    chosen = on_cpu & (rows.backend != _LIBRARY) & (store.summary[rows.program, _AT["family_tir"]] > 0)
    chosen &= store.width >= WIDTH + SCHEDULE_WIDTH
    for size in np.unique(store.bucket[rows.program[chosen]]):
        at = np.flatnonzero(chosen & (store.bucket[rows.program] == size))
        figures = [(s.compute_units, s.clock_hz, PER_LANE * max(s.cores_per_unit, MIN_LANES)) for s in batch.specs]
        units, clock, elements = np.array(figures)[rows.device[at]].T
        leaves = store.buckets[size].leaves[store.slot[rows.program[at]]][:, :, _ISSUE].astype(np.float64)
        floats, sums, *logs = leaves.transpose(2, 0, 1)
        parallel, inside, calls, regions, added, terms, lanes, body = (np.exp2(column) - 1 for column in logs)
        chained = (sums > 0) & (added > 0) & (terms > CHAIN - 0.5) & (lanes < 1.5) & (body < 1.5)
        operations = np.where(chained, ADDITION, 1 / elements[:, None])
        cycles = calls * LIBRARY_CALL + floats * inside * operations
        longest = (cycles / np.maximum(parallel, 1.0)).sum(axis=1)
        busy = np.maximum(np.maximum(cycles.sum(axis=1) / units, longest), TVM_CALL) / clock
        out[at] = np.maximum(busy, REGION_S * np.where(units > 1, (regions * (parallel > 1)).sum(axis=1), 0.0))
    return out


def _least_memory_s(batch: QueryBatch, summary: Array, device: Array, memory: Array) -> Array:
    """Seconds of the traffic at the speed of the L2 if it fits, else of the memory."""
    factor = np.array([_BYTES.get(operator, 1.0) for operator, _ in batch.kinds])[batch.kind[batch.rows.program]]
    moved = factor * (np.exp2(summary[:, _AT["bytes"]].astype(np.float64)) - 1)
    speed = np.where(moved <= np.nan_to_num(device[:, CACHE]), L2_SPEED, 1.0)
    return np.asarray(factor * memory / speed)


def between(output: RawPredictions, low: Array, high: Array) -> RawPredictions:
    """Predictions with log points between ``low`` and ``high``, (n,) each; where both act, not less than ``low``.

    Each quantile has limits of its own around those of the point: quantiles of two protocols stay in order, and
    the interval does not vanish.
    """
    point = np.maximum(np.minimum(output.point, high), low)
    acts = point != output.point
    scaled = scale_quantiles(output.levels, output.factor)
    levels = np.maximum(np.minimum(scaled, high[:, None] + _MARGINS), low[:, None] + _MARGINS)
    moved = acts | (levels != scaled).any(axis=1)
    if not moved.any():
        return output
    codes = output.adjusted.astype(np.int8) | np.where(acts, ADJUSTMENTS["limit"], 0).astype(np.int8)
    return replace(
        output,
        point=point,
        levels=np.where(moved[:, None], levels, output.levels),
        factor=np.where(moved, 1.0, output.factor),
        adjusted=codes,
    )
