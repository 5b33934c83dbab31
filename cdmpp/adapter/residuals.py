"""What some measurements say of all other queries of a device: a Gaussian process on log residuals.

The network stays as it is. Its log residuals (log of measured over predicted) on k measured programs are
taken for samples of a smooth function of program and device: a constant, an offset per operator family, per
operator and per measuring protocol, a part that follows the program's sizes, and a part that is linear in the
known devices' efficiencies for the same program ("which known device does this one behave like"). Everything
is in closed form, so k = 40 takes milliseconds and k = 1000 about a second.
"""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

#: Rows of a kernel matrix computed at a time: memory is bounded by this times the measured rows.
BLOCK_ROWS = 4096


@dataclass(frozen=True)
class ResidualSettings:
    """Scales of the process: standard deviations in natural log units, so 0.1 is about 10 %.

    Attributes
    ----------
    constant, family, operator, setting : float
        Offset of the device; of an operator family; of an operator with its element type; of protocol,
        framework and backend.
    sizes : float
        The part that follows the numeric features and the view, within a family, as
        ``exp(-distance / length)``.
    length : float
        In standardised feature units.
    view : float
        Weight of the view's columns in the distance: what the network finds alike has like errors.
    peers : float
        The part linear in the peers' centred log efficiencies, per unit of their spread.
    noise : float
        What is left between two programs that the features do not tell apart, and of repeating.
    clip : float
        Residuals further than this from their median are cut there before the fit: a few outliers (a slow
        algorithm chosen by a library) shall not pull everything else.
    shift : float
        Share of the variance by which the point lies below the expected log: among log-normal outcomes it is
        the value one variance below the median that has the least mean relative error.
    amplitudes, noises : tuple of float
        Factors on all scales and on the noise, of which the marginal likelihood picks a pair.
    """

    constant: float = 0.25
    family: float = 0.2
    operator: float = 0.08
    setting: float = 0.1
    sizes: float = 0.4
    length: float = 5.0
    view: float = 1.3
    peers: float = 0.15
    noise: float = 0.07
    clip: float = 0.6
    shift: float = 1.0
    amplitudes: tuple[float, ...] = (0.15, 0.35, 0.7, 1.0, 1.5, 2.2)
    noises: tuple[float, ...] = (0.5, 1.0, 2.0, 3.0)

    @classmethod
    def of(cls, values: dict[str, Any]) -> ResidualSettings:
        """Back from :func:`dataclasses.asdict`, also after JSON."""
        plain: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        return cls(**plain)


@dataclass(frozen=True)
class AdapterFeatures:
    """What the process knows of queries, arrays of one length n.

    Attributes
    ----------
    numeric : (n, d) float
        Standardised sizes and ratios of program and device.
    operator, family, setting : (n,) int
        Codes; equal codes share an offset. -1 equals nothing that was measured.
    peers : (n, peers) float
        log(latency / reference) as the network gives it for each known device; NaN where training had no
        such query of the device.
    view : (n, v) float
        The network's last hidden layer in few columns.
    """

    numeric: Array
    operator: Array
    family: Array
    setting: Array
    peers: Array
    view: Array

    def __len__(self) -> int:
        return len(self.numeric)

    def take(self, rows: Array) -> AdapterFeatures:
        """Some rows."""
        return AdapterFeatures(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))

    @classmethod
    def concat(cls, parts: list[AdapterFeatures]) -> AdapterFeatures:
        """Rows of ``parts``, which is not empty, one after the other."""
        names = cls.__dataclass_fields__
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def kernel(one: AdapterFeatures, other: AdapterFeatures, settings: ResidualSettings) -> Array:
    """Prior covariance of the residuals, (len(one), len(other)), without noise.

    Each element is computed from its own two rows alone, in an order that does not depend on how many
    there are: the same query gets the same figure in any company.
    """
    s = settings
    same_family = (one.family[:, None] == other.family[None, :]) & (one.family[:, None] >= 0)
    same_operator = (one.operator[:, None] == other.operator[None, :]) & (one.operator[:, None] >= 0)
    same_setting = (one.setting[:, None] == other.setting[None, :]) & (one.setting[:, None] >= 0)
    gap = np.zeros(same_family.shape)
    for weight, left, right in ((1.0, one.numeric, other.numeric), (s.view, one.view, other.view)):
        for column in range(left.shape[1]):
            step = left[:, column, None].astype(np.float64) - right[None, :, column]
            gap += weight**2 * step * step
    near = s.sizes**2 * np.exp(-np.sqrt(gap) / s.length)
    out: Array = (
        s.constant**2 + same_family * (s.family**2 + near) + s.operator**2 * same_operator + s.setting**2 * same_setting
    )
    if one.peers.shape[1]:
        mine, theirs = centred(one.peers), centred(other.peers)
        like = np.zeros(out.shape)
        for column in range(mine.shape[1]):
            like += mine[:, column, None] * theirs[None, :, column]
        out = out + s.peers**2 * like
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
    """Peers' log efficiencies less their mean of the row, 0 where a peer cannot speak; (n, peers)."""
    can = np.isfinite(peers)
    known = np.where(can, peers, 0.0).astype(np.float64)
    mean = known.sum(axis=1) / np.maximum(can.sum(axis=1), 1)
    return np.where(can, known - mean[:, None], 0.0)


class ResidualProcess:
    """Residuals of a device's queries given some that were measured.

    Parameters
    ----------
    features : AdapterFeatures
        Of the measured queries, k rows.
    residual : (k,) float
        log(measured / predicted).
    settings : ResidualSettings
        As they are used; :meth:`fit` chooses among factors of given ones.
    """

    def __init__(self, features: AdapterFeatures, residual: Array, settings: ResidualSettings) -> None:
        if not len(features):
            raise ValueError("a residual process needs at least one measured query")
        self.features, self.residual, self.settings = features, np.asarray(residual, float), settings
        middle = float(np.median(self.residual))
        self._used = np.clip(self.residual, middle - settings.clip, middle + settings.clip)
        covariance = kernel(features, features, settings)
        covariance[np.diag_indices(len(features))] += settings.noise**2
        factor = np.linalg.cholesky(covariance)
        half = np.linalg.inv(factor)
        self._inverse = half.T @ half
        self._weight = self._inverse @ self._used
        self.log_likelihood = float(-0.5 * self._used @ self._weight - np.log(np.diag(factor)).sum())

    @classmethod
    def fit(
        cls, features: AdapterFeatures, residual: Array, settings: ResidualSettings | None = None
    ) -> ResidualProcess:
        """The process whose scales make the measured residuals most likely, of ``settings``' factors."""
        base = settings or ResidualSettings()
        scales = ("constant", "family", "operator", "setting", "sizes", "peers")
        tried = []
        for amplitude, noise in itertools.product(base.amplitudes, base.noises):
            chosen = {name: getattr(base, name) * amplitude for name in scales}
            scaled = replace(base, **chosen, noise=base.noise * noise, amplitudes=(1.0,), noises=(1.0,))
            tried.append(cls(features, residual, scaled))
        return max(tried, key=lambda process: process.log_likelihood)

    def __len__(self) -> int:
        return len(self.residual)

    def mean_and_variance(self, features: AdapterFeatures, *, one_by_one: bool = False) -> tuple[Array, Array]:
        """Expected residual of queries and its variance, both (n,); the variance is without noise.

        ``one_by_one``: every figure is computed as if its query were asked alone, equal to the last digit
        whatever else is asked; otherwise matrix products, which are faster for many queries.
        """
        mean, variance = np.empty(len(features)), np.empty(len(features))
        for start in range(0, len(features), BLOCK_ROWS):
            part = features.take(np.arange(start, min(start + BLOCK_ROWS, len(features))))
            rows = slice(start, start + len(part))
            cross = np.ascontiguousarray(kernel(part, self.features, self.settings))
            mean[rows] = (cross * self._weight).sum(axis=1)
            carried = np.stack([self._inverse @ row for row in cross]) if one_by_one else cross @ self._inverse
            known = (carried * cross).sum(axis=1)
            variance[rows] = np.maximum(prior_variance(part, self.settings) - known, 0.0)
        return mean, variance

    def leave_one_out(self) -> tuple[Array, Array]:
        """What the others say of each measured residual: mean and variance (with noise), both (k,)."""
        own = np.diag(self._inverse)
        return self._used - self._weight / own, 1.0 / own

    def tensors(self) -> dict[str, Array]:
        """What to store besides :meth:`manifest`: features and residuals of the measured queries."""
        return {
            "residual": self.residual,
            **{name: np.ascontiguousarray(value) for name, value in vars(self.features).items()},
        }

    def manifest(self) -> dict[str, Any]:
        """The settings, for JSON."""
        return asdict(self.settings)

    @classmethod
    def load(cls, tensors: dict[str, Array], manifest: dict[str, Any]) -> ResidualProcess:
        """Back from :meth:`tensors` and :meth:`manifest`."""
        features = AdapterFeatures(*(tensors[name] for name in AdapterFeatures.__dataclass_fields__))
        return cls(features, tensors["residual"], ResidualSettings.of(manifest))
