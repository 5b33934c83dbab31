"""A precision plan as a picture: error against time of all plans, and the types along the network."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cdmpp.planning.precision.schema import PrecisionRequest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = {"int8": "#ff725c", "float16": "#efb118", "bfloat16": "#d9a441", "float32": "#4269d0"}


def draw(request: PrecisionRequest, answer: dict[str, Any]) -> Figure:
    """Left: the plan among its baselines. Right: a bar for each device, a column for each operator."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(11, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1, 1.5])
    seen: set[tuple[float, float]] = set()
    for plan in answer["baseline_plans"]:
        if (plan["iteration_s"], plan["sensitivity"]) in seen:
            continue
        seen.add((plan["iteration_s"], plan["sensitivity"]))
        left.plot(
            1e3 * plan["iteration_s"],
            plan["sensitivity"],
            "o",
            color="#9498a0",
            fillstyle="full" if plan["feasible"] else "none",
        )
        left.annotate(
            plan["name"],
            (1e3 * plan["iteration_s"], plan["sensitivity"]),
            xytext=(4, 4),
            textcoords="offset points",
            fontsize=8,
        )
    left.margins(x=0.25, y=0.15)  # room for the names
    left.plot(1e3 * answer["iteration_s"], answer["sensitivity"], "*", markersize=13, color="#3ca951", label="plan")
    left.axvline(1e3 * answer["iteration_limit_s"], color="#ff725c", linewidth=1, label="time limit")
    left.axhline(answer["lower_bound"], color="#6cc5b0", linewidth=1, linestyle="--", label="lower bound")
    left.set_xlabel("iteration (ms)")
    left.set_ylabel("sum of sensitivities")
    left.set_title("hollow: breaks a limit", fontsize=9)
    left.legend(frameon=False, fontsize=8)
    devices = answer["devices"]
    names = list(devices[0]["dtypes"])
    for row, device in enumerate(devices):
        kinds = [device["dtypes"][name] for name in names]
        right.bar(
            range(len(names)),
            [0.8] * len(names),
            bottom=row - 0.4,
            width=0.94,
            color=[_COLOURS[kind] for kind in kinds],
        )
    used = [kind for kind in _COLOURS if any(kind in device["dtypes"].values() for device in devices)]
    right.set_yticks(range(len(devices)), [device["name"] for device in devices])
    few = len(names) <= 30
    right.set_xticks(range(len(names)) if few else [], names if few else [], rotation=90, fontsize=7)
    right.set_xlabel("operator, in the order of computation")
    right.legend(
        handles=[Patch(color=_COLOURS[kind], label=kind) for kind in used],
        frameon=False,
        ncols=len(used),
        loc="upper center",
        bbox_to_anchor=(0.5, 1.15),
        fontsize=8,
    )
    return figure
