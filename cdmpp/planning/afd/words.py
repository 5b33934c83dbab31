"""AFD sizing in the terminal."""

from __future__ import annotations

from typing import Any

from cdmpp.planning.afd.wire import AfdRequest
from cdmpp.units import format_latency


def show(request: AfdRequest, answer: dict[str, Any]) -> None:
    """Print the choice beside its baselines."""
    print(
        f"{answer['attention_instances']} attention and {answer['ffn_instances']} FFN instances, "
        f"micro-batches of {answer['micro_batch']}: {answer['tokens_per_s']:,.0f} tokens/s, "
        f"{format_latency(answer['tpot_s'])} between tokens (goal {format_latency(request.tpot_s)})"
    )
    for name, seconds in answer["stage_s"].items():
        print(f"  {name:14} {format_latency(seconds)}")
    print(
        f"price x seconds a token: {answer['price_s_per_token']:.4g}, "
        f"{100 * answer['gap']:.1f} % above the bound"
    )
    for name, value in answer["baselines"].items():
        print(f"  {name:14} {value:.4g}")
    print("\n".join(answer["explanation"]))
