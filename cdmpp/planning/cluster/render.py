"""An allocation in the terminal."""

from __future__ import annotations

from typing import Any

from cdmpp.planning.cluster.schema import ClusterRequest
from cdmpp.units import format_latency


def show(request: ClusterRequest, answer: dict[str, Any]) -> None:
    """Print workers and times by job, then the sum beside its baselines."""
    if answer["reclaimed"] is not None:
        back = answer["reclaimed"]
        print(f"give back {', '.join(back['servers'])}: preempts {', '.join(back['preempted']) or 'no job'}")
    width = max(len(job["name"]) for job in answer["jobs"])
    for job in answer["jobs"]:
        left = "waits" if job["remaining_s"] is None else format_latency(job["remaining_s"])
        print(f"{job['name']:{width}}  {job['workers']:4} workers  {left}")
    print(
        f"sum of remaining times {format_latency(answer['total_remaining_s'])}, "
        f"{100 * answer['gap']:.2f} % above the bound"
    )
    for name, seconds in answer["baselines"].items():
        print(f"  {name:14} {format_latency(seconds)}")
    print("\n".join(answer["explanation"]))
