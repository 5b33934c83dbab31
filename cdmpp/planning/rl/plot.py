"""An RL plan as a picture: the lengths with their split, and the sizes by time and price."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

from cdmpp.planning.rl.schema import RlRequest

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_TAIL, _REGULAR, _CHOSEN = "#efb118", "#4269d0", "#d0342c"


def draw(request: RlRequest, answer: dict[str, Any]) -> Figure:
    """Left the length histogram, those taken for long in another colour; right the sizes that none beats."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    _histogram(left, request, answer)
    _front(right, request, answer)
    return figure


def _histogram(axes: Axes, request: RlRequest, answer: dict[str, Any]) -> None:
    border = f"the longest {100 * request.ranker.share:.0f} % begin"
    lengths, split = answer["lengths"], answer["tail_split"]
    shown, steps = lengths["histogram"], max(answer["draws"], 1)
    edges = shown["edges"]
    widths = [high - low for low, high in pairwise(edges)]
    below = [count / steps for count in shown["regular"]]
    above = [count / steps for count in shown["tail"]]
    names = ["regular", "taken for long"]
    if split["used"]:
        names = [
            f"{name}: {split[key]['instances']} instances of batch {split[key]['batch']}"
            for name, key in zip(names, ("regular", "tail"), strict=True)
        ]
    axes.bar(edges[:-1], below, widths, align="edge", color=_REGULAR, label=names[0])
    axes.bar(edges[:-1], above, widths, align="edge", bottom=below, color=_TAIL, label=names[1])
    axes.axvline(lengths["tail_border"], color="black", linestyle="--", linewidth=1, label=border)
    axes.set_xscale("log")
    # Room for the legend above the bars.
    axes.set_ylim(0, 1.4 * max([1e-9, *(a + b for a, b in zip(below, above, strict=True))]))
    axes.set(xlabel="response length (tokens)", ylabel="samples per step", title="Lengths and the tail split")
    axes.legend(fontsize=8)


def _front(axes: Axes, request: RlRequest, answer: dict[str, Any]) -> None:
    priced = any(pool.price_per_hour for pool in request.pools)
    points = answer["pareto"]

    def height(one: dict[str, Any]) -> float:
        return float(
            one["price"] if priced else one["generation_units"] + (0 if one["shared"] else one["training_units"])
        )

    axes.plot(
        [one["step_s"] for one in points],
        [height(one) for one in points],
        "o-",
        color=_REGULAR,
        markersize=4,
        label="sizes that none beats, without migration",
    )
    stage, training = answer["generation"], answer["training"]
    units = stage["instances"] + (0 if training is None or training["shared"] else training["units"])
    axes.plot(
        [answer["step_s"]],
        [answer["price_per_step"] if priced else units],
        "*",
        color=_CHOSEN,
        markersize=13,
        label="the plan",
    )
    axes.axvline(answer["lower_bound_s"], color="black", linestyle=":", linewidth=1, label="lower bound of time")
    axes.set(xlabel="simulated step (s)", ylabel="price of a step" if priced else "units", title="Time and price")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
