"""Fused pipelines in the terminal."""

from __future__ import annotations

from typing import Any

from cdmpp.planning.fused.schema import FusedRequest
from cdmpp.units import format_latency


def show(request: FusedRequest, answer: dict[str, Any]) -> None:
    """Print the makespan beside its baselines, and each rank's share of work and memory."""
    span = answer["makespan_s"]
    print(
        f"{format_latency(span)}, {100 * answer['gap']:.2f} % above the lower bound "
        f"({format_latency(answer['lower_bound_s'])})"
    )
    for name, seconds in answer["baselines"].items():
        print(f"  {name:12} {format_latency(seconds)}  ({seconds / span:.2f}x)")
    if answer["interval"] is not None:
        low, high = answer["interval"]["lower_s"], answer["interval"]["upper_s"]
        print(f"  at the costs' bounds {format_latency(low)} to {format_latency(high)}")
    print(f"most activations on a rank {answer['peak_activations']:g}")
    print("rank   busy  activations  first passes")
    for rank, (row, peak) in enumerate(zip(answer["order"], answer["rank_peak_activations"], strict=True)):
        busy = sum(step["end_s"] - step["start_s"] for step in row) / span
        first = " ".join(f"{step['pass']}{step['micro_batch']}.{step['model']}" for step in row[:8])
        print(f"{rank:4}  {100 * busy:4.1f}%  {peak:11g}  {first}{' ...' if len(row) > 8 else ''}")
    print("(F0.1: forward pass of micro-batch 0 of model 1)")
    print("\n".join(answer["explanation"]))
