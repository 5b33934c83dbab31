"""Baselines of the error tables: roofline, mean ratio, gradient-boosted trees, utilisation.

The last one follows NeuSight (Lee et al., ASPLOS 2025, arXiv 2407.13853). NeuSight divides a kernel into tiles, bounds
a tile's time by the roofline of one multiprocessor and lets a multi-layer perceptron per operator family say how much
of that bound is used, as sigmoid(a - b / waves), a utilisation between 0 and 1; the latency is the number of waves
times the time of a tile. Rebuilt on our inputs: a library's tile is not known here, and what five usual tiles would
waste is no bound (a kernel may split a reduction), so the bound is the whole program's roofline; waves are those of
the tile that wastes least, and the protocol is an input. It has no launch floor of its own and cannot be faster than
its bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, Protocol, Self

import numpy as np
import torch
from torch import Tensor, nn

from cdmpp.features.schedule import SCHEDULE_COLUMNS, SCHEDULE_FLAGS
from cdmpp.features.schema import COLUMNS, LINEAR
from cdmpp.model.nn.batch import NetworkInputs
from cdmpp.model.nn.inputs import FAMILIES, QUERY_COLUMNS, SIZES, SUMMARY_COLUMNS, TILES, roofline_s
from cdmpp.programs.query_options import BACKENDS, FLOOR_S, PROTOCOLS
from cdmpp.train.config import TrainConfig
from cdmpp.train.dataset import Dataset, MeasuredRows

Array = np.ndarray[Any, np.dtype[Any]]


def roofline_log(dataset: Dataset, rows: MeasuredRows) -> Array:
    """log of max(arithmetic at peak, traffic at bandwidth) + the protocol's launch floor."""
    compute, memory = roofline_s(dataset.store.summary[rows.program], dataset.device_matrix[rows.device])
    floor = np.array([FLOOR_S[p] for p in PROTOCOLS])[rows.protocol]
    return np.asarray(np.log(np.maximum(compute, memory) + floor))


class RooflineBaseline:
    """:func:`roofline_log`; nothing is fitted."""

    def __init__(self, dataset: Dataset, inputs: NetworkInputs, config: TrainConfig) -> None:
        self.dataset = dataset

    def fit(self, index: Array) -> Self:
        """Nothing to fit."""
        return self

    def predict_log(self, rows: MeasuredRows) -> Array:
        """log latency of rows."""
        return roofline_log(self.dataset, rows)


class MeanBaseline:
    """The geometric mean of latency / reference per operator, dtype, protocol and backend.

    The reference is that of the network: arithmetic + traffic + launch floor. An operator without training rows of a
    protocol has its mean over all protocols; an operator without training rows has the overall mean.
    """

    def __init__(self, dataset: Dataset, inputs: NetworkInputs, config: TrainConfig) -> None:
        self.dataset, self.inputs = dataset, inputs
        self._means: list[dict[int, float]] = []

    def _keys(self, rows: MeasuredRows) -> list[Array]:
        """Codes of rows, from the finest to the coarsest grouping."""
        kind = self.dataset.kind[rows.program].astype(np.int64)
        return [(kind * 64 + rows.protocol) * 64 + rows.backend, kind, np.zeros(len(rows), dtype=np.int64)]

    def fit(self, index: Array) -> Self:
        """Means over the training rows ``index``."""
        rows = self.dataset.rows.take(index)
        ratio = rows.log_latency - self.inputs.reference(rows)
        self._means = []
        for keys in self._keys(rows):
            distinct, inverse = np.unique(keys, return_inverse=True)
            means = np.bincount(inverse, weights=ratio) / np.bincount(inverse)
            self._means.append(dict(zip(distinct.tolist(), means.tolist(), strict=True)))
        return self

    def predict_log(self, rows: MeasuredRows) -> Array:
        """log latency of rows."""
        log_latency = np.full(len(rows), np.nan)
        for keys, means in zip(self._keys(rows), self._means, strict=True):
            distinct, inverse = np.unique(keys, return_inverse=True)
            values = np.array([means.get(key, np.nan) for key in distinct.tolist()])[inverse]
            log_latency = np.where(np.isnan(log_latency), values, log_latency)
        return np.asarray(log_latency + self.inputs.reference(rows))


_COLUMN = {name: i for i, name in enumerate((*SUMMARY_COLUMNS, *QUERY_COLUMNS))}
#: Columns that are log2(1 + a size).
_SIZES = [_COLUMN[name] for name in ("batch", "m", "n", "k", *(f"size_{name}" for name in SIZES))]
_LINEAR = np.array([*(name in LINEAR for name in COLUMNS), *(name in SCHEDULE_FLAGS for name in SCHEDULE_COLUMNS)])


def summed_leaves(dataset: Dataset) -> Array:
    """Leaf features of every program, summed over its leaves: magnitudes before the logarithm, flags."""
    width = dataset.store.width
    linear = _LINEAR[:width]
    summed = np.zeros((len(dataset.store.bucket), width), dtype=np.float32)
    for size, bucket in dataset.store.buckets.items():
        keys = np.flatnonzero(dataset.store.bucket == size)
        for start in range(0, len(keys), 8192):
            part = keys[start : start + 8192]
            leaves = bucket.leaves[dataset.store.slot[part]].astype(np.float64)
            plain = np.where(linear, leaves, np.copysign(np.exp2(np.abs(leaves)) - 1, leaves)).sum(axis=1)
            summed[part] = np.where(linear, plain, np.copysign(np.log2(1 + np.abs(plain)), plain))
    return summed


class TreeBaseline:
    """XGBoost on log(latency / reference), the network's label: one model for each source.

    Its columns: the network's query inputs, the zeros at the end of sizes as binary numbers, the device's numbers and,
    where no device is held out, which device it is; of scheduled programs the summed leaf features, too. ``programs``,
    (programs, columns): other features of the programs, by key; then these and the device alone are the columns.
    ``label``: what the logarithm is taken of, latency over reference, or latency.
    """

    def __init__(
        self,
        dataset: Dataset,
        inputs: NetworkInputs,
        config: TrainConfig,
        *,
        programs: Array | None = None,
        label: Literal["ratio", "latency"] = "ratio",
    ) -> None:
        self.dataset, self.inputs, self.config, self.label = dataset, inputs, config, label
        self.programs = programs
        #: By source: columns that differ among its rows, and the trees.
        self._models: dict[int, tuple[Array, Any]] = {}

    def base(self, rows: MeasuredRows) -> Array:
        """Log that is added to the trees' output."""
        return self.inputs.reference(rows) if self.label == "ratio" else np.zeros(len(rows))

    @cached_property
    def _summed(self) -> Array:
        return summed_leaves(self.dataset)

    @cached_property
    def _scheduled(self) -> frozenset[int]:
        """Sources with scheduled programs."""
        rows = self.dataset.rows
        return frozenset(rows.source[rows.backend == BACKENDS.index("tvm")].tolist())

    def features(self, rows: MeasuredRows) -> Array:
        """Columns of rows of one source, float32."""
        with np.errstate(divide="ignore"):
            device = np.log2(self.dataset.device_matrix[rows.device]).astype(np.float32)
        if self.programs is not None:
            columns = [self.programs[rows.program], device]
        else:
            queries = self.inputs.queries(rows)
            columns = [*queries[:2], trailing_zeros(queries[0][:, _SIZES]), device]
            if int(rows.source[0]) in self._scheduled:
                columns.append(self._summed[rows.program])
        if not self.config.data.holdout_devices:
            columns.append(rows.device[:, None].astype(np.float32))
        table: Array = np.nan_to_num(np.concatenate(columns, axis=1), nan=-1.0, posinf=-1.0, neginf=-1.0)
        return table

    def fit(self, index: Array) -> Self:
        """Fit on (a seeded sample of) each source's training rows ``index``."""
        source = self.dataset.rows.source[index]
        for code in np.unique(source).tolist():
            self._models[code] = self._fit_source(index[source == code], code)
        return self

    def _fit_source(self, index: Array, code: int) -> tuple[Array, Any]:
        from xgboost import XGBRegressor

        finish = self.config.finish
        rng = np.random.default_rng([self.config.seed, 5, code])
        chosen = np.sort(rng.choice(index, min(len(index), finish.xgboost_rows), replace=False))
        rows = self.dataset.rows.take(chosen)
        columns, label = self.features(rows), rows.log_latency - self.base(rows)
        model = XGBRegressor(
            n_estimators=finish.xgboost_trees,
            max_depth=10,
            learning_rate=0.05,
            subsample=0.8,
            colsample_bytree=0.6,
            tree_method="hist",
            objective="reg:pseudohubererror",
            huber_slope=0.1,
            base_score=float(np.median(label)),  # the library's own guess overshoots with this slope
            max_delta_step=0.3,  # so do steps where the loss is nearly linear: errors of 1,000 % without it
            n_jobs=self.config.optimiser.threads or 2,
            random_state=self.config.seed,
        )
        used = np.ptp(columns, axis=0) > 0
        return used, model.fit(columns[:, used], label)

    def predict_log(self, rows: MeasuredRows) -> Array:
        """log latency of rows; that of a source without training rows is the base."""
        out = self.base(rows)
        for code, (used, model) in self._models.items():
            members = np.flatnonzero(rows.source == code)
            for start in range(0, len(members), 50_000):
                part = members[start : start + 50_000]
                out[part] += model.predict(self.features(rows.take(part))[:, used])
        return out


def trailing_zeros(log_sizes: Array) -> Array:
    """Number of zeros at the end of sizes as binary numbers, at most 12. ``log_sizes``: log2(1 + size); a size that a
    program lacks is 0, and so is its number of zeros."""
    sizes = np.rint(np.exp2(log_sizes.astype(np.float64))).astype(np.int64) - 1
    at_most = sizes | 4096
    return np.where(sizes > 0, np.log2(at_most & -at_most), 0.0).astype(np.float32)


_FAMILY = [_COLUMN[f"family_{name}"] for name in FAMILIES]
_WAVES, _FILL, _TILE = ([_COLUMN[f"{what}_{a}x{b}"] for a, b in TILES] for what in ("waves", "wave_fill", "tile_fill"))
WIDTH, LAYERS = 128, 3
BATCH_ROWS, LEARNING_RATE = 2048, 1e-3


class _Perceptron(nn.Module):
    """Computes a utilisation in (0, 1] from columns (rows, .) and waves (rows,)."""

    mean: Tensor
    scale: Tensor

    def __init__(self, columns: Array) -> None:
        super().__init__()
        spread = columns.std(0)
        scale = np.where(spread > 1e-4, 1 / np.maximum(spread, 1e-4), 0.0)
        self.register_buffer("mean", torch.from_numpy(columns.mean(0)))
        self.register_buffer("scale", torch.from_numpy(scale.astype(np.float32)))
        sizes = [columns.shape[1], *[WIDTH] * LAYERS]
        hidden: list[nn.Module] = []
        for width, following in pairwise(sizes):
            hidden += [nn.Linear(width, following), nn.ReLU()]
        self.layers = nn.Sequential(*hidden, nn.Linear(WIDTH, 2))

    def forward(self, columns: Tensor, waves: Tensor) -> Tensor:
        """log of the utilisation."""
        a, b = self.layers(((columns - self.mean) * self.scale).clamp(-6, 6)).unbind(1)
        return nn.functional.logsigmoid(a - nn.functional.softplus(b) / waves)


class UtilisationBaseline:
    """One perceptron per operator family, trained on the symmetric mean absolute percentage error."""

    def __init__(self, dataset: Dataset, inputs: NetworkInputs, config: TrainConfig) -> None:
        self.dataset, self.inputs, self.config = dataset, inputs, config
        self._models: dict[int, _Perceptron] = {}

    def _inputs(self, rows: MeasuredRows) -> tuple[Array, Array, Array]:
        """Columns, number of waves and log of the bound in seconds of rows."""
        columns = self.inputs.queries(rows)[0]
        roof = np.maximum(columns[:, _COLUMN["log_compute_us"]], columns[:, _COLUMN["log_memory_us"]])
        # Without a contraction, a tile is a run of elements and wastes none.
        waste = np.where(columns[:, [_COLUMN["m"]]] > 0.5, columns[:, _TILE], 1.0)
        best = (columns[:, _FILL] * waste).argmax(axis=1)
        waves = np.ceil(np.exp2(columns[np.arange(len(rows)), np.array(_WAVES)[best]].astype(np.float64)))
        return columns, waves.astype(np.float32), roof * np.log(2.0) - np.log(1e6)

    def fit(self, index: Array) -> Self:
        """Fit a perceptron for each family among the training rows ``index``."""
        family = self.dataset.store.summary[self.dataset.rows.program[index]][:, _FAMILY].argmax(axis=1)
        for code in np.unique(family):
            self._models[int(code)] = self._fit_family(index[family == code], int(code))
        return self

    def _fit_family(self, index: Array, family: int) -> _Perceptron:
        rng = np.random.default_rng([self.config.seed, 9, family])
        sample = rng.choice(index, min(len(index), self.config.finish.utilisation_rows), replace=False)
        rows = self.dataset.rows.take(np.sort(sample))
        columns, waves, bound = (torch.from_numpy(np.asarray(a, np.float32)) for a in self._inputs(rows))
        measured = torch.from_numpy(rows.log_latency.astype(np.float32))
        with torch.random.fork_rng():
            torch.manual_seed(self.config.seed)
            model = _Perceptron(columns.numpy())
        steps = self.config.finish.utilisation_steps
        optimiser = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
        decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
        for _ in range(steps):
            chosen = torch.from_numpy(rng.integers(0, len(rows), min(BATCH_ROWS, len(rows))))
            log_latency = bound[chosen] - model(columns[chosen], waves[chosen])
            loss = symmetric_error(log_latency, measured[chosen])
            optimiser.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            decay.step()
        return model.eval()

    @torch.inference_mode()
    def predict_log(self, rows: MeasuredRows) -> Array:
        """log latency of rows; a family without training rows is assumed to reach its bound."""
        log_latency = np.empty(len(rows))
        family = self.dataset.store.summary[rows.program][:, _FAMILY].argmax(axis=1)
        for code in np.unique(family).tolist():
            model, members = self._models.get(code), np.flatnonzero(family == code)
            for start in range(0, len(members), 50_000):
                part = members[start : start + 50_000]
                columns, waves, bound = self._inputs(rows.take(part))
                log_latency[part] = bound
                if model is not None:
                    use = model(torch.from_numpy(columns), torch.from_numpy(waves))
                    log_latency[part] -= use.double().numpy()
        return log_latency


def symmetric_error(log_predicted: Tensor, log_measured: Tensor) -> Tensor:
    """Mean |p - m| / ((p + m) / 2): twice the hyperbolic tangent of half the log ratio."""
    return 2 * torch.tanh((log_predicted - log_measured).abs() / 2).mean()


BaselineName = Literal["roofline", "mean", "xgboost", "utilisation"]


class Baseline(Protocol):
    """Interface of a baseline that is fitted on training rows."""

    def fit(self, index: Array) -> Self:
        """Fit on the rows ``index`` of the dataset."""

    def predict_log(self, rows: MeasuredRows) -> Array:
        """log latency of rows, (rows,)."""


BASELINES: dict[BaselineName, Callable[[Dataset, NetworkInputs, TrainConfig], Baseline]] = {
    "roofline": RooflineBaseline,
    "mean": MeanBaseline,
    "xgboost": TreeBaseline,
    "utilisation": UtilisationBaseline,
}


def fit_baselines(
    dataset: Dataset, inputs: NetworkInputs, config: TrainConfig, index: Array, names: Sequence[BaselineName]
) -> dict[str, Baseline]:
    """The named baselines, fitted on the training rows ``index``."""
    return {name: BASELINES[name](dataset, inputs, config).fit(index) for name in names}
