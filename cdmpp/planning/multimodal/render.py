"""The plan of a multimodal pipeline in the terminal."""

from __future__ import annotations

from typing import Any

from cdmpp.units import format_latency, format_si


def show(request: Any, answer: dict[str, Any]) -> None:
    """Print the makespan beside its bound and baselines, the cuts, the layout and the reasons."""
    print(
        f"makespan {format_latency(answer['makespan_s'])}, lower bound "
        f"{format_latency(answer['lower_bound_s'])} (gap {100 * answer['gap']:.2f} %), "
        f"bubble {100 * answer['bubble']:.1f} %"
    )
    if answer["interval"] is not None:
        low, high = answer["interval"]["lower_s"], answer["interval"]["upper_s"]
        print(f"with all predictions at their bounds {format_latency(low)} to {format_latency(high)}")
    for name, seconds in answer["baselines"].items():
        print(f"  {name:<16} {format_latency(seconds):>10}  {seconds / answer['makespan_s']:.3f} x")
    for number, plan in enumerate(answer["plans"] or [answer]):
        if answer["plans"]:
            print(f"step {number}: {format_latency(plan['makespan_s'])}, gap {100 * plan['gap']:.2f} %")
        for name, cut in plan["sub_batches"].items():
            if not cut["count"]:
                print(f"  {name:<16}     0 items")
                continue
            print(
                f"  {name:<16} {plan['batch'][name]:>5} items in {cut['count']} sub-micro-batches of up to "
                f"{cut['size']} (the rule's size: {cut['rule_size']}), "
                f"{100 * cut['efficiency']:.0f} % of peak efficiency"
            )
        if any(rank["peak_bytes"] for rank in plan["memory"]):
            for rank in plan["memory"]:
                knobs = ", ".join(
                    f"{name}: {' '.join(found)}" for name, found in rank["knobs"].items() if set(found) != {"keep"}
                )
                print(
                    f"  rank {rank['rank']:<3} peak {format_si(rank['peak_bytes'], 'B'):>9}"
                    + (f"  {knobs}" if knobs else "")
                )
    print("layers by rank:")
    ranks = 1 + max(entry["rank"] for entry in answer["layout"])
    for rank in range(ranks):
        mine = [entry for entry in answer["layout"] if entry["rank"] == rank and entry["layers"]]
        print(
            f"  rank {rank:<3} "
            + "; ".join(
                f"{e['module']}.{e['segment']} {e['first_layer']}-{e['first_layer'] + e['layers'] - 1}" for e in mine
            )
        )
    cache = answer["cache"]
    print(
        f"{answer['steps']:,} orders tried, {100 * cache['hit_rate']:.0f} % of them known already"
        + ("; none is left" if answer["complete"] else "")
    )
    for line in answer["explanation"]:
        print(f"- {line}")
