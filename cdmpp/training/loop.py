"""The training loop: seeded and resumable, with averaged weights."""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from cdmpp.errors import DataError
from cdmpp.nn.batch import Inputs, predict_rows
from cdmpp.nn.network import LatencyNetwork, NetworkConfig
from cdmpp.training.config import OptimiserConfig, TrainConfig
from cdmpp.training.dataset import Dataset, MeasuredRows
from cdmpp.training.draw import epoch_order, training_rows
from cdmpp.training.precision import MULTIPLE, matrix_precision, precision_of
from cdmpp.training.start import start_from
from cdmpp.training.step import Objective

Array = np.ndarray[Any, np.dtype[Any]]
Progress = Callable[[int, int, dict[str, float]], None]

CHECKPOINT, METRICS = "checkpoint.safetensors", "metrics.jsonl"
_ANOTHER = "choose another folder for this one (--run), or remove that folder"


def fit_scalers(network: LatencyNetwork, inputs: Inputs, rows: MeasuredRows, rng: np.random.Generator) -> None:
    """Set means and standard deviations of the inputs from a seeded sample of the training rows."""
    sample = rows.take(np.sort(rng.choice(len(rows), min(len(rows), 100_000), replace=False)))
    features = inputs.queries(sample)[0]
    leaves = np.concatenate(
        [
            b.leaves[inputs.store.slot[sample.program[members]]].reshape(-1, b.leaves.shape[-1])
            for size, b in inputs.store.buckets.items()
            if (members := inputs.store.bucket[sample.program] == size).any()
        ]
    )
    for name, values in (("input", features), ("leaf", leaves)):
        spread = values.std(0)
        scale = np.where(spread > 1e-4, 1 / np.maximum(spread, 1e-4), 0.0)
        getattr(network, f"{name}_mean").copy_(torch.from_numpy(values.mean(0).astype(np.float32)))
        getattr(network, f"{name}_scale").copy_(torch.from_numpy(scale.astype(np.float32)))


def train(
    dataset: Dataset,
    config: TrainConfig,
    out: Path,
    *,
    progress: Progress | None = None,
    make_network: Callable[[NetworkConfig, int], LatencyNetwork] = LatencyNetwork,
    make_objective: Callable[[Dataset, TrainConfig, Inputs], Objective] = Objective,
) -> tuple[LatencyNetwork, dict[str, Any]]:
    """Train a network.

    Parameters
    ----------
    dataset : Dataset
    config : TrainConfig
    out : Path
        Run folder with ``metrics.jsonl`` and ``checkpoint.safetensors``. An existing run with the same
        configuration and data is continued.
    progress : callable, optional
        Called with (step, steps, metrics).
    make_network, make_objective : callable
        Network and loss; variants of them are compared in benchmarks/ablations.py.

    Returns
    -------
    network, summary
        The network with averaged weights, in evaluation mode; steps, rows and seconds.

    Raises
    ------
    DataError
        Nothing to train on, or the folder holds a run of another configuration or other data.
    """
    opt = config.optimiser
    torch.manual_seed(config.seed)
    if opt.threads:
        torch.set_num_threads(opt.threads)
    out.mkdir(parents=True, exist_ok=True)
    index, weight = training_rows(dataset, config)
    inputs = Inputs(dataset.store, dataset.device_matrix)
    network = make_network(config.network, len(dataset.devices))
    fit_scalers(network, inputs, dataset.rows.take(index), np.random.default_rng([config.seed, 3]))
    if opt.start_from and not (out / CHECKPOINT).exists():
        start_from(Path(opt.start_from), network, dataset, config)
    optimiser = torch.optim.AdamW(network.parameters(), lr=opt.learning_rate, weight_decay=opt.weight_decay, fused=True)
    average = {k: v.detach().clone() for k, v in network.named_parameters()}
    objective = make_objective(dataset, config, inputs)
    tasks = objective.tasks
    identity = _identity(dataset, config)
    step, seconds = _resume(out, identity, network, optimiser, average)
    buckets = dataset.store.bucket
    started, epoch, order, cursor, seen = time.monotonic(), -1, np.zeros(0, dtype=np.int64), 0, 0
    running = 0.0
    # Replay the order up to the step, so that a resumed run draws the same rows as an uninterrupted one.
    skip = step * opt.batch_rows
    network.train()
    with (out / METRICS).open("a", encoding="utf-8") as log:
        while (share := _share(opt, step, seconds + time.monotonic() - started)) < 1:
            while cursor + opt.batch_rows > len(order):
                epoch += 1
                drawn = epoch_order(index, weight, config.seed, epoch, group=tasks[index], together=opt.group_tasks)
                order = np.concatenate([order[cursor:], drawn])
                cursor = 0
            if seen < skip:
                cursor, seen = cursor + opt.batch_rows, seen + opt.batch_rows
                continue
            batch = order[cursor : cursor + opt.batch_rows]
            cursor, seen = cursor + opt.batch_rows, seen + opt.batch_rows
            rng = np.random.default_rng([config.seed, 4, step])
            batch = batch[np.argsort(buckets[dataset.rows.program[batch]], kind="stable")]
            rows = dataset.rows.take(batch)
            rows.framework[rng.random(len(rows)) < opt.hide_framework] = -1
            hidden = rng.random(len(rows)) < opt.hide_device
            device = torch.from_numpy(np.where(hidden, 0, rows.device + 1).astype(np.int64))
            for group in optimiser.param_groups:
                group["lr"] = opt.learning_rate * _schedule(opt, step, share)
            precision = precision_of(share, opt.precision)
            with matrix_precision(precision):
                loss = objective(network, rows, tasks[batch], device, step, multiple=MULTIPLE[precision])
                optimiser.zero_grad(set_to_none=True)
                loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(network.parameters(), opt.clip_norm)
            optimiser.step()
            step += 1
            decay = min(opt.average_decay, (1 + step) / (10 + step))
            with torch.no_grad():
                torch._foreach_lerp_(list(average.values()), list(network.parameters()), 1 - decay)
            running = 0.98 * running + 0.02 * float(loss.detach()) if running else float(loss.detach())
            if step % 50 == 0 or step == opt.steps:
                elapsed = seconds + time.monotonic() - started
                record = {"step": step, "loss": round(running, 5), "seconds": round(elapsed, 1)}
                if step % 500 == 0 or step == opt.steps:
                    log.write(json.dumps(record) + "\n")
                    log.flush()
                if progress:
                    progress(step, opt.steps, record)
            if step % opt.checkpoint_every == 0 and step < opt.steps:
                _save(out, identity, network, optimiser, average, step, seconds + time.monotonic() - started)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            parameter.copy_(average[name])
    _save(out, identity, network, optimiser, average, step, seconds + time.monotonic() - started)
    network.eval()
    return network, {
        "steps": step,
        "train_rows": len(index),
        "train_seconds": round(seconds + time.monotonic() - started, 1),
    }


def _identity(dataset: Dataset, config: TrainConfig) -> dict[str, str]:
    """Fields of a checkpoint that must match for it to be continued: the configuration of the steps, and the data,
    because ``--records`` may add to it."""
    return {
        "config": config.model_dump_json(exclude={"finish", "name"}),
        "data": dataset.fingerprint,
        "devices": json.dumps([device.name for device in dataset.devices]),
        # The networks that use a task decide its part and are not in the fingerprint.
        "parts": hashlib.sha256(dataset.rows.part.tobytes()).hexdigest()[:32],
    }


def _share(opt: OptimiserConfig, step: int, seconds: float) -> float:
    """Completed share of the run, by steps or by time, whichever is larger."""
    return max(step / opt.steps, seconds / opt.seconds if opt.seconds else 0.0)


def _schedule(opt: OptimiserConfig, step: int, share: float) -> float:
    if step < opt.warmup_steps:
        return (step + 1) / opt.warmup_steps
    warm = 0.0 if opt.seconds else opt.warmup_steps / opt.steps
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (share - warm) / max(1 - warm, 1e-9)))


def _save(
    out: Path,
    identity: dict[str, str],
    network: LatencyNetwork,
    optimiser: torch.optim.AdamW,
    average: dict[str, torch.Tensor],
    step: int,
    seconds: float,
) -> None:
    """Write the state to a temporary file and rename it, so that a kill leaves the old or the new checkpoint."""
    tensors = {f"network.{k}": v.detach().clone() for k, v in network.state_dict().items()}
    tensors |= {f"average.{k}": v.clone() for k, v in average.items()}
    for (name, _), state in zip(network.named_parameters(), optimiser.state_dict()["state"].values(), strict=True):
        tensors |= {f"optimiser.{name}.{k}": v.clone() for k, v in state.items()}
    metadata = {"step": str(step), "seconds": str(seconds), **identity}
    aside = out / (CHECKPOINT + ".tmp")
    save_file(tensors, str(aside), metadata)
    os.replace(aside, out / CHECKPOINT)


def _resume(
    out: Path,
    identity: dict[str, str],
    network: LatencyNetwork,
    optimiser: torch.optim.AdamW,
    average: dict[str, torch.Tensor],
) -> tuple[int, float]:
    path = out / CHECKPOINT
    if not path.exists():
        return 0, 0.0
    from safetensors import safe_open

    with safe_open(str(path), framework="pt") as file:
        metadata = file.metadata() or {}
    if metadata.get("config") != identity["config"]:
        raise DataError(f"{out} holds a run with another configuration", hint=_ANOTHER)
    # A checkpoint without these fields may belong to any data.
    if any(metadata.get(name) != value for name, value in identity.items()):
        raise DataError(f"{out} holds a run on other data", hint=_ANOTHER)
    tensors = load_file(str(path))
    network.load_state_dict({k[8:]: v for k, v in tensors.items() if k.startswith("network.")})
    for name in average:
        average[name].copy_(tensors[f"average.{name}"])
    state = optimiser.state_dict()
    state["state"] = {
        i: {k: tensors[f"optimiser.{name}.{k}"] for k in ("step", "exp_avg", "exp_avg_sq")}
        for i, (name, _) in enumerate(network.named_parameters())
    }
    optimiser.load_state_dict(state)
    return int(metadata["step"]), float(metadata["seconds"])


__all__ = ["Inputs", "NetworkConfig", "predict_rows", "train", "training_rows"]
