"""A split in the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from cdmpp.planning.split.schema import SplitRequest
from cdmpp.units import format_latency, format_si


def show(request: SplitRequest, answer: dict[str, Any]) -> None:
    """Print the stages and the baselines."""
    what = "slowest stage" if answer["goal"] == "slowest" else "1F1B step"
    print(
        f"{what}: {format_latency(answer['value_s'])}, {100 * answer['gap']:.1f} % above the "
        f"lower bound; a step takes {format_latency(answer['step_s'])}, "
        f"{100 * answer['bubble']:.1f} % bubble"
    )
    stages = Table("stage", "rank", "device", "layers", "forward", "backward", "peak memory", box=None)
    for one in answer["stages"]:
        stages.add_row(
            str(one["stage"]),
            str(one["rank"]),
            one["device"] or "",
            f"{one['first_layer']} to {one['last_layer']}",
            format_latency(one["forward_s"]),
            format_latency(one["backward_s"]),
            format_si(one["peak_bytes"], "B"),
        )
    Console().print(stages)
    for name, seconds in answer["baselines"].items():
        print(f"{name}: {format_latency(seconds)}")
    print("\n".join(answer["explanation"]))
