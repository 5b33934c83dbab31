"""The answer about a split: its stages, its baselines, and why the slowest stage is slow."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from cdmpp.compose.budget import SearchControl
from cdmpp.compose.pricing import Cost, Part
from cdmpp.emulator.emulate import Emulator
from cdmpp.planning.split.search import Found, Goal, split
from cdmpp.planning.split.stages import Split, equal_count, greedy, stage_costs
from cdmpp.planning.split.table import Layer, LayerTable, Rank
from cdmpp.units import format_latency


def report(
    layers: Sequence[Layer],
    ranks: Sequence[Rank],
    devices: Sequence[str],
    parts: Sequence[Sequence[Cost]],
    micro_batches: int,
    goal: Goal,
    any_order: bool,
    watch: SearchControl,
    max_steps: int | None,
) -> dict[str, Any]:
    """Split and explain; JSON values, as in :class:`cdmpp.planning.split.schema.SplitAnswer`.

    Parameters
    ----------
    devices : sequence of str, length kinds
        What the kinds of devices are called.
    parts : sequence, length layers, of sequence of Cost, length kinds
        What the layers' costs are made of.

    Raises
    ------
    InfeasibleError
    """
    table = LayerTable(layers, micro_batches)
    emulator = Emulator()
    answer = partial(_answer, goal, ranks, devices, parts)
    found = split(
        table,
        ranks,
        goal,
        any_order=any_order,
        watch=watch,
        max_steps=max_steps,
        emulator=emulator,
        # Called while the search goes on, and an emulator is for one at a time.
        answer=lambda so_far: answer(so_far, Emulator()),
    )
    return answer(found, emulator)


def _answer(
    goal: Goal,
    ranks: Sequence[Rank],
    devices: Sequence[str],
    parts: Sequence[Sequence[Cost]],
    found: Found,
    emulator: Emulator,
) -> dict[str, Any]:
    one, table = found.split, found.split.table
    layers = table.layers
    hits, misses = emulator.hits, emulator.misses
    step = one.step(emulator)

    def value_s(other: Split) -> float:
        return other.slowest_s if goal == "slowest" else other.step(emulator).makespan_s

    by_hand = {"equal_count": equal_count(table, ranks), "greedy": greedy(table, ranks)}
    too_large = [name for name, other in by_hand.items() if not other.fits()]
    forward, backward = stage_costs(one)
    divisible_s = sum(min(sums) for sums in zip(*_both(layers), strict=True)) / len(ranks)
    explanation = explain(one, devices, parts)
    if too_large:
        explanation.append(f"{' and '.join(too_large)} would not fit into the memory")
    return {
        "goal": goal,
        "value_s": found.value_s,
        "lower_bound_s": found.bound_s,
        "gap": found.value_s / found.bound_s - 1.0 if found.bound_s > 0 else 0.0,
        "divisible_bound_s": divisible_s,
        "stages": [
            {
                "stage": s,
                "rank": one.order[s],
                "device": None if devices[rank.kind] == "any device" else devices[rank.kind],
                "first_layer": first,
                "last_layer": last - 1,
                "layers": [layers[first].name, layers[last - 1].name],
                "forward_s": forward[s],
                "backward_s": backward[s],
                "peak_bytes": one.bytes_held[s],
            }
            for s, (rank, first, last) in enumerate(one.runs())
        ],
        "boundaries": list(one.begin[1:-1]),
        "slowest_s": one.slowest_s,
        "step_s": step.makespan_s,
        "bubble": step.bubble,
        "fwd_costs": {str(s): seconds for s, seconds in forward.items()},
        "bwd_costs": {str(s): seconds for s, seconds in backward.items()},
        "baselines": {name: value_s(other) for name, other in by_hand.items()},
        "explanation": explanation,
        "steps": found.steps,
        "cache": {"hits": hits, "misses": misses},
    }


def _both(layers: Sequence[Layer]) -> list[list[float]]:
    """For each kind, what each layer takes there and back."""
    kinds = range(len(layers[0].forward_s))
    return [[layer.forward_s[k] + layer.backward_s[k] for layer in layers] for k in kinds]


def explain(one: Split, devices: Sequence[str], parts: Sequence[Sequence[Cost]]) -> list[str]:
    """Which stage sets the pace, with which programs, and what its neighbours would make of its layers."""
    times = one.stage_s
    slow = max(range(len(times)), key=times.__getitem__)
    rank, (first, last) = one.ranks[slow], one.begin[slow : slow + 2]
    mean = sum(times) / len(times)
    share = times[slow] / mean - 1.0 if mean > 0 else 0.0
    said = [
        f"stage {slow} (layers {first} to {last - 1} on {devices[rank.kind]}) is the longest: "
        f"{format_latency(times[slow])} there and back, {100 * share:.1f} % above the mean"
    ]
    merged: dict[str, Part] = {}
    for layer in range(first, last):
        for part in parts[layer][rank.kind].parts:
            known = merged.get(part.name, Part(part.name, 0, 0.0))
            merged[part.name] = Part(part.name, known.count + part.count, known.latency_s + part.latency_s)
    if merged:
        said.append(f"stage {slow} is long because of " + Cost(0, 0, 0, tuple(merged.values())).largest(3))
    names = [one.table.layers[first].name, one.table.layers[last - 1].name]
    layer_s = [one.table.time_s(rank.kind, at, at + 1) for at in range(first, last)]
    longest = max(range(len(layer_s)), key=layer_s.__getitem__)
    said.append(
        f"it goes from {names[0]} to {names[1]}; its longest layer is "
        f"{one.table.layers[first + longest].name} with {format_latency(layer_s[longest])}"
    )
    for other, at, gone in ((slow - 1, first, "first"), (slow + 1, last - 1, "last")):
        if 0 <= other < len(times) and last - first > 1:
            moved_s = times[other] + one.table.time_s(one.ranks[other].kind, at, at + 1)
            said.append(f"with its {gone} layer stage {other} would take {format_latency(moved_s)}")
    return said
