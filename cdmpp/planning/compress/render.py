"""A compression plan in the terminal."""

from __future__ import annotations

from typing import Any

from cdmpp.planning.compress.schema import CompressRequest
from cdmpp.units import format_latency


def show(request: CompressRequest, answer: dict[str, Any]) -> None:
    """Print what happens to each tensor, and the iteration beside its baselines."""
    width = max(len(tensor["name"]) for tensor in answer["tensors"])
    for tensor in answer["tensors"]:
        how = "as it is" if tensor["compressor"] is None else f"{tensor['compressor']} on the {tensor['place']}"
        note = "  hidden" if tensor["hidden"] else ""
        print(f"{tensor['name'].ljust(width)}  {format_latency(tensor['network_s']):>8}  {how}{note}")
    print(
        f"iteration {format_latency(answer['iteration_s'])}, "
        f"bound {format_latency(answer['lower_bound_s'])}, gap {100 * answer['gap']:.2f} %"
    )
    for name, seconds in answer["baselines"].items():
        print(f"  {name:16} {format_latency(seconds):>8}")
    print("\n".join(answer["explanation"]))
