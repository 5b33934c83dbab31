"""The training loop: seeded and resumable, with averaged weights.

``python -m cdmpp.train.loop DIR --minutes 9 --resume`` trains what ``cdmpp train --prepare DIR`` wrote, on a machine
with torch, numpy and safetensors and none of the package's other dependencies.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from cdmpp.errors import CdmppError, DataError
from cdmpp.model.nn.batch import NetworkInputs
from cdmpp.model.nn.network import LatencyNetwork
from cdmpp.train.checkpoint import CHECKPOINT, State, read_checkpoint, write_checkpoint, write_weights
from cdmpp.train.job import LabelledRows, TrainingJob
from cdmpp.train.options import OptimiserConfig, Precision
from cdmpp.train.ranks import ALONE, Ranks, Stopped
from cdmpp.train.step import Objective, epoch_order

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
#: Weights before the first step, of a prepared job.
START = "start.safetensors"


def first_network(job: TrainingJob, inputs: NetworkInputs) -> LatencyNetwork:
    """The network before the first step: random weights of the seed, scalers of the training rows."""
    torch.manual_seed(job.seed)
    network = LatencyNetwork(job.network, len(job.device_matrix))
    fit_scalers(network, inputs, job.rows.take(job.index), np.random.default_rng([job.seed, 3]))
    return network


def fit_scalers(network: LatencyNetwork, inputs: NetworkInputs, rows: LabelledRows, rng: np.random.Generator) -> None:
    """Set means and standard deviations of the inputs from a seeded sample of the training rows."""
    sample = rows.take(np.sort(rng.choice(len(rows), min(len(rows), 100_000), replace=False)))
    features, config, parts = inputs.queries(sample)[0], network.config, []
    for size in inputs.store.buckets:
        members = sample.take(np.flatnonzero(inputs.store.bucket[sample.program] == size))
        if len(members):
            parts.append(inputs.network_leaves(members, config).reshape(-1, config.leaf_width))
    leaves = np.concatenate(parts)
    for name, values in (("input", features), ("leaf", leaves)):
        spread = values.std(0)
        scale = np.where(spread > 1e-4, 1 / np.maximum(spread, 1e-4), 0.0)
        for member in network.all_members():
            getattr(member, f"{name}_mean").copy_(torch.from_numpy(values.mean(0).astype(np.float32)))
            getattr(member, f"{name}_scale").copy_(torch.from_numpy(scale.astype(np.float32)))


def run_steps(
    job: TrainingJob,
    out: Path,
    *,
    start: Callable[[LatencyNetwork], None] | None = None,
    progress: Progress | None = None,
    ranks: Ranks = ALONE,
    make_objective: Callable[[TrainingJob, NetworkInputs], Objective] = Objective,
    on: str = "cpu",
    minutes: float | None = None,
) -> tuple[LatencyNetwork, dict[str, Any]]:
    """Train a network; returns it with averaged weights, on the CPU and in evaluation mode, and steps, rows and
    seconds.

    ``out`` is the run folder with ``metrics.jsonl`` and ``checkpoint.safetensors``. An existing run with the same
    configuration and data is continued; one with others is a DataError. ``start`` sets the weights of the new network,
    by default random ones of the seed. ``progress`` is called with (step, steps, metrics), on the first rank only.
    ``ranks`` are processes that share the run (:func:`cdmpp.train.ranks.process_group`): ``batch_rows`` is divided
    among them, and only the first one reads and writes the run folder; a ServiceError if another one ended. ``on``,
    "cpu" or "cuda", is the device of the network, its batches, the programs' leaves and the averaged weights. After
    ``minutes``, or if a rank got SIGTERM (under torchrun), the checkpoint is written and ``Stopped`` raised.
    """
    opt = job.optimiser
    if opt.threads:
        torch.set_num_threads(opt.threads)
    inputs = NetworkInputs(job.store, job.device_matrix, on)
    network = first_network(job, inputs).to(on)
    optimiser = torch.optim.AdamW(network.parameters(), lr=opt.learning_rate, weight_decay=opt.weight_decay, fused=True)
    average = {k: v.detach().clone() for k, v in network.named_parameters()}
    objective = make_objective(job, inputs)
    task = job.task[job.index]
    ranks.check_same(job.identity)
    state = State(network, optimiser, average)
    step, seconds = _begin(out, job.identity, state, start, ranks)
    if ranks.size > 1:
        # Dropout differs between ranks; the weights were drawn with the same seed.
        torch.manual_seed(job.seed + ranks.rank)
    started, epoch, order, cursor, seen = time.monotonic(), -1, np.zeros(0, dtype=np.int64), 0, 0
    running, stop, first = 0.0, False, step
    # Replay the order up to the step, so that a resumed run draws the same rows as an uninterrupted one.
    skip = step * opt.batch_rows
    network.train()
    parameters = list(network.parameters())
    with ranks.stoppable(), (out / METRICS if ranks.first else Path(os.devnull)).open("a", encoding="utf-8") as log:
        while (share := _share(opt, step, seconds + time.monotonic() - started, ranks)) < 1:
            while cursor + opt.batch_rows > len(order):
                epoch += 1
                drawn = epoch_order(job.index, job.weight, job.seed, epoch, group=task, together=opt.group_tasks)
                order = np.concatenate([order[cursor:], drawn])
                cursor = 0
            if seen < skip:
                cursor, seen = cursor + opt.batch_rows, seen + opt.batch_rows
                continue
            batch = order[cursor : cursor + opt.batch_rows]
            cursor, seen = cursor + opt.batch_rows, seen + opt.batch_rows
            rng = np.random.default_rng([job.seed, 4, step])
            batch = batch[job.store.order(job.rows.program[batch])]
            rows = job.rows.take(batch)
            # A query without a framework means one kernel.
            rows.framework[(rng.random(len(rows)) < opt.hide_framework) & ~job.composed[batch]] = -1
            hidden = rng.random(len(rows)) < opt.hide_device
            device = torch.from_numpy(np.where(hidden, 0, rows.device + 1).astype(np.int64))
            for group in optimiser.param_groups:
                group["lr"] = opt.learning_rate * _schedule(opt, step, share)
            precision = precision_of(share, opt.precision)
            with matrix_precision(precision):
                loss = objective(
                    network, rows, job.task[batch], device, step, multiple=MULTIPLE[precision], ranks=ranks
                )
                optimiser.zero_grad(set_to_none=True)
                loss.backward()  # type: ignore[no-untyped-call]
            value, stop = ranks.sum_gradients(parameters, loss)
            stop = stop or (minutes is not None and time.monotonic() - started >= 60 * minutes)
            torch.nn.utils.clip_grad_norm_(network.parameters(), opt.clip_norm)
            optimiser.step()
            step += 1
            decay = min(opt.average_decay, (1 + step) / (10 + step))
            with torch.no_grad():
                torch._foreach_lerp_(list(average.values()), list(network.parameters()), 1 - decay)
            running = 0.98 * running + 0.02 * value if running else value
            if step % 50 == 0 or step == opt.steps:
                here_s = time.monotonic() - started
                rows_per_s = round((step - first) * opt.batch_rows / here_s)
                elapsed = round(seconds + here_s, 1)
                record = {"step": step, "loss": round(running, 5), "seconds": elapsed, "rows_per_s": rows_per_s}
                if step % 500 == 0 or step == opt.steps:
                    log.write(json.dumps(record) + "\n")
                    log.flush()
                if progress and ranks.first:
                    progress(step, opt.steps, record)
            if ranks.first and (stop or step % opt.checkpoint_every == 0) and step < opt.steps:
                write_checkpoint(out, job.identity, state, step, seconds + time.monotonic() - started)
            if stop and step < opt.steps:
                raise Stopped(step)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            parameter.copy_(average[name])
    if ranks.first:
        write_checkpoint(out, job.identity, state, step, seconds + time.monotonic() - started)
    if stop:
        raise Stopped(step)
    network.cpu().eval()
    return network, {
        "steps": step,
        "train_rows": len(job.index),
        "train_seconds": round(seconds + time.monotonic() - started, 3),
    }


def _begin(
    out: Path, identity: dict[str, str], state: State, start: Callable[[LatencyNetwork], None] | None, ranks: Ranks
) -> tuple[int, float]:
    """Set every rank to the first rank's checkpoint or start; returns its steps and seconds."""

    def begin() -> tuple[int, float, dict[str, torch.Tensor] | None]:
        out.mkdir(parents=True, exist_ok=True)
        stored = read_checkpoint(out, identity)
        if stored is not None:
            return stored
        if start is not None:
            start(state.network)
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Train a prepared job for some minutes; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m cdmpp.train.loop", description=main.__doc__)
    parser.add_argument("folder", metavar="DIR", type=Path, help="written by cdmpp train --prepare DIR")
    parser.add_argument(
        "--minutes", type=float, help="stop with a checkpoint after this time; default: train to the end"
    )
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint in DIR, if there is one")
    parser.add_argument("--on", choices=("cpu", "cuda"), help="default: cuda where torch has it")
    options = parser.parse_args(arguments)
    folder: Path = options.folder
    try:
        if options.minutes is not None and not options.minutes > 0:
            raise DataError(f"--minutes {options.minutes} is no time", hint="for example --minutes 9")
        if (folder / CHECKPOINT).exists() and not options.resume:
            raise DataError(f"{folder} has a checkpoint", hint="continue it with --resume, or remove it")
        _train_prepared(folder, options.minutes, device_of(options.on))
    except CdmppError as error:
        print(f"error: {error}", *([f"hint: {error.hint}"] if error.hint else []), sep="\n", file=sys.stderr)
        return 1
    return 0


def device_of(wanted: str | None) -> str:
    """The device of a training: the wanted one, else CUDA where torch has it."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise DataError("torch finds no CUDA device", hint="train with --on cpu, or install torch for CUDA")
    return wanted or ("cuda" if torch.cuda.is_available() else "cpu")


def _train_prepared(folder: Path, minutes: float | None, on: str) -> None:
    job = TrainingJob.read(folder)

    def report(step: int, steps: int, metrics: dict[str, float]) -> None:
        if step % 500 == 0 or step == steps:
            speed = f"{metrics['rows_per_s']:,} rows/s"
            print(f"step {step:,} of {steps:,}, loss {metrics['loss']:.4f}, {speed}", flush=True)

    def start(network: LatencyNetwork) -> None:
        network.load_state_dict(load_file(str(folder / START)))

    try:
        _, summary = run_steps(job, folder, start=start, progress=report, on=on, minutes=minutes)
        print(f"finished after step {summary['steps']:,}: cdmpp train --finish DIR makes the model")
    except Stopped as stopped:
        print(f"stopped after step {stopped.step:,} of {job.optimiser.steps:,}: continue with --resume")
    write_weights(folder, job.identity)


if __name__ == "__main__":
    sys.exit(main())
