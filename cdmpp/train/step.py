"""Order of the rows of a training run, and the loss of a step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cdmpp.model.nn.batch import NetworkInputs
from cdmpp.model.nn.inputs import virtual_devices
from cdmpp.model.nn.losses import DISCREPANCIES, bounded, pinball_loss, ranking_loss, relative_error_loss
from cdmpp.model.nn.network import LatencyNetwork
from cdmpp.programs.query_options import BACKENDS
from cdmpp.train.job import LabelledRows, TrainingJob
from cdmpp.train.ranks import ALONE, Ranks

Array = np.ndarray[Any, np.dtype[Any]]

#: Maximum number of rows of its task that a row is compared with in a batch.
MAX_COMPARED = 31


def epoch_order(
    index: Array, weight: Array, seed: int, epoch: int, *, group: Array | None = None, together: int = 1
) -> Array:
    """Rows of one epoch in a seeded order; a row of ``weight``, its mean number of draws, 2.5 occurs two or three
    times. Rows of one ``group`` are drawn in blocks of up to ``together``; those of group -1 individually."""
    rng = np.random.default_rng([seed, 2, epoch])
    times = np.floor(weight + rng.random(len(weight))).astype(np.int64)
    chosen = np.repeat(np.arange(len(index)), times)
    rng.shuffle(chosen)
    if group is None or together == 1:
        return np.asarray(index[chosen])
    # Sort by group, keeping the shuffled order within; then shuffle blocks.
    chosen = chosen[np.argsort(group[chosen], kind="stable")]
    starts = np.unique(group[chosen], return_index=True)[1]
    place = np.arange(len(chosen)) - np.repeat(starts, np.diff([*starts, len(chosen)]))
    alone = group[chosen] < 0
    block = np.cumsum(alone | (place % together == 0)) - 1
    key = rng.permutation(int(block[-1]) + 1)[block]
    return np.asarray(index[chosen[np.argsort(key, kind="stable")]])


def pairs_within(group: Array) -> tuple[Array, Array]:
    """Pairs of rows of one group (not -1), each pair once, as two arrays (pairs,); in a large group, pairs of close
    rows only."""
    order = np.argsort(group, kind="stable")
    order = order[group[order] >= 0]
    pairs = [(order[:0], order[:0])]
    for apart in range(1, min(MAX_COMPARED, len(order) - 1) + 1):
        same = group[order[apart:]] == group[order[:-apart]]
        if not same.any():
            break
        pairs.append((order[:-apart][same], order[apart:][same]))
    return np.concatenate([p[0] for p in pairs]), np.concatenate([p[1] for p in pairs])


class Objective:
    """The loss of a batch: error of point and quantiles, and optional ranking and domain terms. ``inputs`` have the
    job's store and devices."""

    def __init__(self, job: TrainingJob, inputs: NetworkInputs) -> None:
        self.job, self.inputs = job, inputs

    def __call__(
        self,
        network: LatencyNetwork,
        rows: LabelledRows,
        tasks: Array,
        device: Tensor,
        step: int,
        *,
        multiple: int,
        ranks: Ranks = ALONE,
    ) -> Tensor:
        """Loss of rows in :meth:`ProgramStore.order`; on several ranks this rank's part, and the parts add up.

        ``tasks`` is :attr:`TrainingJob.task` of the rows, ``device`` the index of each row's device in the embedding;
        ``step`` is part of the seed of random draws; ``multiple``: see
        :meth:`cdmpp.model.nn.network.LatencyNetwork.encode_parts`. ``ranks`` divide the rows. Random draws are of the
        whole batch, so they do not depend on it. Ranking and domain loss are of the whole batch, too.
        """
        opt = self.job.optimiser
        figures, virtual = self.inputs.device_matrix[rows.device], np.zeros(len(rows), dtype=bool)
        if opt.virtual_hidden or opt.virtual_known:
            # The label is the real device's efficiency: see virtual_devices.
            rng = np.random.default_rng([self.job.seed, 9, step])
            share = np.where(device.numpy() == 0, opt.virtual_hidden, opt.virtual_known)
            # Leaf times of programs scheduled for a CPU are in seconds of the real device (cdmpp.model.nn.network).
            timed = (rows.backend == BACKENDS.index("tvm")) & ~self.inputs.store.launched[rows.program]
            virtual = (rng.random(len(rows)) < share) & ~timed
            figures[virtual] = virtual_devices(figures[virtual], rng)
        whole = len(rows)
        if ranks.size > 1:
            rank_rows = ranks.own(whole)
            rows, device, figures, virtual = (
                rows.take(np.arange(whole)[rank_rows]),
                device[rank_rows],
                figures[rank_rows],
                virtual[rank_rows],
            )
        latent, queries, reference = self.inputs.encode(network, rows, multiple=multiple, device=figures)
        if virtual.any():
            reference = self.inputs.queries(rows)[2]
        target = torch.from_numpy((rows.log_latency - reference).astype(np.float32)).to(latent.device)
        fixed = torch.from_numpy(reference.astype(np.float32)).to(latent.device)
        loss, device = latent.new_zeros(()), device.to(latent.device)
        # Members are trained side by side, each on its own error: their mean is better than they are.
        for point, quantiles, _ in network.decode_each(latent, queries, device):
            error = relative_error_loss(point, target) + opt.quantile_weight * pinball_loss(quantiles, target)
            loss = loss + error * (len(rows) / whole)
            if opt.ranking_weight:
                predicted, measured = ranks.whole(point + fixed, whole), ranks.whole(target + fixed, whole)
                loss = loss + opt.ranking_weight * ranks.shared(self.order(predicted, measured, tasks))
        domain = self.job.domain
        if domain.loss != "none" and domain.weight:
            unlabelled = self._drawn(step)
            part = unlabelled.take(np.arange(len(unlabelled))[ranks.own(len(unlabelled))])
            other = self.inputs.encode(network, part, multiple=multiple)[0]
            distance = DISCREPANCIES[domain.loss](
                bounded(ranks.whole(latent, whole)), bounded(ranks.whole(other, len(unlabelled)))
            )
            loss = loss + domain.weight * ranks.shared(distance)
        return loss

    def order(self, predicted: Tensor, measured: Tensor, tasks: Array) -> Tensor:
        """Loss of the order of log latencies within tasks."""
        on = predicted.device
        first, second = (torch.from_numpy(i).to(on) for i in pairs_within(tasks))
        return ranking_loss(predicted, measured, first, second)

    def _drawn(self, step: int) -> LabelledRows:
        """Random rows of the unlabelled target, without latencies."""
        rng = np.random.default_rng([self.job.seed, 8, step])
        count = min(len(self.job.target), self.job.domain.rows)
        chosen = rng.choice(self.job.target, count, replace=False)
        program = self.job.rows.program[chosen]
        rows = self.job.rows.take(chosen[self.job.store.order(program)])
        return replace(rows, log_latency=np.full(count, np.nan))
