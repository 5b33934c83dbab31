"""A split as a picture: what each stage takes, layer by layer, and what it holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cdmpp.planning.split.schema import SplitRequest

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(request: SplitRequest, answer: dict[str, Any]) -> Figure:
    """Bars of the stages beside the baselines' slowest stage or step; memory beside its limits."""
    from matplotlib.figure import Figure

    stages = answer["stages"]
    held = any(one["peak_bytes"] for one in stages)
    figure = Figure(figsize=(10 if held else 7, 1.8 + 0.32 * len(stages)), layout="constrained")
    panels = figure.subplots(1, 2 if held else 1, squeeze=False, sharey=True)[0]
    rows = range(len(stages))
    forward = [1e3 * one["forward_s"] for one in stages]
    panels[0].barh(rows, forward, color="#4269d0", label="forward")
    panels[0].barh(rows, [1e3 * one["backward_s"] for one in stages], left=forward, color="#3ca951", label="backward")
    if answer["goal"] == "slowest":
        for (name, seconds), style in zip(answer["baselines"].items(), ("--", ":"), strict=False):
            panels[0].axvline(1e3 * seconds, color="#9498a0", linestyle=style, label=f"slowest of {name}")
    panels[0].set_yticks(
        rows, [f"stage {s}: layers {one['first_layer']} to {one['last_layer']}" for s, one in enumerate(stages)]
    )
    panels[0].set_ylim(len(stages) - 0.4, -0.6)
    panels[0].set_xlabel("one micro-batch (ms)")
    panels[0].set_title(f"1F1B step: {1e3 * answer['step_s']:.4g} ms, bubble {100 * answer['bubble']:.1f} %")
    panels[0].legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(0, -0.18), ncols=2)
    if held:
        panels[1].barh(rows, [one["peak_bytes"] / 1e9 for one in stages], color="#9498a0")
        forms = request.rank_forms
        for row, one in zip(rows, stages, strict=True):
            limit = forms[one["rank"]].memory_bytes
            if limit is not None:
                panels[1].plot([limit / 1e9] * 2, [row - 0.4, row + 0.4], color="#ff725c")
        if any(forms[one["rank"]].memory_bytes is not None for one in stages):
            panels[1].set_title("red: the limit", fontsize=9)
        panels[1].set_xlabel("peak memory (GB)")
    return figure
