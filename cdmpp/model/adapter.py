"""The adapter: correction of a model's predictions for one device, fitted to k measurements (numpy only).

The network does not change. Its log residuals (log of measured over predicted) on k measured programs are modelled
as samples of a Gaussian process: a smooth function of program and device. The function is a sum of a constant, offsets
per operator family, operator and measuring protocol, a part that follows the program's sizes, and a part that is linear
in the known devices' efficiencies for the same program. All computations are in closed form: k = 40 takes milliseconds
and k = 1000 about a second.
"""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass, field, replace
from statistics import NormalDist
from typing import Any

import numpy as np

from cdmpp.devices.spec import DeviceSpec
from cdmpp.model.domain.score import Context
from cdmpp.model.nn.config import LEVELS
from cdmpp.model.nn.figures import stack_devices
from cdmpp.model.nn.inputs import FAMILIES, QUERY_COLUMNS, SUMMARY_COLUMNS
from cdmpp.model.nn.launch_inputs import KERNEL_WIDTH
from cdmpp.model.nn.rows import BLOCK_ROWS, QueryBatch, RowInputs
from cdmpp.model.nn.weights import Weights
from cdmpp.programs.query_options import BACKENDS, PROTOCOLS, framework_name

Array = np.ndarray[Any, np.dtype[Any]]

#: Spread of the inputs of a launch, most of which are log2 of ratios.
LAUNCH_SPREAD = 2.0
#: Rows of a kernel matrix that are computed together; bounds the memory.
KERNEL_ROWS = 4096


@dataclass(frozen=True)
class ResidualSettings:
    """Scales of the process: standard deviations in natural log units, so 0.1 is about 10 %."""

    # Offsets of the device, of an operator family, of an operator with its dtype, and of protocol with framework and
    # backend.
    constant: float = 0.25
    family: float = 0.2
    operator: float = 0.08
    setting: float = 0.1
    # Part that follows the numeric features and the view within a family, with the kernel ``exp(-distance / length)``.
    sizes: float = 0.4
    length: float = 10.0  # length scale, in standardised feature units
    # Weight of the view's columns in the distance; queries that are close in the view have similar errors.
    view: float = 1.0
    # Part that is linear in the peers' centred log efficiencies, per unit of their standard deviation.
    peers: float = 0.3
    noise: float = 0.05  # difference between programs with equal features, and between repetitions
    # Residuals are clipped to this distance from their median before the fit, so that a few outliers (a slow algorithm
    # chosen by a library) do not affect all predictions.
    clip: float = 0.6
    # :meth:`ResidualProcess.fit` widens ``clip`` to so many times the distance from the median within which 80 % of
    # the residuals are, so that a device whose families differ by more keeps their offsets.
    spreads: float = 2.0
    # A measurement that is slower than the others predict by more than this number of standard deviations has its
    # noise increased by the excess; 0 for none. A faster one keeps its weight: the relative error of a prediction that
    # is too long has no bound.
    outlier: float = 1.5
    # Share of the variance that is subtracted from the expected log: for a log-normal distribution, the value one
    # variance below the median has the smallest mean relative error.
    shift: float = 1.0
    # Candidate factors on all scales and on the noise; the marginal likelihood selects a pair.
    amplitudes: tuple[float, ...] = (0.15, 0.35, 0.7, 1.0, 1.5, 2.2)
    noises: tuple[float, ...] = (0.5, 1.0, 2.0, 3.0)

    @classmethod
    def of(cls, values: dict[str, Any]) -> ResidualSettings:
        """Inverse of :func:`dataclasses.asdict`, also after JSON."""
        plain: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        return cls(**plain)


#: Scales of scheduled programs on a CPU, chosen with held-out CPUs.
COMPILED = ResidualSettings(length=5.0, view=1.3, peers=0.15, noise=0.07, spreads=0.0, outlier=0.0)
#: Scales of scheduled GPU programs. A slow schedule is several times slower than predicted: larger deviations.
LAUNCHED = replace(
    COMPILED,
    constant=0.35,
    family=0.35,
    sizes=0.75,
    length=10.0,
    view=0.9,
    noise=0.053,
    clip=1.1,
    outlier=1.5,
    shift=0.7,
)


@dataclass(frozen=True)
class AdapterFeatures:
    """Features of n queries."""

    numeric: Array  # (n, d) float: standardised sizes and ratios of program and device
    # (n,) int codes; equal codes share an offset. -1 differs from every measured query.
    operator: Array
    family: Array
    setting: Array
    # (n, peers) float: predicted log(latency / reference) for each known device; NaN where training had no such query
    # of the device.
    peers: Array
    view: Array  # (n, v) float: projection of the network's last hidden layer

    def __len__(self) -> int:
        return len(self.numeric)

    @property
    def launched(self) -> bool:
        """Whether they are of scheduled GPU programs: figures of a launch follow the sizes, 0 for CPU programs."""
        return bool(self.numeric[:, len(NUMERIC) :].any())

    @property
    def settings(self) -> ResidualSettings:
        """Default scales of the residuals of such queries."""
        if self.numeric.shape[1] <= len(NUMERIC):
            return ResidualSettings()
        return LAUNCHED if self.launched else COMPILED

    def take(self, rows: Array) -> AdapterFeatures:
        """The rows with these positions."""
        return AdapterFeatures(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))

    @classmethod
    def concat(cls, parts: list[AdapterFeatures]) -> AdapterFeatures:
        """Rows of ``parts`` (at least one) in order."""
        names = cls.__dataclass_fields__
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def kernel(first: AdapterFeatures, second: AdapterFeatures, settings: ResidualSettings) -> Array:
    """Prior covariance of the residuals, (len(first), len(second)), without noise.

    Each element is computed from its two rows only, in a fixed order: the result for a query does not depend on the
    other queries.
    """
    s = settings
    same_family = (first.family[:, None] == second.family[None, :]) & (first.family[:, None] >= 0)
    same_operator = (first.operator[:, None] == second.operator[None, :]) & (first.operator[:, None] >= 0)
    same_setting = (first.setting[:, None] == second.setting[None, :]) & (first.setting[:, None] >= 0)
    gap = np.zeros(same_family.shape)
    for weight, left, right in ((1.0, first.numeric, second.numeric), (s.view, first.view, second.view)):
        for column in range(left.shape[1]):
            step = left[:, column, None].astype(np.float64) - right[None, :, column]
            gap += weight**2 * step * step
    near = s.sizes**2 * np.exp(-np.sqrt(gap) / s.length)
    out: Array = (
        s.constant**2 + same_family * (s.family**2 + near) + s.operator**2 * same_operator + s.setting**2 * same_setting
    )
    if first.peers.shape[1]:
        left, right = centred(first.peers), centred(second.peers)
        products = np.zeros(out.shape)
        for column in range(left.shape[1]):
            products += left[:, column, None] * right[None, :, column]
        out = out + s.peers**2 * products
    return out


def prior_variance(features: AdapterFeatures, settings: ResidualSettings) -> Array:
    """Diagonal of :func:`kernel` of queries with themselves, (n,); without noise."""
    s = settings
    spread = (centred(features.peers) ** 2).sum(axis=1) if features.peers.shape[1] else 0.0
    return np.asarray(
        s.constant**2
        + (features.family >= 0) * (s.family**2 + s.sizes**2)
        + (features.operator >= 0) * s.operator**2
        + (features.setting >= 0) * s.setting**2
        + s.peers**2 * spread
    )


def centred(peers: Array) -> Array:
    """Peers' log efficiencies less their mean of the row, 0 where a peer has no prediction; (n, peers)."""
    finite = np.isfinite(peers)
    known = np.where(finite, peers, 0.0).astype(np.float64)
    mean = known.sum(axis=1) / np.maximum(finite.sum(axis=1), 1)
    return np.where(finite, known - mean[:, None], 0.0)


def _clipped(residual: Array, settings: ResidualSettings) -> Array:
    middle = float(np.median(residual))
    return np.clip(residual, middle - settings.clip, middle + settings.clip)


class ResidualProcess:
    """Residuals of a device's queries given some that were measured.

    ``features``: of the k measured queries. ``residual``: (k,), log(measured / predicted). ``settings``: as they are
    used; :meth:`fit` chooses among factors of given ones.
    """

    def __init__(self, features: AdapterFeatures, residual: Array, settings: ResidualSettings) -> None:
        if not len(features):
            raise ValueError("a residual process needs at least one measured query")
        self.features, self.residual, self.settings = features, np.asarray(residual, float), settings
        self._used = _clipped(self.residual, settings)
        covariance = kernel(features, features, settings)
        covariance[np.diag_indices(len(features))] += settings.noise**2
        self._solve(covariance)
        if settings.outlier:
            mean, variance = self.leave_one_out()
            slower = np.maximum(self._used - mean, 0.0) / np.sqrt(variance)
            covariance[np.diag_indices(len(features))] += variance * np.maximum((slower / settings.outlier) ** 2 - 1, 0)
            self._solve(covariance)

    def _solve(self, covariance: Array) -> None:
        half = np.linalg.inv(np.linalg.cholesky(covariance))
        self._inverse = half.T @ half
        self._weight = self._inverse @ self._used

    @classmethod
    def fit(
        cls, features: AdapterFeatures, residual: Array, settings: ResidualSettings | None = None
    ) -> ResidualProcess:
        """The process whose scales make the measured residuals most likely, of ``settings``' factors.

        The factors scale the whole kernel and the noise, so one eigendecomposition gives the likelihood of every pair.
        """
        base = settings or features.settings
        spread = float(np.quantile(np.abs(residual - np.median(residual)), 0.8))
        base = replace(base, clip=max(base.clip, base.spreads * spread))
        eigenvalues, vectors = np.linalg.eigh(kernel(features, features, base))
        squares = (vectors.T @ _clipped(np.asarray(residual, float), base)) ** 2

        def likelihood(factors: tuple[float, float]) -> float:
            amplitude, noise = factors
            variance = amplitude**2 * np.maximum(eigenvalues, 0.0) + (base.noise * noise) ** 2
            return float(-0.5 * (squares / variance + np.log(variance)).sum())

        amplitude, noise = max(itertools.product(base.amplitudes, base.noises), key=likelihood)
        scales = ("constant", "family", "operator", "setting", "sizes", "peers")
        chosen = {name: getattr(base, name) * amplitude for name in scales}
        scaled = replace(base, **chosen, noise=base.noise * noise, amplitudes=(1.0,), noises=(1.0,))
        return cls(features, residual, scaled)

    def __len__(self) -> int:
        return len(self.residual)

    def mean_and_variance(self, features: AdapterFeatures, *, one_by_one: bool = False) -> tuple[Array, Array]:
        """Expected residual of queries and its variance, both (n,); the variance is without noise.

        ``one_by_one``: compute each query independently of the others, equal to the last digit; otherwise use
        matrix products, which are faster for many queries.
        """
        mean, variance = np.empty(len(features)), np.empty(len(features))
        for start in range(0, len(features), KERNEL_ROWS):
            part = features.take(np.arange(start, min(start + KERNEL_ROWS, len(features))))
            rows = slice(start, start + len(part))
            cross = np.ascontiguousarray(kernel(part, self.features, self.settings))
            mean[rows] = (cross * self._weight).sum(axis=1)
            carried = np.stack([self._inverse @ row for row in cross]) if one_by_one else cross @ self._inverse
            known = (carried * cross).sum(axis=1)
            variance[rows] = np.maximum(prior_variance(part, self.settings) - known, 0.0)
        return mean, variance

    def leave_one_out(self) -> tuple[Array, Array]:
        """Mean and variance (with noise) of each measured residual given the others, both (k,)."""
        precision = np.diag(self._inverse)
        return self._used - self._weight / precision, 1.0 / precision

    def tensors(self) -> dict[str, Array]:
        """Arrays to store: features and residuals of the measured queries."""
        return {
            "residual": self.residual,
            **{name: np.ascontiguousarray(value) for name, value in vars(self.features).items()},
        }

    def manifest(self) -> dict[str, Any]:
        """Settings to store, for JSON."""
        return asdict(self.settings)

    @classmethod
    def load(cls, tensors: dict[str, Array], manifest: dict[str, Any]) -> ResidualProcess:
        """Inverse of :meth:`tensors` and :meth:`manifest`."""
        features = AdapterFeatures(*(tensors[name] for name in AdapterFeatures.__dataclass_fields__))
        return cls(features, tensors["residual"], ResidualSettings.of(manifest))


#: Inputs of the network that define the distance between two queries on one device.
NUMERIC = (
    "flops",
    "bytes",
    "output_elements",
    "batch",
    "m",
    "n",
    "k",
    "spatial_0",
    "spatial_1",
    "spatial_2",
    "reduce_0",
    "log_compute_us",
    "log_memory_us",
    "cache_ratio",
    "outputs_per_unit",
)
_COLUMNS = [(*SUMMARY_COLUMNS, *QUERY_COLUMNS).index(name) for name in NUMERIC]
_FIRST_FAMILY = SUMMARY_COLUMNS.index(f"family_{FAMILIES[0]}")


@dataclass(frozen=True)
class Names:
    """Texts by code: operator with dtype, and protocol with backend and framework."""

    operators: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()

    def context(self, device: str, operator: int, setting: int) -> Context:
        """Context of a query on a device, from its codes."""
        return Context(device, *self.operators[operator].split("|"), *self.settings[setting].split("|"))


class FeatureMaker:
    """Makes :class:`AdapterFeatures`.

    ``weights`` holds the mean and spread of every numeric feature in the training set. ``names``: texts by code; an
    unknown text has the code -1. Without ``names``, new texts get new codes, which :attr:`names` lists.
    """

    def __init__(self, weights: Weights, names: Names | None = None) -> None:
        self._weights, self._grows = weights, names is None
        known = names or Names()
        self._operators = {name: i for i, name in enumerate(known.operators)}
        self._settings = {name: i for i, name in enumerate(known.settings)}

    @property
    def names(self) -> Names:
        """Texts by code."""
        return Names(tuple(self._operators), tuple(self._settings))

    def features(self, batch: QueryBatch, peers: Array, view: Array) -> AdapterFeatures:
        """Features of n queries.

        ``peers``, ``view``: (n, trained devices) and (n, VIEW_COLUMNS), fields of
        :class:`cdmpp.model.raw_predictions.RawPredictions`.
        """
        rows, inputs = batch.rows, RowInputs(batch.store, stack_devices(batch.specs))
        launches = KERNEL_WIDTH * self._weights.config.schedule
        numeric = np.zeros((len(rows), len(NUMERIC) + launches), dtype=np.float32)
        for start in range(0, len(rows), BLOCK_ROWS):
            part = rows.take(np.arange(start, min(start + BLOCK_ROWS, len(rows))))
            place = slice(start, start + len(part))
            numeric[place, : len(NUMERIC)] = self._weights.standardise(inputs.queries(part)[0])[:, _COLUMNS]
            if launches:
                # The time of a GPU program follows its launch on the device, not the sizes of its tensors.
                numeric[place, : len(NUMERIC)] *= ~batch.store.launched[part.program, None]
                numeric[place, len(NUMERIC) :] = inputs.kernels(part) / LAUNCH_SPREAD
        one_hot = batch.store.summary[:, _FIRST_FAMILY : _FIRST_FAMILY + len(FAMILIES)]
        return AdapterFeatures(
            numeric=numeric,
            operator=self._operator(batch)[rows.program],
            family=one_hot.argmax(axis=1).astype(np.int32)[rows.program],
            setting=self._setting(rows.protocol, rows.backend, rows.framework),
            peers=peers.astype(np.float32),
            view=view,
        )

    def _operator(self, batch: QueryBatch) -> Array:
        """Operator code per program key."""
        used = np.unique(batch.kind[batch.rows.program])
        table = np.full(len(batch.kinds), -1, dtype=np.int32)
        for kind in used.tolist():
            table[kind] = self._code(self._operators, "|".join(batch.kinds[kind]))
        return table[batch.kind]

    def _setting(self, protocol: Array, backend: Array, framework: Array) -> Array:
        distinct, inverse = np.unique(np.stack([protocol, backend, framework], axis=1), axis=0, return_inverse=True)
        codes = [self._code(self._settings, setting_text(p, b, f)) for p, b, f in distinct.astype(int).tolist()]
        return np.array(codes, dtype=np.int32)[inverse.reshape(-1)]

    def _code(self, table: dict[str, int], name: str) -> int:
        return table.setdefault(name, len(table)) if self._grows else table.get(name, -1)


def setting_text(protocol: int, backend: int, framework: int) -> str:
    """Protocol, backend and framework of a query as one text."""
    launcher = framework_name(framework)
    return "|".join((PROTOCOLS[protocol], BACKENDS[backend], launcher))


_MEDIAN = LEVELS.index(0.5)
_NORMAL = np.array([NormalDist().inv_cdf(level) for level in LEVELS])


@dataclass(frozen=True, eq=False)
class Adapter:
    """Correction of a base model's predictions for one device."""

    device: DeviceSpec  # the adapted device; queries on devices with other figures keep the base's predictions
    process: ResidualProcess
    names: Names  # texts of the codes in the process's features
    # Share of the correction that is applied, from cross-validation: 1 all of it, 0 the base's predictions.
    weight: float
    width: float  # factor on the width of the adapted intervals, from cross-validation
    report: dict[str, Any] = field(default_factory=dict)  # report of the adaptation (:mod:`cdmpp.train.adaptation`)
    # Whether it corrects the model's part for programs of backend ``tvm``, in place of the model itself.
    scheduled: bool = False

    def apply(
        self, point: Array, levels: Array, features: AdapterFeatures, *, one_by_one: bool = False
    ) -> tuple[Array, Array, Array]:
        """Adapted ``point`` and ``levels`` of n queries, and how unsure they are.

        ``point``, ``levels``: the base's log latencies, (n,) and (n, len(LEVELS)); :attr:`width` still has to scale the
        adapted levels. Unsure, (n,): posterior over prior standard deviation: near 0 next to a measured query, 1 far
        from all. A :attr:`weight` below 1 moves it towards 1. ``one_by_one``: see
        :meth:`ResidualProcess.mean_and_variance`.
        """
        mean, variance = self.process.mean_and_variance(features, one_by_one=one_by_one)
        adapted, spread = centre_and_spread(self.process, point, levels, mean, variance, self.weight)
        unsure = np.sqrt(np.minimum(variance / prior_variance(features, self.process.settings), 1.0))
        return adapted, spread, unsure + (1.0 - self.weight) * (1.0 - unsure)


def centre_and_spread(
    process: ResidualProcess, point: Array, levels: Array, mean: Array, variance: Array, weight: float = 1.0
) -> tuple[Array, Array]:
    """Point and quantiles of queries, given mean and variance (without noise) of their residuals.

    The median is the base's point plus ``weight`` times the mean residual. Each quantile keeps the network's
    distance from the median, which depends on the program. The process's standard deviation and the part of the
    mean residual that is not applied are added in quadrature.
    """
    s = process.settings
    median = point + weight * mean
    away = levels - levels[:, _MEDIAN : _MEDIAN + 1]
    unsure = variance + ((1.0 - weight) * mean) ** 2
    widened = np.sign(_NORMAL) * np.sqrt(away**2 + _NORMAL**2 * unsure[:, None])
    return median - weight * s.shift * (variance + s.noise**2), median[:, None] + widened
