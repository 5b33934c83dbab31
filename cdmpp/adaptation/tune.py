"""Fine-tuning of a few of the network's weights, from about a hundred measurements on, before the residual process.

The device's vector, the last norm and the output layer are tuned (:mod:`cdmpp.nn.tuned`). Cross-validation decides the
number of steps. The residual process is fitted to residuals of measurements that the fold left out, because residuals
of tuned-on measurements would be too small. Tuning is kept only where both together beat the process alone in
cross-validation.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cdmpp.adaptation.fit import Checked, Measured, TunedFit, fit_process, mean_error
from cdmpp.adaptation.records import DeviceRecords
from cdmpp.adapter.residuals import ResidualSettings
from cdmpp.artifact.model import Artifact
from cdmpp.evaluation.cache import FeatureCache
from cdmpp.evaluation.query_batches import query_parts
from cdmpp.inference.pipeline import as_trained, known_devices
from cdmpp.nn.batch import Inputs
from cdmpp.nn.inputs import stack_devices
from cdmpp.nn.network import LatencyNetwork
from cdmpp.nn.tuned import read_tuned, tunable
from cdmpp.nn.weights import Tuned

Array = np.ndarray[Any, np.dtype[Any]]

#: Maximum number of measured programs for tuning.
TUNED_MOST = 4096
FOLDS = 5
#: Maximum number of steps, and the interval between checkpoints.
STEPS, EVERY = 300, 15
BATCH = 1024
LEARNING_RATE = 2e-3
#: Tuning is kept where its error is below this share of the process's error.
WORTH = 0.98


@dataclass(frozen=True)
class _Sample:
    """Inputs of the head: latents and standardised inputs, with the target log(latency / reference)."""

    latent: torch.Tensor
    inputs: torch.Tensor
    target: torch.Tensor

    def __len__(self) -> int:
        return len(self.target)

    def take(self, rows: Array) -> _Sample:
        chosen = torch.from_numpy(rows)
        return _Sample(self.latent[chosen], self.inputs[chosen], self.target[chosen])


def tune(
    artifact: Artifact,
    records: DeviceRecords,
    cache: FeatureCache,
    rows: Array,
    measured: Measured,
    alone: Checked,
    settings: ResidualSettings | None,
    seed: int,
) -> TunedFit:
    """Tune on measured queries and decide whether to keep the result.

    Parameters
    ----------
    artifact : Artifact
    records : DeviceRecords
    rows : (k,) int
        A row of the records' table for each of ``measured``.
    measured : Measured
    alone : Checked
        The residual process alone, on the same measurements.
    seed : int
        Seed of the folds and batches.
    """
    rng = np.random.default_rng([seed, 11])
    if len(measured) > TUNED_MOST:
        kept = np.sort(rng.choice(len(measured), TUNED_MOST, replace=False))
        rows, measured = rows[kept], measured.take(kept)
    network = _start(artifact, records)
    sample, own = _sample(artifact, network, records, cache, rows, measured)
    folds = rng.permutation(np.arange(len(measured)) % FOLDS)
    # [checkpoint, row]: change of the log latency by tuning, from the fold that left the row out.
    left_out = np.empty((STEPS // EVERY + 1, len(measured)))
    for fold in range(FOLDS):
        train, held = np.flatnonzero(folds != fold), np.flatnonzero(folds == fold)
        _, seen = _train(network, sample.take(train), STEPS, rng, sample.take(held))
        left_out[:, held] = seen - own[held]
    errors = [mean_error(measured.point + delta, measured.log_s) for delta in left_out]
    best = int(np.argmin(errors))
    delta = left_out[best]
    both = fit_process(
        Measured(measured.log_s, measured.point + delta, measured.levels + delta[:, None], measured.features), settings
    )
    weights = _train(network, sample, best * EVERY, rng, None)[0]
    worth = best > 0 and both.after < WORTH * alone.after
    checked = Checked(both.process, alone.before, both.after, both.width)
    report = {
        "kept": worth,
        "steps": best * EVERY,
        "cross_validated": {"process": alone.after, "tuned": errors[best], "both": both.after},
    }
    return TunedFit(worth, weights, checked, report)


def _start(artifact: Artifact, records: DeviceRecords) -> LatencyNetwork:
    """A copy of the network with frozen parameters, whose device 0 is the adapted device."""
    network = copy.deepcopy(artifact.network).eval()
    index = as_trained(known_devices(artifact.trained_devices), [records.device])[0][0]
    for parameter in network.parameters():
        parameter.requires_grad_(False)
    with torch.no_grad():
        network.device.weight[0] = network.device.weight[index]
    return network


@torch.no_grad()
def _sample(
    artifact: Artifact,
    network: LatencyNetwork,
    records: DeviceRecords,
    cache: FeatureCache,
    rows: Array,
    measured: Measured,
) -> tuple[_Sample, Array]:
    """Inputs of the head for the measured rows, and the network's log(latency / reference)."""
    latents, queries, references = [], [], []
    known = known_devices(artifact.trained_devices)
    for part in query_parts(records.table, rows, cache, records.specs):
        batch = part.batch
        if not len(part.index):
            continue
        specs = [spec for _, spec in as_trained(known, batch.specs)]
        inputs = Inputs(batch.store, stack_devices(specs))
        order = np.argsort(batch.store.bucket[batch.rows.program], kind="stable")
        latent, query, reference = inputs.encode(network, batch.rows.take(order))
        back = np.argsort(order)[part.position]
        latents.append(latent[torch.from_numpy(back)])
        queries.append(query[torch.from_numpy(back)])
        references.append(reference[back])
    latent, query = torch.cat(latents), torch.cat(queries)
    own = _ratio(network, latent, query).double().numpy()
    # The correction by peers stays: the network's own prediction should change by the residual.
    target = own + measured.log_s - measured.point
    return _Sample(latent, query, torch.from_numpy(target).float()), own


def _ratio(network: LatencyNetwork, latent: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    return network.decode(latent, inputs, torch.zeros(len(latent), dtype=torch.int64))[0]


def _train(
    start: LatencyNetwork, sample: _Sample, steps: int, rng: np.random.Generator, held: _Sample | None
) -> tuple[Tuned, Array]:
    """Tuned weights after ``steps``, and predictions for ``held`` at every checkpoint, (checkpoints, rows)."""
    network = copy.deepcopy(start)
    weights = list(tunable(network).values())
    for weight in weights:
        weight.requires_grad_(True)
    optimiser = torch.optim.Adam(weights, lr=LEARNING_RATE)
    seen = []
    for step in range(steps + 1):
        if held is not None and step % EVERY == 0:
            with torch.no_grad():
                seen.append(_ratio(network, held.latent, held.inputs).double().numpy())
        if step == steps:
            break
        part = sample
        if len(sample) > BATCH:
            part = sample.take(rng.choice(len(sample), BATCH, replace=False))
        for group in optimiser.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / 20)
        loss = torch.nn.functional.huber_loss(_ratio(network, part.latent, part.inputs), part.target, delta=0.2)
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    return read_tuned(network), np.array(seen)
