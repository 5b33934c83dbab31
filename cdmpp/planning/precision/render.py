"""A precision plan in the terminal."""

from __future__ import annotations

from typing import Any

from cdmpp.planning.precision.schema import PrecisionRequest
from cdmpp.units import format_latency, format_si

_MOST_ROWS = 40


def show(request: PrecisionRequest, answer: dict[str, Any]) -> None:
    """Print the types by operator and device, and the plan beside its baselines."""
    devices = answer["devices"]
    names = list(devices[0]["dtypes"])
    width = max(len("operator"), *(len(name) for name in names[:_MOST_ROWS]))
    columns = [max(len(device["name"]), 8) for device in devices]
    head = "  ".join(device["name"].ljust(n) for device, n in zip(devices, columns, strict=True))
    print(f"{'operator'.ljust(width)}  {head}".rstrip())
    for name in names[:_MOST_ROWS]:
        cells = "  ".join(device["dtypes"][name].ljust(n) for device, n in zip(devices, columns, strict=True))
        print(f"{name.ljust(width)}  {cells}".rstrip())
    if len(names) > _MOST_ROWS:
        print(f"... and {len(names) - _MOST_ROWS} more (--json has all)")
    print()
    for device in devices:
        limit = device["memory_limit_bytes"]
        of = "" if limit is None else f" of {format_si(limit, 'B')}"
        print(
            f"{device['name']}: {format_latency(device['iteration_s'])} an iteration, "
            f"{format_si(device['memory_bytes'], 'B')}{of}, casts {device['cast_source']}"
        )
    print(
        f"iteration {format_latency(answer['iteration_s'])} "
        f"({format_latency(answer['iteration_lower_s'])} to {format_latency(answer['iteration_upper_s'])}), "
        f"limit {format_latency(answer['iteration_limit_s'])}"
    )
    print(
        f"sensitivity {answer['sensitivity']:.6g}, bound {answer['lower_bound']:.6g}, gap {100 * answer['gap']:.2f} %"
    )
    for plan in answer["baseline_plans"]:
        note = "" if plan["feasible"] else "  breaks a limit"
        print(f"  {plan['name']:13} {plan['sensitivity']:12.6g}  {format_latency(plan['iteration_s']):>8}{note}")
    print("\n".join(answer["explanation"]))
