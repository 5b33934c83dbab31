"""A step in the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from cdmpp.emulator.schema import SimulateRequest
from cdmpp.units import format_latency, format_si


def show(request: SimulateRequest, answer: dict[str, Any]) -> None:
    """Print the step, its ranks and its baselines."""
    print(
        f"{answer['schedule']}: {format_latency(answer['makespan_s'])} a step, "
        f"{100 * answer['bubble']:.1f} % bubble, {100 * answer['gap']:.1f} % above the lower bound"
        + (f", up to {format_si(answer['peak_bytes'], 'B')} on a rank" if answer["peak_bytes"] else "")
    )
    if request.replicas or request.gradient_sync_s:
        print(f"with {len(request.replicas)} further copies: {format_latency(answer['step_s'])}")
    if answer["interval"]:
        bounds = [format_latency(answer["interval"][which]) for which in ("lower_s", "upper_s")]
        print(f"with all predictions at their bounds: {bounds[0]} to {bounds[1]}")
    ranks = Table("rank", "stages", "busy", "bubble", "peak memory", box=None, pad_edge=False)
    for one in answer["ranks"]:
        ranks.add_row(
            str(one["rank"]),
            " ".join(map(str, one["stages"])),
            format_latency(one["busy_s"]),
            f"{100 * one['bubble']:.1f} %",
            format_si(one["peak_bytes"], "B"),
        )
    others = Table("instead", "step", "peak memory", box=None, pad_edge=False)
    for name, seconds in sorted(answer["baselines"].items(), key=lambda item: item[1]):
        peak = answer["baseline_peak_bytes"].get(name)
        others.add_row(name, format_latency(seconds), "" if peak is None else format_si(peak, "B"))
    console = Console()
    console.print(ranks)
    console.print(others)
    print("\n".join(answer["explanation"]))
