"""Fine-tuning a few of the network's weights from about a hundred measurements; the process after it.

Tuned are the device's vector, the last norm and the output layer (:mod:`cdmpp.nn.tuned`). How long is decided
by cross-validation, and the residual process is fitted to the residuals of measurements that each fold left
out: those of a measurement that was tuned on would be too small. Tuning is kept only where the two together
beat the process alone on measurements left out.
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

#: Most measured programs that are tuned on.
TUNED_MOST = 4096
FOLDS = 5
#: Most steps, and every how many the folds are looked at.
STEPS, EVERY = 300, 15
BATCH = 1024
LEARNING_RATE = 2e-3
#: Tuning is kept where its error is below this share of the process's own.
WORTH = 0.98


@dataclass(frozen=True)
class _Sample:
    """Rows at the head: latents, standardised inputs, and the log(latency / reference) to reach."""

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
    """Tune on measured queries and say whether it pays.

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
        Of the folds and batches.
    """
    rng = np.random.default_rng([seed, 11])
    if len(measured) > TUNED_MOST:
        kept = np.sort(rng.choice(len(measured), TUNED_MOST, replace=False))
        rows, measured = rows[kept], measured.take(kept)
    network = _start(artifact, records)
    sample, own = _sample(artifact, network, records, cache, rows, measured)
    folds = rng.permutation(np.arange(len(measured)) % FOLDS)
    # [checkpoint, row]: what tuning adds to the log latency, by the fold that left the row out.
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
    """A copy of the network whose device 0 is the one that is adapted to; nothing else is trained."""
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
    """The measured rows at the head, and log(latency / reference) as the network gives it there."""
    latents, queries, references = [], [], []
    known = known_devices(artifact.trained_devices)
    for part in query_parts(records.table, rows, cache, records.specs):
        asked = part.batch
        if not len(part.index):
            continue
        specs = [spec for _, spec in as_trained(known, asked.specs)]
        inputs = Inputs(asked.store, stack_devices(specs))
        order = np.argsort(asked.store.bucket[asked.rows.program], kind="stable")
        latent, query, reference = inputs.encode(network, asked.rows.take(order))
        back = np.argsort(order)[part.position]
        latents.append(latent[torch.from_numpy(back)])
        queries.append(query[torch.from_numpy(back)])
        references.append(reference[back])
    latent, query = torch.cat(latents), torch.cat(queries)
    own = _ratio(network, latent, query).double().numpy()
    # What the peers add stays: the network's own answer is to move by the residual.
    target = own + measured.log_s - measured.point
    return _Sample(latent, query, torch.from_numpy(target).float()), own


def _ratio(network: LatencyNetwork, latent: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    return network.decode(latent, inputs, torch.zeros(len(latent), dtype=torch.int64))[0]


def _train(
    start: LatencyNetwork, sample: _Sample, steps: int, rng: np.random.Generator, held: _Sample | None
) -> tuple[Tuned, Array]:
    """Tuned weights after some steps; and answers for ``held`` at every checkpoint, (checkpoints, rows)."""
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
