"""An application's plan in the terminal."""

from __future__ import annotations

from typing import Any

from cdmpp.planning.application.schema import ApplicationRequest
from cdmpp.units import format_latency


def show(request: ApplicationRequest, answer: dict[str, Any]) -> None:
    """Print the policy and its mean latency beside the baselines."""
    print(
        f"{answer['policy']}: mean latency {format_latency(answer['mean_latency_s'])} of "
        f"{len(request.arrivals_s)} requests, {100 * answer['gap']:.1f} % above the bound"
    )
    for name, seconds in answer["baselines"].items():
        print(f"  {name:16} {format_latency(seconds)}")
    for device, share in answer["busy"].items():
        print(f"  {device:16} works {100 * share:.0f} % of {format_latency(answer['makespan_s'])}")
    print("\n".join(answer["explanation"]))
