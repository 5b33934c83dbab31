"""Plot of a precision plan: error against time of all plans, and the types along the network."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cdmpp.plan.precision.schema import PrecisionPlan, PrecisionRequest

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = {"int8": "#ff725c", "float16": "#efb118", "bfloat16": "#d9a441", "float32": "#4269d0"}
#: Operators up to which their names are written.
_MAX_NAMES = 30


def draw(request: PrecisionRequest, plan: PrecisionPlan) -> Figure:
    """Left: the plan and its baselines. Right: a row for each device, a column for each operator."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1, 1.5])
    _draw_plans(left, plan)
    _draw_types(right, plan)
    return figure


def _draw_plans(axes: Axes, plan: PrecisionPlan) -> None:
    drawn: set[tuple[float, float]] = set()
    for baseline in plan.baseline_plans:
        point = (1e3 * baseline.iteration_s, baseline.sensitivity)
        if point in drawn:
            continue
        drawn.add(point)
        axes.plot(*point, "o", color="#9498a0", fillstyle="full" if baseline.feasible else "none")
        name = baseline.name.replace("_", " ")
        axes.annotate(name, point, xytext=(4, 4), textcoords="offset points", fontsize=8)
    axes.margins(x=0.25, y=0.15)  # room for the names
    axes.plot(1e3 * plan.iteration_s, plan.sensitivity, "*", markersize=13, color="#3ca951", label="plan")
    axes.axvline(1e3 * plan.iteration_limit_s, color="#ff725c", linewidth=1, label="time limit")
    axes.axhline(plan.lower_bound, color="#6cc5b0", linewidth=1, linestyle="--", label="lower bound")
    axes.set_xlabel("iteration (ms)")
    axes.set_ylabel("sum of sensitivities")
    axes.set_title("hollow: breaks a limit", fontsize=9)
    axes.legend(frameon=False, fontsize=8)


def _draw_types(axes: Axes, plan: PrecisionPlan) -> None:
    from matplotlib.patches import Patch

    names = list(plan.devices[0].dtypes)
    for row, device in enumerate(plan.devices):
        colours = [_COLOURS[device.dtypes[name]] for name in names]
        axes.bar(range(len(names)), [0.8] * len(names), bottom=row - 0.4, width=0.94, color=colours)
    used = [dtype for dtype in _COLOURS if any(dtype in device.dtypes.values() for device in plan.devices)]
    axes.set_yticks(range(len(plan.devices)), [device.name for device in plan.devices])
    labels = names if len(names) <= _MAX_NAMES else []
    axes.set_xticks(range(len(labels)), labels, rotation=90, fontsize=7)
    axes.set_xlabel("operator, in the order of computation")
    axes.legend(
        handles=[Patch(color=_COLOURS[dtype], label=dtype) for dtype in used],
        frameon=False,
        ncols=len(used),
        loc="upper center",
        bbox_to_anchor=(0.5, 1.15),
        fontsize=8,
    )
