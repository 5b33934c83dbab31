"""docs/tuning.md and its figure from the result file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report.markdown import fill, table

NAMES = {
    "random": "random",
    "xgboost": "TVM's XGBModel",
    "frozen": "cdmpp, frozen",
    "fine-tuned": "cdmpp, fine-tuned",
}
COLOURS = {"random": "0.6", "xgboost": "#e0a458", "frozen": "#1f6f8b", "fine-tuned": "#7a1f5c"}


def overview(result: Mapping[str, Any]) -> str:
    """Ratios of the best latencies to those of TVM's model in the end, geometric means."""
    summary = result["summary"]
    if not summary:
        return "*No search was finished by every method.*"
    counts = list(next(iter(summary.values())))
    rows = [[NAMES[m], *(f"{each[n]:.3f}" for n in counts)] for m, each in summary.items()]
    return table([f"best latency / {result['against']}", *(f"{n} trials" for n in counts)], rows)


def best(result: Mapping[str, Any]) -> str:
    """Best latencies by task."""
    rows = []
    for each in result["tasks"]:
        for m, found in each["best_s"].items():
            name = each["task"] if m == result["methods"][0] else ""
            rows.append([name, NAMES[m], *(f"{1e6 * s:.1f}" for s in found.values())])
    counts = list(result["tasks"][0]["best_s"][result["methods"][0]]) if result["tasks"] else []
    return table(["task", "cost model", *(f"{n} trials" for n in counts)], rows, left=2)


def rounds(result: Mapping[str, Any]) -> str:
    """Seconds of a round."""
    rows = [
        [
            NAMES[m], f"{r['candidates']:.0f}", f"{r['predict_s']:.2f}", f"{r['update_s']:.2f}",
            f"**{r['cost_model_s']:.2f}**", f"**{r['search_s']:.2f}**", f"{r['measuring_s']:.2f}",
        ]
        for m, r in result["per_round"].items()
    ]  # fmt: skip
    header = ["seconds a round", "candidates", "predict", "update", "cost model", "search", "build and time"]
    return table(header, rows)


def reached(result: Mapping[str, Any]) -> str:
    """Searches that reached what TVM's model had in the end."""
    rows = []
    for m, found in result["reached"].items():
        after = sorted(found["after"])
        middle = f"{after[len(after) // 2]}" if after else "-"
        within = sum(a <= 32 for a in after)
        rows.append([NAMES[m], f"{found['reached']} of {found['searches']}", f"{within}", middle])
    return table([f"reached {result['against']}", "searches", "within 32 trials", "median trials"], rows)


def settings(result: Mapping[str, Any]) -> str:
    """What was run."""
    seeds = sorted({seed for each in result["tasks"] for seed in each["seeds"]})
    done, asked = result.get("searches", 0), result["asked"]
    missing = "" if done == asked else f" of {asked} that were asked for: those whose rivals ended, too"
    return (
        f"`{result['command']}`: {done} searches{missing}, {len(result['tasks'])} tasks, seeds "
        f"{', '.join(map(str, seeds))}, {result['programs']:,} distinct programs measured on "
        f"`{result['device']}` (target `{result['target']}`), model `{result['model_id']}`; "
        f"{result['trials_per_round']} trials a round, population {result['population']}, "
        f"{result['generations']} generations, one thread."
    )


def document(result: Mapping[str, Any], text: str) -> str:
    """The page with its generated parts anew."""
    parts = {"settings": settings, "overview": overview, "reached": reached, "rounds": rounds, "best": best}
    return fill(text, {name: make(result) for name, make in parts.items()})


def render(result: Mapping[str, Any], folder: Path) -> None:
    """Write the page and the figure."""
    page = folder / "tuning.md"
    page.write_text(document(result, page.read_text(encoding="utf-8")), encoding="utf-8")
    draw(result, folder / "tuning.png")


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Curves: best latency against trials and against wall time for each task, and the ratio over all."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = [each["task"] for each in result["tasks"]]
    columns = max(len(names), 1)
    figure, axes = plt.subplots(
        2, columns + 1, figsize=(3.1 * (columns + 1), 6.4), constrained_layout=True, squeeze=False
    )
    for column, name in enumerate(names):
        for m in result["methods"]:
            curves = [c for c in result["curves"] if c["task"] == name and c["method"] == m]
            for i, curve in enumerate(curves):
                style: dict[str, Any] = {"color": COLOURS[m], "linewidth": 1.3, "alpha": 0.8}
                style |= {"label": NAMES[m]} if i == 0 else {}
                best_us = [None if b is None else 1e6 * b for b in curve["best_s"]]
                axes[0, column].plot(range(1, len(best_us) + 1), best_us, **style)
                clock, best_at = zip(
                    *((t, 1e6 * b) for t, b in curve["time_s"] if b is not None), strict=True
                )
                axes[1, column].step(clock, best_at, where="post", **style)
        axes[0, column].set(title=name, xlabel="measured trials", xscale="log", yscale="log")
        axes[1, column].set(xlabel="wall time (s)", yscale="log")
        _few_ticks(axes[0, column])
        _few_ticks(axes[1, column])
    axes[0, 0].set_ylabel("best latency (µs)")
    axes[1, 0].set_ylabel("best latency (µs)")
    _ratios(result, axes[0, columns])
    axes[1, columns].set_axis_off()
    handles, labels = axes[0, 0].get_legend_handles_labels()
    axes[1, columns].legend(handles, labels, loc="center", frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _ratios(result: Mapping[str, Any], axis: Any) -> None:
    """Geometric mean over all searches, trial by trial."""
    goals = {(c["task"], c["seed"]): c["best_s"][-1] for c in result["curves"] if c["method"] == "xgboost"}
    if not goals:
        return
    for m in result["methods"]:
        curves = [c for c in result["curves"] if c["method"] == m]
        points = []
        for n in range(result["trials"]):
            at = [(c["best_s"][min(n, len(c["best_s"]) - 1)], goals[c["task"], c["seed"]]) for c in curves]
            if all(b is not None for b, _ in at):
                points.append((n + 1, _geometric([b / goal for b, goal in at])))
        axis.plot(*zip(*points, strict=True), color=COLOURS[m], linewidth=1.8)
    axis.axhline(1.0, color="0.3", linewidth=0.8)
    axis.set(title=f"/ {result['against']}", xlabel="measured trials", xscale="log", ylim=(None, 2.5))


def _few_ticks(axis: Any) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    axis.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())


def _geometric(values: Sequence[float]) -> float:
    from benchmarks.tuning.results import geometric

    return geometric(values)
