"""The model of collectives: curves of latency over bytes, one for each context.

A curve is the baseline times the exponential of the components' residuals, at sizes a quarter of a power of two apart.
It is then made monotone, and limited by the nominal bandwidth of the link. Between the sizes it is interpolated in
logarithms, so that latencies never fall with the bytes, and no figure exceeds the link's bandwidth by more than
:data:`cdmpp.model.collectives.residual.OVER_NOMINAL`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Any

import numpy as np

from cdmpp.devices.paths import link_of_device
from cdmpp.devices.spec import DeviceSpec
from cdmpp.model.collectives.context import CollectiveContext, Reasons, describe
from cdmpp.model.collectives.residual import COMPONENTS, Correction, Key, LinkBaseline, min_seconds, roofline_seconds
from cdmpp.model.domain.score import label
from cdmpp.model.nn.config import LEVELS
from cdmpp.model.raw_predictions import RawPredictions
from cdmpp.utils.isotonic import pool_adjacent_violators
from cdmpp.utils.lru import Lru

Array = np.ndarray[Any, np.dtype[Any]]

#: log2 of the sizes at which a curve is computed: 1 byte to 128 TiB.
KNOTS = np.arange(0, 47.01, 0.25)
#: Sizes and relative sizes at which a component is stored.
GRIDS = {"bytes": np.arange(8, 31.51, 0.25), "relative": np.arange(-18, 22.01, 0.5)}
#: log2 of the ranks at which a component is stored.
RANK_GRID = np.array([1.0, 2.0, 3.0, 4.0])
NORMAL = np.array([NormalDist().inv_cdf(level) for level in LEVELS])
#: Bytes of a cached curve.
_CURVE_BYTES = 4 * len(KNOTS) * 8


#: Names of measured devices by data sheet.
Devices = Mapping[tuple[str, str], tuple[str, ...]]


def sheet_of(device: DeviceSpec) -> tuple[str, str]:
    """Digest of a device's data sheet, and its own link: near twins (H100, H800) differ in the link alone."""
    return device.nominal().digest(), link_of_device(device).name


@dataclass(frozen=True)
class CollectiveCurve:
    """Predictions of one context over :data:`KNOTS`."""

    log_s: Array  # (knots,): log of the seconds; does not fall
    spread: float  # standard deviation of log(measured / predicted), before calibration
    # (knots,): standard deviation between the libraries that a query without one may mean; 0 with a library
    between: Array
    coverage: float  # Distance of the context from the training contexts (:data:`cdmpp.model.domain.score.THRESHOLDS`).
    # log2 of the smallest and largest measured size, of this context or of those that it follows
    sizes: tuple[float, float]
    reasons: Reasons


@dataclass(frozen=True)
class KnownContext:
    """What training had of one context: spread of its residuals, and log2 of its smallest and largest size."""

    spread: float
    low: float
    high: float


@dataclass(eq=False)
class CollectiveModel:
    """Predicts collectives. Safe to share between threads; ``dataclasses.replace`` gives a changed model."""

    baseline: LinkBaseline
    functions: Sequence[Mapping[Key, Array]]  # for each component, the functions by key: (ranks, grid) arrays
    variance: Array  # (components,): prior variance, the uncertainty of a query that goes without the component
    length: Array  # (components,): length scale
    known: Mapping[CollectiveContext, KnownContext]  # training contexts
    devices: Devices  # data sheet (:func:`sheet_of`) to the names under which the model has measurements
    calibration: Mapping[str, float]  # factor on the width of intervals, by domain label
    metrics: Mapping[str, Any] = field(default_factory=dict)  # errors on held-out rows, for reports
    corrections: tuple[Correction, ...] = ()  # corrections by measurements (``cdmpp adapt``)

    def __post_init__(self) -> None:
        self._curves: Lru[CollectiveCurve] = Lru(4096 * _CURVE_BYTES)
        self._stacks = {(c.library, c.mode) for c in self.known}
        self._of_stack: dict[tuple[Any, ...], set[str]] = {}
        self._ranks: dict[tuple[Any, ...], int] = {}
        for c in self.known:
            for key in ((c.operator, c.mode, c.device), (c.operator, c.mode), (c.mode,)):
                self._of_stack.setdefault(key, set()).add(c.library)
            for place in ((*c.place, c.kind), (c.kind,)):
                self._ranks[place] = max(self._ranks.get(place, 0), c.ranks)

    def known_as(self, device: DeviceSpec) -> str:
        """Name under which the model, or a correction, has measurements of a device; "" if it has none."""
        names = self.devices.get(sheet_of(device), ())
        return device.name if device.name in names else names[0] if names else ""

    def corrected(self, correction: Correction, device: DeviceSpec) -> CollectiveModel:
        """The model with a correction by measurements of one device, which has measurements from then on."""
        sheet = sheet_of(device)
        devices = {**self.devices, sheet: self.devices.get(sheet, (device.name,))}
        return replace(self, devices=devices, corrections=(*self.corrections, correction))

    def predict(self, contexts: Sequence[CollectiveContext], context: Array, bytes_: Array) -> RawPredictions:
        """Predict messages of ``bytes_`` in ``contexts[context]``, in order; rows do not depend on each other."""
        n = len(bytes_)
        size = np.log2(np.asarray(bytes_, dtype=np.float64))
        point, spread, coverage, reason = np.empty(n), np.empty(n), np.empty(n), np.zeros(n, dtype=np.bool_)
        roofline = np.empty(n)
        for number in np.unique(context).tolist():
            rows = context == number
            curve, where = self.curve(contexts[number]), size[rows]
            point[rows] = np.interp(where, KNOTS, curve.log_s)
            outside = _outside(curve, where)
            between = np.interp(where, KNOTS, curve.between)
            spread[rows] = np.sqrt(curve.spread**2 + between**2 + (0.06 * outside) ** 2)
            coverage[rows] = curve.coverage + np.minimum(0.4 * outside, 1.5)
            reason[rows] = curve.reasons.any | (outside > 0)
            roofline[rows] = roofline_seconds(contexts[number], bytes_[rows])
        factor = np.array([self.calibration[label(x)] for x in coverage.tolist()])
        levels = point[:, None] + spread[:, None] * NORMAL
        return RawPredictions(
            point, levels, factor=factor, distance=coverage, roofline_s=roofline, adjusted=reason.astype(np.int8)
        )

    def explain(self, context: CollectiveContext, bytes_: float) -> str:
        """What of a query training did not have; "" where it had everything."""
        curve = self.curve(context)
        return describe(replace(curve.reasons, size=bool(_outside(curve, np.log2(bytes_)) > 0)))

    def curve(self, context: CollectiveContext) -> CollectiveCurve:
        """The curve of a context, cached.

        It is nowhere below the curves of fewer ranks on its link or on one node, unless it was measured.
        """
        curve = self._curves.get(context)
        if curve is None:
            plain = context._replace(one_node=())
            curve = self._curve(self._best_measured_alias(plain)) if context.library else self._mixture(plain)
            libraries = [context.library] if context.library else self.libraries(plain)
            aliases = (self._best_measured_alias(plain._replace(library=name)) for name in libraries)
            measured = all(alias in self.known for alias in aliases)
            measured = measured or any(correction.covers(plain) for correction in self.corrections)
            for inside in () if measured else context.one_node:
                curve = replace(curve, log_s=np.maximum(curve.log_s, self.curve(inside).log_s))
            self._curves.put(context, curve, _CURVE_BYTES)
        return curve

    def _best_measured_alias(self, context: CollectiveContext) -> CollectiveContext:
        """A device's own link may be stated or not: the alias under which more was measured."""
        if context in self.known or context.link not in ("", context.device_link):
            return context
        other = context._replace(link="" if context.link else context.device_link)
        return min((context, other), key=lambda c: self.residual(c, KNOTS[:1])[1])

    def libraries(self, context: CollectiveContext) -> list[str]:
        """Libraries that a context without one may mean: those measured in its mode, on its device where possible."""
        for key in (
            (context.operator, context.mode, context.device),
            (context.operator, context.mode),
            (context.mode,),
        ):
            if key in self._of_stack:
                return sorted(self._of_stack[key])
        return ["nccl"]

    def _mixture(self, context: CollectiveContext) -> CollectiveCurve:
        """The mean of the libraries' curves; their spread widens the interval."""
        curves = [self.curve(context._replace(library=name)) for name in self.libraries(context)]
        stack = np.stack([curve.log_s for curve in curves])
        best = min(curves, key=lambda curve: curve.coverage)
        between = np.abs(stack - stack.mean(axis=0)).max(axis=0)
        spread = float(np.sqrt(np.mean([curve.spread**2 for curve in curves])))
        reasons = replace(best.reasons, libraries=tuple(self.libraries(context))) if len(curves) > 1 else best.reasons
        return replace(best, log_s=stack.mean(axis=0), between=between, spread=spread, reasons=reasons)

    def _curve(self, context: CollectiveContext) -> CollectiveCurve:
        known = self.known.get(context)
        sizes = (known.low, known.high) if known else self._sizes(context)
        inside = np.clip(KNOTS, *sizes)
        residual, missing = self.residual(context, inside)
        spread = known.spread if known else float(np.hypot(np.sqrt(missing), 0.05))
        for correction in self.corrections:
            residual, spread = correction.apply(self, context, inside, residual, spread)
        log_s = self.baseline.log_seconds(context, KNOTS) + residual
        weights = np.where((sizes[0] <= KNOTS) & (sizes[1] >= KNOTS), 1.0, 1e-3)
        bound = np.log(min_seconds(context, 2.0**KNOTS))
        if (np.diff(log_s) < 0).any():
            log_s = np.maximum.accumulate(pool_adjacent_violators(log_s, weights))
        log_s = np.maximum(log_s, bound)
        coverage, reasons = self._coverage(context, known is not None)
        return CollectiveCurve(log_s, spread, np.zeros(len(KNOTS)), coverage, sizes, reasons)

    def residual(self, context: CollectiveContext, size: Array) -> tuple[Array, float]:
        """Sum of the components' functions at some log2 sizes, and variance of the components without one."""
        out, missing = np.zeros(len(size)), 0.0
        axes = {"bytes": size, "relative": self.baseline.relative_size(context, size)}
        ranks = np.log2(context.ranks)
        for component, functions, variance in zip(COMPONENTS, self.functions, self.variance.tolist(), strict=True):
            function = functions.get(component.key(context))
            if function is None:
                missing += variance
                continue
            values = _between_ranks(function, ranks) if component.over_ranks else function[0]
            out += np.interp(axes[component.axis], GRIDS[component.axis], values)
        return out, missing

    def _sizes(self, context: CollectiveContext) -> tuple[float, float]:
        """log2 of the sizes measured in similar contexts: of the place, else of the operator."""
        same = [k for c, k in self.known.items() if c.place == context.place and c.mode == context.mode]
        same = same or [k for c, k in self.known.items() if c.operator == context.operator]
        return (min(k.low for k in same), max(k.high for k in same)) if same else (8.0, 30.0)

    def _coverage(self, context: CollectiveContext, exact: bool) -> tuple[float, Reasons]:
        """Domain distance of a context, and why it is not 0."""
        reasons = Reasons()
        if exact:
            return 0.0, reasons
        coverage = 0.0
        measured = {c for c in self.known if c.device == context.device} if context.device else set()
        corrected = any(correction.covers(context) for correction in self.corrections)
        if not measured and not corrected:
            coverage += 1.5
            reasons = replace(reasons, device=(context.link or "its own link", context.bandwidth))
        elif not corrected and not any(c.place == context.place and c.kind == context.kind for c in measured):
            coverage += 1.25
            reasons = replace(reasons, link=(context.link or "its own link", context.bandwidth))
        if (context.library, context.mode) not in self._stacks:
            coverage = max(coverage, 1.0) + 0.25
            reasons = replace(reasons, stack=(context.library, context.mode))
        elif not coverage and not any(
            (c.operator, c.library, c.mode) == (context.operator, context.library, context.mode) for c in measured
        ):
            coverage = 1.25
            reasons = replace(reasons, stack=(context.library, context.mode), operator=context.operator)
        here = self._ranks.get((*context.place, context.kind), 0)
        max_ranks = here or self._ranks.get((context.kind,), 0)
        if context.ranks > max_ranks:
            coverage = max(coverage, 1.0) + 0.25 * float(np.log2(context.ranks / max(max_ranks, 1)))
            reasons = replace(reasons, ranks=(context.ranks, max_ranks, _where(context, bool(here))))
        if not any(c.kind == context.kind for c in self.known):
            coverage = max(coverage, 2.5)
            reasons = replace(reasons, kind=context.kind)
        return coverage, reasons


def _where(context: CollectiveContext, here: bool) -> str:
    place = "between nodes" if context.crosses else "inside a node"
    return f"{place} of {'this' if here else 'any'} device"


def _outside(curve: CollectiveCurve, size: Any) -> Any:
    """Powers of two by which log2 sizes are outside the measured ones, beyond the first."""
    low, high = curve.sizes
    return np.maximum(np.maximum(low - size, size - high) - 1.0, 0.0)


def _between_ranks(function: Array, ranks: float) -> Array:
    """A function of ranks and size at one number of ranks, which may lie between or beyond those stored."""
    at = float(np.clip(ranks, RANK_GRID[0], RANK_GRID[-1])) - RANK_GRID[0]
    below = min(int(at), len(RANK_GRID) - 2)
    share = at - below
    return np.asarray(function[below] * (1 - share) + function[below + 1] * share)
