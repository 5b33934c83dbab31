"""Generated parts and figure of docs/tuning.md, from the result file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.report.markdown import fill, percent, table
from benchmarks.tuning.results import AT, geometric

NAMES = {"random": "random", "xgboost": "TVM's XGBModel", "frozen": "cdmpp, frozen", "fine-tuned": "cdmpp, fine-tuned"}
#: Tasks in a row of the figure.
_ACROSS = 3
COLOURS = {"random": "0.6", "xgboost": "#e0a458", "frozen": "#1f6f8b", "fine-tuned": "#7a1f5c"}
#: The two variants of cdmpp nearly coincide: one is dashed.
_STYLES = {"fine-tuned": (0, (4, 2))}


def overview(result: Mapping[str, Any]) -> str:
    """Geometric means of the best latency relative to XGBModel's after all of its trials."""
    summary = result["summary"]
    if not summary:
        return "*No search was finished by every method.*"
    counts = list(next(iter(summary.values())))
    rows = [[NAMES[m], *(f"{ratios[n]:.3f}" for n in counts)] for m, ratios in summary.items()]
    return table([f"best latency relative to {_against(result)}", *(f"{n} trials" for n in counts)], rows)


def _against(result: Mapping[str, Any]) -> str:
    name, _, trials = result["against"].partition(" ")
    return f"{NAMES[name]} {trials}"


def best(result: Mapping[str, Any]) -> str:
    """Best latencies by task."""
    rows = []
    for task in result["tasks"]:
        for m, seconds in task["best_s"].items():
            name = task["task"] if m == result["methods"][0] else ""
            rows.append([name, NAMES[m], *(f"{1e6 * s:.1f}" for s in seconds.values())])
    counts = list(result["tasks"][0]["best_s"][result["methods"][0]]) if result["tasks"] else []
    return table(["task; best latency in µs", "cost model", *(f"{n} trials" for n in counts)], rows, left=2)


def verdict(result: Mapping[str, Any]) -> str:
    """The two goals: trials to reach XGBModel's final result, and the time of a round's search."""
    theirs, lines = result["per_round"]["xgboost"]["search_s"], []
    for m in ("frozen", "fine-tuned"):
        if m not in result["summary"]:
            continue
        ratio, means = result["summary"][m].get("32", float("nan")), mean_ratios(result, m)
        trials = next((n for n, value in means if value <= 1.0), None)
        reached_at = "not reached" if trials is None else f"reached after {trials} trials"
        search_s = result["per_round"][m]["search_s"]
        lines.append(
            f"- {NAMES[m]}: after 32 trials the best latency is {percent(abs(ratio - 1))} "
            f"{'above' if ratio > 1 else 'below'} XGBModel's final one (goal {'missed' if ratio > 1 else 'met'}; "
            f"{reached_at}). The search of a round takes {search_s / theirs:.2f} of XGBModel's time "
            f"(goal {'missed' if search_s > theirs else 'met'})."
        )
    return "\n".join(lines)


def mean_ratios(result: Mapping[str, Any], method: str) -> list[tuple[int, float]]:
    """Pairs of a number of trials and the mean ratio of the best latency to XGBModel's final one, where defined."""
    goals = {(c["task"], c["seed"]): c["best_s"][-1] for c in result["curves"] if c["method"] == "xgboost"}
    curves = [c for c in result["curves"] if c["method"] == method]
    points = []
    for n in range(result["trials"] if goals else 0):
        at = [(c["best_s"][min(n, len(c["best_s"]) - 1)], goals[c["task"], c["seed"]]) for c in curves]
        if all(b is not None for b, _ in at):
            points.append((n + 1, geometric([b / goal for b, goal in at])))
    return points


def rounds(result: Mapping[str, Any]) -> str:
    """Seconds per round of the search."""
    rows = [
        [
            NAMES[m],
            f"{r['candidates']:.0f}",
            f"{r['predict_s']:.2f}",
            f"{r['update_s']:.2f}",
            f"**{r['cost_model_s']:.2f}**",
            f"**{r['search_s']:.2f}**",
            f"{r['measuring_s']:.2f}",
        ]
        for m, r in result["per_round"].items()
    ]
    header = ["seconds per round", "candidates", "predict", "update", "cost model", "search", "build and measure"]
    return table(header, rows)


def reached(result: Mapping[str, Any]) -> str:
    """Searches that reached XGBModel's final result."""
    rows = []
    for m, counts in result["reached"].items():
        after = sorted(counts["after"])
        middle = f"{after[len(after) // 2]}" if after else "-"
        within = sum(a <= 32 for a in after)
        rows.append([NAMES[m], f"{counts['reached']} of {counts['searches']}", f"{within}", middle])
    return table([f"reached {_against(result)}", "searches", "within 32 trials", "median trials"], rows)


def settings(result: Mapping[str, Any]) -> str:
    """Settings of the runs."""
    seeds = sorted({seed for task in result["tasks"] for seed in task["seeds"]})
    done, asked = result.get("searches", 0), result["asked"]
    missing = "" if done == asked else f" of {asked} requested (only those that every method finished)"
    return (
        f"`{result['command']}`: {done} searches{missing}, {len(result['tasks'])} tasks, seeds "
        f"{', '.join(map(str, seeds))}, {result['programs']:,} distinct programs measured on "
        f"`{result['device']}` (target `{result['target']}`), model `{result['model_id']}`; "
        f"{result['trials_per_round']} trials per round, population {result['population']}, "
        f"{result['generations']} generations, one thread."
    )


def document(result: Mapping[str, Any], text: str) -> str:
    """Fill the generated parts of the page."""
    parts = {
        "settings": settings,
        "overview": overview,
        "verdict": verdict,
        "reached": reached,
        "rounds": rounds,
        "best": best,
    }
    return fill(text, {name: make(result) for name, make in parts.items()})


def render(result: Mapping[str, Any], folder: Path) -> None:
    """Write the page and the figure."""
    page = folder / "tuning.md"
    page.write_text(document(result, page.read_text(encoding="utf-8")), encoding="utf-8")
    draw(result, folder / "tuning.png")


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Best latency by measured trials: the ratio over all tasks, and each task with the range over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = [task["task"] for task in result["tasks"]]
    rows = max(1, -(-len(names) // _ACROSS))
    figure = plt.figure(figsize=(4.6 + 3.1 * _ACROSS, 2.9 * rows + 0.5), constrained_layout=True)
    grid = figure.add_gridspec(rows, _ACROSS + 1, width_ratios=[1.5, *[1] * _ACROSS])
    all_tasks = figure.add_subplot(grid[:, 0])
    _ratios(result, all_tasks)
    for i, name in enumerate(names):
        axis = figure.add_subplot(grid[i // _ACROSS, 1 + i % _ACROSS])
        _curves(result, name, axis)
        if i // _ACROSS == rows - 1:
            axis.set_xlabel("measured trials")
    handles, labels = all_tasks.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(handles), frameon=False)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _curves(result: Mapping[str, Any], name: str, axis: Any) -> None:
    """One task: the median over seeds of the best latency so far, and the range over seeds."""
    lowest = 1e6 * min(min(filter(None, c["best_s"])) for c in result["curves"] if c["task"] == name)
    for m in result["methods"]:
        curves = [c["best_s"] for c in result["curves"] if c["task"] == name and c["method"] == m]
        if not curves:
            continue
        # A search without a valid program so far counts as infinitely slow.
        columns = [
            sorted(1e6 * s if s is not None else float("inf") for s in values) for values in zip(*curves, strict=False)
        ]
        trials = range(1, len(columns) + 1)
        axis.fill_between(
            trials, [c[0] for c in columns], [min(c[-1], 1e9) for c in columns], color=COLOURS[m], alpha=0.13, lw=0
        )
        axis.plot(trials, [c[len(c) // 2] for c in columns], color=COLOURS[m], linestyle=_STYLES.get(m, "-"), lw=1.8)
    axis.set(title=f"{name}: best latency (µs)", yscale="log", ylim=(0.93 * lowest, 4 * lowest))
    axis.title.set_fontsize(10)
    _trial_axis(axis)
    _few_ticks(axis)


def _ratios(result: Mapping[str, Any], axis: Any) -> None:
    """Geometric mean over all searches, trial by trial."""
    for m in result["methods"]:
        if points := mean_ratios(result, m):
            style = _STYLES.get(m, "-")
            axis.plot(*zip(*points, strict=True), color=COLOURS[m], linestyle=style, linewidth=2.2, label=NAMES[m])
    axis.axhline(1.0, color="0.3", linewidth=0.8)
    axis.set(
        title=f"all tasks: best latency relative to\n{_against(result)}", xlabel="measured trials", ylim=(0.7, 2.5)
    )
    axis.title.set_fontsize(11)
    _trial_axis(axis)


def _trial_axis(axis: Any) -> None:
    axis.set_xscale("log")
    axis.set_xticks([1, 4, *AT], ["1", "4", *map(str, AT)])
    axis.minorticks_off()


def _few_ticks(axis: Any) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    axis.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())
