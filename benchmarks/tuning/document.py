"""Generated parts and figure of docs/tuning.md, from the result file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.report.markdown import fill, number, percent, table
from benchmarks.tuning.results import AGAINST, AT, GOAL_TIME, GOAL_TRIALS, after, geometric, ratios

NAMES = {
    "random": "random",
    "xgboost": "TVM's XGBModel",
    "frozen": "cdmpp, frozen",
    "fine-tuned": "cdmpp, fine-tuned",
    "exploring": "cdmpp, exploring",
}
#: Trials that the figure marks.
_TICKS = (1, 4, 8, 16, 32, 64, 128)
#: Tasks in a row of the figure.
_ACROSS = 3
COLOURS = {"random": "0.6", "xgboost": "#e0a458", "frozen": "#1f6f8b", "fine-tuned": "#7a1f5c", "exploring": "#4f8a3c"}
#: The two variants of cdmpp nearly coincide: one is dashed.
_STYLES = {"fine-tuned": (0, (4, 2))}


def overview(result: Mapping[str, Any]) -> str:
    """Geometric means of the best latency relative to XGBModel's after all of its trials."""
    if AGAINST not in result["methods"] or not result["tasks"]:
        return "*No search was finished by every method, XGBModel among them.*"
    means = {m: ratios(result, m) for m in result["methods"]}
    rows = [[NAMES[m], *(number(means[m].get(n)) for n in _counts(result))] for m in means]
    return table([f"best latency relative to {_against(result)}", *_headers(result)], rows)


def _counts(result: Mapping[str, Any]) -> list[int]:
    return [n for n in AT if n <= result["trials"]]


def _headers(result: Mapping[str, Any]) -> list[str]:
    return [f"{n} trials" for n in _counts(result)]


def _against(result: Mapping[str, Any]) -> str:
    name, _, trials = result["against"].partition(" ")
    return f"{NAMES[name]} {trials}"


def best(result: Mapping[str, Any]) -> str:
    """Best latencies by task, geometric means over the seeds."""
    rows = []
    for task in result["tasks"]:
        for m in result["methods"]:
            name = task["task"] if m == result["methods"][0] else ""
            curves = [c for c in result["curves"] if (c["task"], c["method"]) == (task["task"], m)]
            seconds = [[after(c, n) for c in curves] for n in _counts(result)]
            rows.append([name, NAMES[m], *("-" if None in s else f"{1e6 * geometric(s):.1f}" for s in seconds)])
    return table(["task; best latency in µs", "cost model", *_headers(result)], rows, left=2)


def verdict(result: Mapping[str, Any]) -> str:
    """The two goals: trials to reach XGBModel's final result, and the time of a round's search."""
    lines = []
    for m in result["methods"]:
        if m in ("random", AGAINST) or AGAINST not in result["per_round"]:
            continue
        means = ratios(result, m)
        ratio = means.get(GOAL_TRIALS)
        trials = next((n for n, value in means.items() if value <= 1.0), None)
        reached_at = "not reached" if trials is None else f"reached after {trials} trials"
        distance = (
            "is unknown" if ratio is None else f"is {percent(abs(ratio - 1))} {'above' if ratio > 1 else 'below'}"
        )
        share = result["per_round"][m]["search_s"] / result["per_round"][AGAINST]["search_s"]
        lines.append(
            f"- {NAMES[m]}: after {GOAL_TRIALS} trials the best latency {distance} XGBModel's final one "
            f"(goal {_met(ratio is not None and ratio <= 1)}; {reached_at}). The search of a round takes {share:.2f} "
            f"of XGBModel's time (goal {GOAL_TIME:g}: {_met(share <= GOAL_TIME)})."
        )
    return "\n".join(lines) or "*XGBModel was not searched with.*"


def _met(goal: bool) -> str:
    return "met" if goal else "missed"


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
        trials = sorted(counts["after"])
        middle = f"{trials[len(trials) // 2]}" if trials else "-"
        within = sum(n <= GOAL_TRIALS for n in trials)
        rows.append([NAMES[m], f"{counts['reached']} of {counts['searches']}", f"{within}", middle])
    return table([f"reached {_against(result)}", "searches", f"within {GOAL_TRIALS} trials", "median trials"], rows)


def settings(result: Mapping[str, Any]) -> str:
    """Settings of the runs."""
    seeds = sorted({seed for task in result["tasks"] for seed in task["seeds"]})
    done, asked = result.get("searches", 0), result["asked"]
    missing = "" if done == asked else f" of {asked} requested (only those that every method finished)"
    return (
        f"`{result['command']}`: {done} searches{missing}, {len(result['tasks'])} tasks, seeds "
        f"{', '.join(map(str, seeds))}, {result['programs']:,} distinct programs measured on "
        f"`{result['device']}`{_processor(result)} (target `{result['target']}`), model `{result['model_id']}`; "
        f"{result['trials_per_round']} trials per round, population {result['population']}, "
        f"{result['generations']} generations, one thread."
    )


def _processor(result: Mapping[str, Any]) -> str:
    return f", {result['processor']}" if result.get("processor") else ""


def defaults(result: Mapping[str, Any] | None) -> str:
    """The searches with the settings of TVM's own search."""
    if result is None:
        return "*Not measured yet: `python -m benchmarks.tuning --defaults`.*"
    return "\n\n".join(part(result) for part in (settings, overview, verdict, rounds))


def document(result: Mapping[str, Any], text: str, with_defaults: Mapping[str, Any] | None = None) -> str:
    """Fill the generated parts of the page.

    Parameters
    ----------
    result : mapping
        Of the full table.
    text : str
    with_defaults : mapping, optional
        Of the searches with TVM's own settings.
    """
    parts = {
        "settings": settings,
        "overview": overview,
        "verdict": verdict,
        "reached": reached,
        "rounds": rounds,
        "best": best,
    }
    filled = {name: make(result) for name, make in parts.items()}
    return fill(text, filled | {"defaults": defaults(with_defaults)})


def render(result: Mapping[str, Any], with_defaults: Mapping[str, Any] | None, folder: Path) -> None:
    """Write the page and the figure; arguments as in :func:`document`."""
    page = folder / "tuning.md"
    page.write_text(document(result, page.read_text(encoding="utf-8"), with_defaults), encoding="utf-8")
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
        if points := ratios(result, m):
            style = _STYLES.get(m, "-")
            axis.plot(
                list(points), list(points.values()), color=COLOURS[m], linestyle=style, linewidth=2.2, label=NAMES[m]
            )
    axis.axhline(1.0, color="0.3", linewidth=0.8)
    axis.set(
        title=f"all tasks: best latency relative to\n{_against(result)}", xlabel="measured trials", ylim=(0.7, 2.5)
    )
    axis.title.set_fontsize(11)
    _trial_axis(axis)


def _trial_axis(axis: Any) -> None:
    axis.set_xscale("log")
    axis.set_xticks(_TICKS, [str(n) for n in _TICKS])
    axis.minorticks_off()


def _few_ticks(axis: Any) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    axis.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())
