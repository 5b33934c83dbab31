"""Rate of the network beside CDMPP's published network on the same batches.

``python -m benchmarks.network [--repeats 15] [--threads N]``. Programs of five leaves, all on known devices;
a training step is forward, loss, backward, clipping and the optimiser's update. Weights are random: the
time does not depend on them.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.timing import interleaved, median_ratio
from cdmpp.devices.registry import lookup
from cdmpp.features.encode import encode_shapes
from cdmpp.model.nn.inputs import query_inputs, stack_devices
from cdmpp.model.nn.losses import pinball_loss, relative_error_loss
from cdmpp.model.nn.network import LatencyNetwork, parameter_count
from cdmpp.model.nn.store import ProgramStore
from cdmpp.train.config import TrainConfig, load_config
from cdmpp.train.reference.network import LEAVES, ReferenceNetwork, reference_loss

DEVICES = ("t4", "l4", "a100-pcie-40gb", "h100-sxm5-80gb")
BATCHES = (512, 600)


def batch(rows: int, leaf_width: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Padded 3x3 convolutions in float16: five leaves (pad, initial value, product, bias, rounding)."""
    rng = np.random.default_rng(seed)
    sizes = {
        "n": 2 ** rng.integers(0, 6, rows),
        "c_in": 2 ** rng.integers(4, 9, rows),
        "h": 2 ** rng.integers(3, 8, rows),
        "w": 2 ** rng.integers(3, 8, rows),
        "c_out": 2 ** rng.integers(4, 9, rows),
        "kh": np.full(rows, 3),
        "kw": np.full(rows, 3),
        **dict.fromkeys(("stride_h", "stride_w", "pad_h", "pad_w"), np.ones(rows)),
        **dict.fromkeys(("dil_h", "dil_w", "groups"), np.ones(rows)),
    }
    sizes = {name: values.astype(np.int64) for name, values in sizes.items()}
    store = ProgramStore(rows, leaf_width)
    for members, encoded in encode_shapes("conv2d", "float16", {"direction": "fwd", "bias": True}, sizes):
        assert encoded.leaves.shape[1] == LEAVES
        store.add(members, encoded)
    store.finish()
    device = rng.integers(0, len(DEVICES), rows)
    matrix = stack_devices([lookup(name) for name in DEVICES])[device]
    zeros = np.zeros(rows, dtype=np.int16)
    inputs, logs, _ = query_inputs(store.summary, matrix, zeros, zeros, zeros)
    # Five leaves share the bucket of six; the reference has no padding, so the padding is left out here.
    (bucket,) = store.buckets.values()
    slots = store.slot
    return {
        "leaves": torch.from_numpy(np.ascontiguousarray(bucket.leaves[slots][:, :LEAVES])),
        "positions": torch.from_numpy(np.ascontiguousarray(bucket.positions[slots][:, :LEAVES])),
        "inputs": torch.from_numpy(inputs),
        "logs": torch.from_numpy(logs),
        "device": torch.from_numpy(device + 1),
    }


def forward_of(network: torch.nn.Module, inputs: dict[str, Any]) -> Callable[[], object]:
    """A forward pass without gradients."""

    def run() -> object:
        with torch.inference_mode():
            return network(**inputs)

    return run


def step_of(
    network: torch.nn.Module, optimiser: torch.optim.Optimizer, loss: Callable[[], torch.Tensor], clip: float
) -> Callable[[], object]:
    """A training step."""

    def run() -> object:
        optimiser.zero_grad(set_to_none=True)
        value = loss()
        value.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(network.parameters(), clip)
        return optimiser.step()

    return run


def compare(config: TrainConfig, rows: int, repeats: int) -> list[tuple[str, float, float, float]]:
    """(what, our rows/s, their rows/s, ratio) for forward and training step."""
    torch.manual_seed(0)
    data = batch(rows, config.network.leaf_width)
    ours, theirs = LatencyNetwork(config.network, len(DEVICES)), ReferenceNetwork()
    their_data = {"leaves": torch.randn(rows, LEAVES, 164), "device": torch.rand(rows, 8)}
    our_data: dict[str, Any] = {**data, "mask": None}
    target, their_target = torch.zeros(rows), torch.randn(rows)
    ours.input_mean.copy_(data["inputs"].mean(0))
    ours.input_scale.copy_(1 / data["inputs"].std(0).clamp_min(1e-3))
    opt = config.optimiser
    ours_optimiser = torch.optim.AdamW(ours.parameters(), lr=opt.learning_rate, weight_decay=opt.weight_decay)
    theirs_optimiser = torch.optim.Adam(theirs.parameters(), lr=1.68e-5, weight_decay=1.3e-3)

    def our_loss() -> torch.Tensor:
        point, quantiles = ours(**our_data)
        return relative_error_loss(point, target) + opt.quantile_weight * pinball_loss(quantiles, target)

    def their_loss() -> torch.Tensor:
        return reference_loss(theirs(**their_data), their_target)

    rows_of_table = []
    work = {
        "forward": {"ours": forward_of(ours, our_data), "theirs": forward_of(theirs, their_data)},
        "training step": {
            "ours": step_of(ours, ours_optimiser, our_loss, opt.clip_norm),
            "theirs": step_of(theirs, theirs_optimiser, their_loss, 2.0),
        },
    }
    for what, functions in work.items():
        for network in (ours, theirs):
            network.train(what != "forward")
        seconds = interleaved(functions, repeats)
        rates = [rows / statistics.median(seconds[name]) for name in ("ours", "theirs")]
        rows_of_table.append((what, rates[0], rates[1], median_ratio(seconds["theirs"], seconds["ours"])))
    return rows_of_table


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", default="configs/base.toml")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    config = load_config(options.config)
    size = parameter_count(LatencyNetwork(config.network, len(DEVICES)))
    threads = torch.get_num_threads()
    print(f"{size / 1e6:.2f} M parameters against 13.77 M, {threads} threads, torch {torch.__version__}\n")
    print("| what | batch | programs/s | published network, programs/s | ratio |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for rows in options.batches:
        for what, ours, theirs, ratio in compare(config, rows, options.repeats):
            print(f"| {what} | {rows} | {ours:,.0f} | {theirs:,.0f} | **{ratio:.1f}x** |")


if __name__ == "__main__":
    main()
