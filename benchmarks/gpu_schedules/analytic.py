"""An analytic time of a GPU schedule with a few constants, fitted to known GPUs.

The times of :mod:`cdmpp.model.nn.gpu_inputs` (instructions, sectors, shared memory, caches, memory, latency), each with
an efficiency, are joined by a power mean, which lies between their sum and the longest of them. Unfilled waves, low
occupancy, spilled registers and conditions lengthen it. Some ten constants for all kernels and GPUs extrapolate where
trees cannot.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.gpu_schedules.pool import Pool, Rows
from cdmpp.features.gpu_schedule import GPU_COLUMNS, GPU_WIDTH
from cdmpp.model.nn.gpu_inputs import DEVICE_COLUMNS, TIMES

Array = np.ndarray[Any, np.dtype[Any]]

#: Rows of a kernel and GPU that constants are fitted to.
ROWS = 250
#: Sharpness of the power mean.
POWER = 3.0
#: Weight of a row: falls by e for each factor of e above the kernel's fastest row. Fast schedules are to be found.
FOCUS = 1.0
_PROGRAM = {name: i for i, name in enumerate(GPU_COLUMNS)}
_DEVICE = {name: i for i, name in enumerate(DEVICE_COLUMNS)}
_EXTRAS = 5
#: Standard deviation of the prior of each constant around a plain sum of resources.
PRIOR = 1.0


class FittedTimes:
    """Log time of rows from constants fitted to the order of known rows within each kernel and GPU."""

    def __init__(self, pool: Pool, known: Rows) -> None:
        from scipy.optimize import minimize

        self.pool = pool
        rng = np.random.default_rng(0)
        parts = [rng.permutation(m)[:ROWS] for _, m in known.groups()]
        rows = known.take(np.concatenate(parts))
        terms = self._terms(rows)
        target, groups = rows.log_latency, [m for _, m in rows.groups()]
        weight = np.empty(len(rows))
        for members in groups:
            own = np.exp(-FOCUS * (target[members] - target[members].min()))
            weight[members] = own / own.sum() / len(groups)

        def loss(constants: Array) -> float:
            gap = _log_time(constants, *terms) - target
            total = 0.0
            for members in groups:
                own = weight[members]
                gaps = gap[members] - (gap[members] * own).sum() / own.sum()
                total += float((own * np.sqrt(gaps**2 + 0.01)).sum())
            return total + 0.002 * float((constants**2).sum()) / PRIOR**2

        start = np.zeros(len(TIMES) + _EXTRAS)
        self.constants = np.asarray(minimize(loss, start, method="L-BFGS-B", options={"maxiter": 60}).x)

    def _terms(self, rows: Rows) -> tuple[Array, Array]:
        columns = self.pool.own(rows).astype(np.float64)
        program, met = columns[:, :GPU_WIDTH], columns[:, -len(DEVICE_COLUMNS) :]
        shares = np.maximum(np.exp2(met[:, : len(TIMES)]) - 1e-4, 1e-6)
        log_times = np.log(shares) + self.pool.reference(rows)[:, None]

        def plain(name: str) -> Array:
            return np.asarray(np.exp2(program[:, _PROGRAM[name]]) - 1)

        operations = plain("float_ops") + plain("int_ops") + plain("slow_ops") + 1
        extras = np.column_stack(
            [
                -np.log(np.maximum(met[:, _DEVICE["wave_fill"]], 0.05)),
                np.maximum(np.log(0.5 / np.maximum(met[:, _DEVICE["occupancy"]], 0.02)), 0.0),
                met[:, _DEVICE["spilled_words"]] / 8,
                np.minimum(plain("conditional_ops") / operations, 2.0),
                np.log2(1 + plain("unrolled_body")) / 8,
            ]
        )
        return log_times, extras

    def log_time(self, rows: Rows) -> Array:
        """Natural log of seconds."""
        return _log_time(self.constants, *self._terms(rows))


def _log_time(constants: Array, log_times: Array, extras: Array) -> Array:
    scaled = POWER * (log_times + constants[: log_times.shape[1]])
    top = scaled.max(axis=1, keepdims=True)
    joined = (np.log(np.exp(scaled - top).sum(axis=1)) + top[:, 0]) / POWER
    return np.asarray(joined + extras @ constants[log_times.shape[1] :])
