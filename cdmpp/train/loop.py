"""The training loop: seeded and resumable, with averaged weights."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cdmpp.model.nn.batch import NetworkInputs
from cdmpp.model.nn.network import LatencyNetwork
from cdmpp.train.checkpoint import State, identity_of, read_checkpoint, start_from, write_checkpoint
from cdmpp.train.config import OptimiserConfig, Precision, TrainConfig
from cdmpp.train.dataset import Dataset, MeasuredRows
from cdmpp.train.ranks import ALONE, Ranks, Stopped
from cdmpp.train.step import Objective, blocks, epoch_order, training_rows

Array = np.ndarray[Any, np.dtype[Any]]

#: Share of the last steps, which always have full precision.
SETTLE = 0.1

#: In lower precision, leaves of a batch are padded to a multiple of this, so that shapes repeat: matrix kernels are
#: prepared once per shape, which takes some milliseconds.
MULTIPLE = {"highest": 1, "medium": 512}


@contextmanager
def matrix_precision(precision: Precision) -> Iterator[None]:
    """Context manager that sets the precision of float32 matrix products.

    "medium" rounds their inputs to bfloat16 where the processor has units for it, and sums in float32.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def precision_of(share: float, precision: Precision) -> Precision:
    """Precision of a step at this completed share of a run; the last steps have full precision."""
    return "highest" if share >= 1 - SETTLE else precision


Progress = Callable[[int, int, dict[str, float]], None]

METRICS = "metrics.jsonl"


def fit_scalers(network: LatencyNetwork, inputs: NetworkInputs, rows: MeasuredRows, rng: np.random.Generator) -> None:
    """Set means and standard deviations of the inputs from a seeded sample of the training rows."""
    sample = rows.take(np.sort(rng.choice(len(rows), min(len(rows), 100_000), replace=False)))
    features, width = inputs.queries(sample)[0], network.config.leaf_width
    leaves = np.concatenate(
        [
            b.leaves[inputs.store.slot[sample.program[members]], :, :width].reshape(-1, width)
            for size, b in inputs.store.buckets.items()
            if (members := inputs.store.bucket[sample.program] == size).any()
        ]
    )
    for name, values in (("input", features), ("leaf", leaves)):
        spread = values.std(0)
        scale = np.where(spread > 1e-4, 1 / np.maximum(spread, 1e-4), 0.0)
        for member in network.all_members():
            getattr(member, f"{name}_mean").copy_(torch.from_numpy(values.mean(0).astype(np.float32)))
            getattr(member, f"{name}_scale").copy_(torch.from_numpy(scale.astype(np.float32)))


def train(
    dataset: Dataset,
    config: TrainConfig,
    out: Path,
    *,
    progress: Progress | None = None,
    ranks: Ranks = ALONE,
    make_objective: Callable[[Dataset, TrainConfig, NetworkInputs], Objective] = Objective,
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
        Called with (step, steps, metrics); on the first rank only.
    ranks : Ranks
        Processes that share the run (:func:`cdmpp.train.ranks.process_group`). ``batch_rows`` is divided among
        them. Only the first rank reads and writes the run folder.
    make_objective : callable
        Loss.

    Returns
    -------
    network, summary
        The network with averaged weights, in evaluation mode; steps, rows and seconds.

    Raises
    ------
    DataError
        Nothing to train on, or the folder holds a run of another configuration or other data.
    ServiceError
        Another rank ended.
    Stopped
        A rank got SIGTERM (under torchrun); the checkpoint is written.
    """
    opt = config.optimiser
    torch.manual_seed(config.seed)
    if opt.threads:
        torch.set_num_threads(opt.threads)
    index, weight = training_rows(dataset, config)
    inputs = NetworkInputs(dataset.store, dataset.device_matrix)
    network = LatencyNetwork(config.network, len(dataset.devices))
    fit_scalers(network, inputs, dataset.rows.take(index), np.random.default_rng([config.seed, 3]))
    optimiser = torch.optim.AdamW(network.parameters(), lr=opt.learning_rate, weight_decay=opt.weight_decay, fused=True)
    average = {k: v.detach().clone() for k, v in network.named_parameters()}
    objective = make_objective(dataset, config, inputs)
    tasks = objective.tasks
    block, together = blocks(dataset, config, index, tasks)
    identity = identity_of(dataset, config)
    ranks.check_same(identity)
    state = State(network, optimiser, average)
    step, seconds = _begin(out, identity, state, dataset, config, ranks)
    if ranks.size > 1:
        # Dropout differs between ranks; the weights were drawn with the same seed.
        torch.manual_seed(config.seed + ranks.rank)
    composed = dataset.composed
    started, epoch, order, cursor, seen = time.monotonic(), -1, np.zeros(0, dtype=np.int64), 0, 0
    running, stop = 0.0, False
    # Replay the order up to the step, so that a resumed run draws the same rows as an uninterrupted one.
    skip = step * opt.batch_rows
    network.train()
    parameters = list(network.parameters())
    with ranks.stoppable(), (out / METRICS if ranks.first else Path(os.devnull)).open("a", encoding="utf-8") as log:
        while (share := _share(opt, step, seconds + time.monotonic() - started, ranks)) < 1:
            while cursor + opt.batch_rows > len(order):
                epoch += 1
                drawn = epoch_order(index, weight, config.seed, epoch, group=block, together=together)
                order = np.concatenate([order[cursor:], drawn])
                cursor = 0
            if seen < skip:
                cursor, seen = cursor + opt.batch_rows, seen + opt.batch_rows
                continue
            batch = order[cursor : cursor + opt.batch_rows]
            cursor, seen = cursor + opt.batch_rows, seen + opt.batch_rows
            rng = np.random.default_rng([config.seed, 4, step])
            batch = batch[dataset.store.order(dataset.rows.program[batch])]
            rows = dataset.rows.take(batch)
            # A query without a framework means one kernel.
            rows.framework[(rng.random(len(rows)) < opt.hide_framework) & ~composed[batch]] = -1
            hidden = rng.random(len(rows)) < opt.hide_device
            device = torch.from_numpy(np.where(hidden, 0, rows.device + 1).astype(np.int64))
            for group in optimiser.param_groups:
                group["lr"] = opt.learning_rate * _schedule(opt, step, share)
            precision = precision_of(share, opt.precision)
            with matrix_precision(precision):
                loss = objective(network, rows, tasks[batch], device, step, multiple=MULTIPLE[precision], ranks=ranks)
                optimiser.zero_grad(set_to_none=True)
                loss.backward()  # type: ignore[no-untyped-call]
            value, stop = ranks.sum_gradients(parameters, loss)
            torch.nn.utils.clip_grad_norm_(network.parameters(), opt.clip_norm)
            optimiser.step()
            step += 1
            decay = min(opt.average_decay, (1 + step) / (10 + step))
            with torch.no_grad():
                torch._foreach_lerp_(list(average.values()), list(network.parameters()), 1 - decay)
            running = 0.98 * running + 0.02 * value if running else value
            if step % 50 == 0 or step == opt.steps:
                elapsed = seconds + time.monotonic() - started
                record = {"step": step, "loss": round(running, 5), "seconds": round(elapsed, 1)}
                if step % 500 == 0 or step == opt.steps:
                    log.write(json.dumps(record) + "\n")
                    log.flush()
                if progress and ranks.first:
                    progress(step, opt.steps, record)
            if ranks.first and (stop or step % opt.checkpoint_every == 0) and step < opt.steps:
                write_checkpoint(out, identity, state, step, seconds + time.monotonic() - started)
            if stop and step < opt.steps:
                raise Stopped(step)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            parameter.copy_(average[name])
    if ranks.first:
        write_checkpoint(out, identity, state, step, seconds + time.monotonic() - started)
    if stop:
        raise Stopped(step)
    network.eval()
    return network, {
        "steps": step,
        "train_rows": len(index),
        "train_seconds": round(seconds + time.monotonic() - started, 3),
    }


def _begin(
    out: Path, identity: dict[str, str], state: State, dataset: Dataset, config: TrainConfig, ranks: Ranks
) -> tuple[int, float]:
    """Set every rank to the first rank's checkpoint or start; returns its steps and seconds."""

    def begin() -> tuple[int, float, dict[str, torch.Tensor] | None]:
        out.mkdir(parents=True, exist_ok=True)
        stored = read_checkpoint(out, identity)
        if stored is not None:
            return stored
        if config.optimiser.start_from:
            start_from(Path(config.optimiser.start_from), state.network, dataset, config)
            state.reset_average()
        return 0, 0.0, state.tensors() if ranks.size > 1 else None

    step, seconds, tensors = ranks.from_first(begin)
    if tensors is not None:
        state.load(tensors)
    return step, seconds


def _share(opt: OptimiserConfig, step: int, seconds: float, ranks: Ranks) -> float:
    """Completed share of the run, by steps or by the first rank's time, whichever is larger."""
    if not opt.seconds:
        return step / opt.steps
    limit_s = opt.seconds
    return ranks.from_first(lambda: max(step / opt.steps, seconds / limit_s))


def _schedule(opt: OptimiserConfig, step: int, share: float) -> float:
    if step < opt.warmup_steps:
        return (step + 1) / opt.warmup_steps
    warm = 0.0 if opt.seconds else opt.warmup_steps / opt.steps
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (share - warm) / max(1 - warm, 1e-9)))
