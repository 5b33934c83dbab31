"""Forward and training rates of the network beside the reference network, on the same batches in one run.

``python -m benchmarks.network``: five leaves a program; the two networks take turns, the median counts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.reference_network import DEVICE_FEATURES, FEATURES, PARAMETERS_AT_5, ReferenceNetwork
from cdmpp.features.schema import WIDTH
from cdmpp.nn.inputs import DEVICE_LOGS
from cdmpp.nn.losses import pinball_loss, relative_error_loss
from cdmpp.nn.network import INPUT_WIDTH, LatencyNetwork, parameter_count
from cdmpp.training.config import load_config

LEAVES = 5


def _rate(rows: int, first: Callable[[], None], second: Callable[[], None], repeats: int) -> tuple[float, float]:
    """Rows a second of two functions, called in turn; medians."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for function in (first, second):
        function()
    for _ in range(repeats):
        for function, times in zip((first, second), seconds, strict=True):
            start = time.perf_counter()
            function()
            times.append(time.perf_counter() - start)
    return rows / statistics.median(seconds[0]), rows / statistics.median(seconds[1])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=600)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    torch.manual_seed(0)
    rows = options.rows
    ours = LatencyNetwork(load_config("configs/base.toml").network, 32)
    reference = ReferenceNetwork(LEAVES)
    assert abs(parameter_count(reference) / PARAMETERS_AT_5 - 1) < 0.005, parameter_count(reference)
    leaves, positions = torch.randn(rows, LEAVES, WIDTH), torch.arange(LEAVES).expand(rows, LEAVES)
    inputs, logs = torch.randn(rows, INPUT_WIDTH), torch.randn(rows, len(DEVICE_LOGS))
    device, target = torch.zeros(rows, dtype=torch.int64), torch.randn(rows)
    raw, specs = torch.randn(rows, LEAVES, FEATURES), torch.randn(rows, DEVICE_FEATURES)
    our_optimiser = torch.optim.AdamW(ours.parameters())
    reference_optimiser = torch.optim.Adam(reference.parameters(), lr=1.7e-5)

    def our_forward() -> None:
        with torch.inference_mode():
            ours(leaves, positions, None, inputs, logs, device)

    def reference_forward() -> None:
        with torch.inference_mode():
            reference(raw, specs)

    def our_step() -> None:
        point, quantiles = ours(leaves, positions, None, inputs, logs, device)
        our_optimiser.zero_grad(set_to_none=True)
        (relative_error_loss(point, target) + pinball_loss(quantiles, target)).backward()
        torch.nn.utils.clip_grad_norm_(ours.parameters(), 1.0)
        our_optimiser.step()

    def reference_step() -> None:
        out = reference(raw, specs)
        reference_optimiser.zero_grad(set_to_none=True)
        error = out - target
        (1000 * (error**2).mean() + (error / target).abs().mean()).backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 2.0)
        reference_optimiser.step()

    print(f"{rows} programs of {LEAVES} leaves, {torch.get_num_threads()} threads, medians of {options.repeats}\n")
    print("| | cdmpp | reference | ratio | target |\n| --- | ---: | ---: | ---: | ---: |")
    print(f"| parameters | {parameter_count(ours):,} | {parameter_count(reference):,} | | under 3,000,000 |")
    ours.eval(), reference.eval()
    a, b = _rate(rows, our_forward, reference_forward, options.repeats)
    print(f"| forward, programs/s | {a:,.0f} | {b:,.0f} | **{a / b:.1f}** | 15 |")
    ours.train(), reference.train()
    a, b = _rate(rows, our_step, reference_step, options.repeats)
    print(f"| training step, programs/s | {a:,.0f} | {b:,.0f} | **{a / b:.1f}** | 25 |")


if __name__ == "__main__":
    main()
