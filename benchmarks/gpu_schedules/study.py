"""Every GPU left out in turn: predictions without and with measurements, choices made on GPUs that are not left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.gpu_schedules.methods import (
    BLENDS,
    SETTINGS,
    Blend,
    Parts,
    RawTrees,
    Transfer,
    choose_measured,
    corrected,
    search,
)
from benchmarks.gpu_schedules.pool import Pool, Rows
from cdmpp.train.evaluation.ranking import rank

Array = np.ndarray[Any, np.dtype[Any]]
Figures = dict[str, dict[str, float]]

RANKS = {"task_kendall_tau": "tau", "top1_score": "top1", "top5_score": "top5"}
#: Processes among which a known GPU chooses: how far a residual reaches, and how much slopes of profiles count.
PROCESSES = tuple(
    replace(SETTINGS, length=length, sizes=sizes, peers=peers)
    for length, sizes, peers in ((3.0, 0.6, 0.3), (1.5, 0.6, 0.3), (3.0, 0.6, 0.0), (3.0, 0.15, 0.3))
)
#: Ways of XGBoost on raw parameters to use measurements: weights of the measured rows, or a process on the residuals.
RAW_WEIGHTS = (1.0, 30.0)
#: Shares of the measurements that are spent on schedules that are predicted best; KMeans chooses the others.
PROMISING = (0.0, 0.5, 0.75)


def figures(pool: Pool, rows: Rows, prediction: Array, measured: Array | None = None) -> Figures:
    """Order and error per kernel; measured rows count for the order, not for the error."""
    seen = np.zeros(len(rows), dtype=bool)
    if measured is not None:
        seen[measured] = True
    out = {}
    for (k, _), members in rows.groups():
        own, log_latency = prediction[members], rows.log_latency[members]
        order = rank(np.exp(own), np.exp(log_latency), np.zeros(len(own), dtype=np.int64), np.arange(len(own)))
        rest = ~seen[members]
        error = float(np.mean(np.abs(np.expm1(own[rest] - log_latency[rest]))))
        found = {short: float(order[name] or 0.0) for name, short in RANKS.items()}
        out[pool.tables[k].name] = {"n": len(own), **found, "mape": error}
    return out


def merit(found: Sequence[Figures]) -> float:
    """What choices maximise: mean of tau, top-1 and top-5 score over kernels and GPUs."""
    return float(np.mean([(f["tau"] + f["top1"] + f["top5"]) / 3 for one in found for f in one.values()]))


class Study:
    """All GPUs left out in turn.

    Parameters
    ----------
    pool : Pool
    measurements : int
        On the left-out GPU, over all its kernels.
    report : callable
        Receives a line of progress.
    """

    def __init__(self, pool: Pool, measurements: int, report: Callable[[str], None] = lambda text: None) -> None:
        self.pool, self.measurements, self.report = pool, measurements, report
        self._fits: dict[tuple[str, frozenset[int]], Any] = {}
        self._parts: dict[tuple[int, frozenset[int]], Parts] = {}
        self._chosen: dict[tuple[int, int], Array] = {}

    def rows(self, device: int) -> Rows:
        """Rows of one GPU."""
        return self.pool.rows.take(np.flatnonzero(self.pool.rows.device == device))

    def without(self, *devices: int) -> Rows:
        """Rows of all other GPUs."""
        return self.pool.rows.take(np.flatnonzero(~np.isin(self.pool.rows.device, devices)))

    def transfer(self, *devices: int) -> Transfer:
        """Our method without some GPUs."""
        key = ("own", frozenset(devices))
        if key not in self._fits:
            self._fits[key] = Transfer(self.pool, self.without(*devices))
        return self._fits[key]

    def parts(self, device: int, *without: int) -> Parts:
        """Parts of a GPU's prediction by :meth:`transfer` without some GPUs, it among them."""
        key = (device, frozenset(without))
        if key not in self._parts:
            self._parts[key] = self.transfer(*without).parts(self.rows(device))
        return self._parts[key]

    def raw(self, *devices: int) -> RawTrees:
        """XGBoost on raw parameters without some GPUs."""
        key = ("raw", frozenset(devices))
        if key not in self._fits:
            self._fits[key] = RawTrees(self.pool, self.without(*devices))
        return self._fits[key]

    def measured(self, device: int, promising: float = 0.0) -> Array:
        """Positions in :meth:`rows` of the rows that are measured first, all but a share."""
        count = self.measurements - round(promising * self.measurements)
        if (device, count) not in self._chosen:
            self._chosen[device, count] = choose_measured(self.pool, self.rows(device), count)
        return self._chosen[device, count]

    def validation(self, held: int) -> list[int]:
        """Known GPUs that choices are made on: those with a kernel that a further GPU knows too."""
        kernels = set(self.rows(held).kernel.tolist())
        others = [d for d in range(len(self.pool.devices)) if d != held]
        return [d for d in others if kernels & set(self.rows(d).kernel.tolist())] or others

    # -- ours ---------------------------------------------------------------------------------------------
    def own(self, device: int, blend: Blend, *without: int) -> Array:
        """Prediction of a GPU's rows without measurements."""
        parts = self.parts(device, *without)
        return self.transfer(*without).order(self.rows(device), parts, blend) * parts.spread + parts.level

    def own_corrected(
        self, device: int, blend: Blend, process: int, promising: float, *without: int
    ) -> tuple[Array, Array]:
        """Prediction of a GPU's rows after its measurements, and the measured rows."""
        rows, parts = self.rows(device), self.parts(device, *without)
        order = self.transfer(*without).order(rows, parts, blend)
        known = np.isfinite(parts.profile).any(axis=0)
        profile = np.where(np.isfinite(parts.profile), parts.profile, order[:, None])[:, known]
        linear = np.column_stack([order, parts.analytic, profile])
        prediction = order * parts.spread + parts.level
        columns = self.pool.own(rows)

        def after(measured: Array) -> Array:
            return corrected(rows, prediction, columns, measured, linear, PROCESSES[process])

        return search(rows, self.measured(device, promising), after, self.measurements)

    def choose_blend(self, held: int) -> Blend:
        """The blend that orders the known GPUs best, each left out too."""

        def of(blend: Blend) -> float:
            known = self.validation(held)
            return merit([figures(self.pool, self.rows(v), self.own(v, blend, held, v)) for v in known])

        return max(BLENDS, key=of)

    def choose_process(self, held: int, blend: Blend) -> tuple[int, float]:
        """The process, and then the share of promising schedules, that order the known GPUs best."""

        def of(process: int, promising: float = 0.0) -> float:
            known = self.validation(held)
            return merit(
                [
                    figures(self.pool, self.rows(v), *self.own_corrected(v, blend, process, promising, held, v))
                    for v in known
                ]
            )

        process = max(range(len(PROCESSES)), key=of)
        return process, max(PROMISING, key=lambda share: of(process, share))

    # -- XGBoost on raw parameters --------------------------------------------------------------------------
    def raw_corrected(self, device: int, raw: RawTrees, way: float, promising: float) -> tuple[Array, Array]:
        """Prediction after measurements, and the measured rows.

        A ``way`` of 0 is a process on the residuals, any other a weight.
        """
        rows = self.rows(device)
        prediction = raw.predict(rows)
        columns = np.nan_to_num(self.pool.parameters(rows), nan=-1.0)
        order = rows.centred(prediction)[:, None]

        def after(measured: Array) -> Array:
            if not way:
                return corrected(rows, prediction, columns, measured, order)
            out = raw.retrained(rows.take(measured), way).predict(rows)
            out[measured] = rows.log_latency[measured]
            return out

        return search(rows, self.measured(device, promising), after, self.measurements)

    def choose_raw(self, held: int) -> tuple[float, float]:
        """The way, and then the share, that order a known GPU best; one GPU, for every way is fitted anew."""
        v = self.validation(held)[0]

        def of(way: float, promising: float = 0.0) -> float:
            prediction, measured = self.raw_corrected(v, self.raw(held, v), way, promising)
            return merit([figures(self.pool, self.rows(v), prediction, measured)])

        way = max((0.0, *RAW_WEIGHTS), key=of)
        return way, max(PROMISING, key=lambda share: of(way, share))

    # -- results ------------------------------------------------------------------------------------------
    def result(self, held: int) -> dict[str, Any]:
        """Figures of all methods on one left-out GPU."""
        pool, rows, measured = self.pool, self.rows(held), self.measured(held)
        blend = self.choose_blend(held)
        process, promising = self.choose_process(held, blend)
        way, raw_promising = self.choose_raw(held)
        raw = self.raw(held)
        roofline = pool.roofline(rows)
        shift = np.array(roofline)
        for _, members in rows.groups():
            own = np.intersect1d(members, measured)
            shift[members] += np.median(rows.log_latency[own] - roofline[own]) if len(own) else 0.0
        shift[measured] = rows.log_latency[measured]
        self.report(
            f"{pool.devices[held]}: {blend}, process {process}, promising {promising}, raw {way}, {raw_promising}"
        )
        return {
            "validation": [pool.devices[v] for v in self.validation(held)],
            "chosen": {
                "blend": vars(blend),
                "process": process,
                "promising": promising,
                "raw": way,
                "raw_promising": raw_promising,
            },
            "methods": {
                "cdmpp": {
                    "0": figures(pool, rows, self.own(held, blend, held)),
                    str(self.measurements): figures(
                        pool, rows, *self.own_corrected(held, blend, process, promising, held)
                    ),
                    f"{self.measurements}, KMeans alone": figures(
                        pool, rows, *self.own_corrected(held, blend, process, 0.0, held)
                    ),
                },
                "XGBoost, raw parameters": {
                    "0": figures(pool, rows, raw.predict(rows)),
                    str(self.measurements): figures(pool, rows, *self.raw_corrected(held, raw, way, raw_promising)),
                },
                "roofline": {
                    "0": figures(pool, rows, roofline),
                    str(self.measurements): figures(pool, rows, shift, measured),
                },
            },
        }
