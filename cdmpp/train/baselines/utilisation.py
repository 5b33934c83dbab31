"""A utilisation between 0 and 1 per kernel wave, after NeuSight.

NeuSight (Lee et al., ASPLOS 2025, arXiv 2407.13853) divides a kernel into tiles, bounds a tile's time by the
roofline of one multiprocessor and lets a multi-layer perceptron per operator family say how much of that
bound is used, as sigmoid(a - b / waves); the latency is the number of waves times the time of a tile.
Rebuilt on our inputs: a library's tile is not known here, and what five usual tiles would waste is no bound
(a kernel may split a reduction), so the bound is the whole program's roofline; waves are those of the tile
that wastes least, and the protocol is an input. It has no launch floor of its own and cannot be faster than
its bound.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from cdmpp.model.nn.batch import Inputs
from cdmpp.model.nn.inputs import FAMILIES, QUESTION_COLUMNS, SUMMARY_COLUMNS, TILES
from cdmpp.train.config import TrainConfig
from cdmpp.train.dataset import Dataset, MeasuredRows

Array = np.ndarray[Any, np.dtype[Any]]

_COLUMN = {name: i for i, name in enumerate((*SUMMARY_COLUMNS, *QUESTION_COLUMNS))}
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

    def __init__(self, dataset: Dataset, inputs: Inputs, config: TrainConfig) -> None:
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
        found = np.empty(len(rows))
        family = self.dataset.store.summary[rows.program][:, _FAMILY].argmax(axis=1)
        for code in np.unique(family).tolist():
            model, members = self._models.get(code), np.flatnonzero(family == code)
            for start in range(0, len(members), 50_000):
                part = members[start : start + 50_000]
                columns, waves, bound = self._inputs(rows.take(part))
                found[part] = bound
                if model is not None:
                    use = model(torch.from_numpy(columns), torch.from_numpy(waves))
                    found[part] -= use.double().numpy()
        return found


def symmetric_error(log_predicted: Tensor, log_measured: Tensor) -> Tensor:
    """Mean |p - m| / ((p + m) / 2): twice the hyperbolic tangent of half the log ratio."""
    return 2 * torch.tanh((log_predicted - log_measured).abs() / 2).mean()
