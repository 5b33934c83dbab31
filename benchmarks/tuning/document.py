"""docs/tuning.md and its figure from the result file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.report.markdown import fill, percent, table
from benchmarks.tuning.results import AT, geometric

NAMES = {"random": "random", "xgboost": "TVM's XGBModel", "frozen": "cdmpp, frozen", "fine-tuned": "cdmpp, fine-tuned"}
#: Tasks beside each other in the figure.
_ACROSS = 3
COLOURS = {"random": "0.6", "xgboost": "#e0a458", "frozen": "#1f6f8b", "fine-tuned": "#7a1f5c"}


def overview(result: Mapping[str, Any]) -> str:
    """Ratios of the best latencies to those of TVM's model in the end, geometric means."""
    summary = result["summary"]
    if not summary:
        return "*No search was finished by every method.*"
    counts = list(next(iter(summary.values())))
    rows = [[NAMES[m], *(f"{each[n]:.3f}" for n in counts)] for m, each in summary.items()]
    return table([f"best latency / {_against(result)}", *(f"{n} trials" for n in counts)], rows)


def _against(result: Mapping[str, Any]) -> str:
    name, _, trials = result["against"].partition(" ")
    return f"{NAMES[name]} {trials}"


def best(result: Mapping[str, Any]) -> str:
    """Best latencies by task."""
    rows = []
    for each in result["tasks"]:
        for m, found in each["best_s"].items():
            name = each["task"] if m == result["methods"][0] else ""
            rows.append([name, NAMES[m], *(f"{1e6 * s:.1f}" for s in found.values())])
    counts = list(result["tasks"][0]["best_s"][result["methods"][0]]) if result["tasks"] else []
    return table(["task", "cost model", *(f"{n} trials" for n in counts)], rows, left=2)


def verdict(result: Mapping[str, Any]) -> str:
    """The two goals: trials to reach what TVM's model has in the end, and time of a round."""
    theirs, lines = result["per_round"]["xgboost"]["search_s"], []
    for m in ("frozen", "fine-tuned"):
        if m not in result["summary"]:
            continue
        ratio, means = result["summary"][m].get("32", float("nan")), mean_ratios(result, m)
        trials = next((n for n, value in means if value <= 1.0), None)
        reached_at = "not reached" if trials is None else f"reached with {trials} trials"
        mine = result["per_round"][m]["search_s"]
        lines.append(
            f"- {NAMES[m]}: at 32 trials {percent(abs(ratio - 1))} {'above' if ratio > 1 else 'below'} what "
            f"XGBModel has in the end (goal {'missed' if ratio > 1 else 'met'}; {reached_at}); a round's "
            f"search takes {mine / theirs:.2f} of XGBModel's (goal {'missed' if mine > theirs else 'met'})."
        )
    return "\n".join(lines)


def mean_ratios(result: Mapping[str, Any], method: str) -> list[tuple[int, float]]:
    """(Trials, geometric mean over all searches of the best latency over XGBModel's last), where defined."""
    goals = {(c["task"], c["seed"]): c["best_s"][-1] for c in result["curves"] if c["method"] == "xgboost"}
    curves = [c for c in result["curves"] if c["method"] == method]
    points = []
    for n in range(result["trials"] if goals else 0):
        at = [(c["best_s"][min(n, len(c["best_s"]) - 1)], goals[c["task"], c["seed"]]) for c in curves]
        if all(b is not None for b, _ in at):
            points.append((n + 1, geometric([b / goal for b, goal in at])))
    return points


def rounds(result: Mapping[str, Any]) -> str:
    """Seconds of a round."""
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
    return table([f"reached {_against(result)}", "searches", "within 32 trials", "median trials"], rows)


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
    """Curves: best latency against trials and against wall time for each task, and the ratio over all."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = [each["task"] for each in result["tasks"]]
    blocks = max(1, -(-len(names) // _ACROSS))
    figure, axes = plt.subplots(
        2 * blocks, _ACROSS + 1, figsize=(3.4 * (_ACROSS + 1), 5.6 * blocks), constrained_layout=True, squeeze=False
    )
    for axis in axes.flat:
        axis.set_axis_off()
    for i, name in enumerate(names):
        row, column = 2 * (i // _ACROSS), i % _ACROSS
        _curves(result, name, axes[row, column], axes[row + 1, column])
        if column == 0:
            for axis in (axes[row, 0], axes[row + 1, 0]):
                axis.set_ylabel("best latency (µs)")
    _ratios(result, axes[0, _ACROSS])
    handles, labels = axes[0, 0].get_legend_handles_labels()
    axes[1, _ACROSS].legend(handles, labels, loc="center", frameon=False)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _curves(result: Mapping[str, Any], name: str, trials: Any, clock: Any) -> None:
    """One task's searches against trials and against wall time."""
    lowest = 1e6 * min(min(filter(None, c["best_s"])) for c in result["curves"] if c["task"] == name)
    for m in result["methods"]:
        curves = [c for c in result["curves"] if c["task"] == name and c["method"] == m]
        for i, curve in enumerate(curves):
            style: dict[str, Any] = {"color": COLOURS[m], "linewidth": 1.3, "alpha": 0.8}
            style |= {"label": NAMES[m]} if i == 0 else {}
            best_us = [None if b is None else 1e6 * b for b in curve["best_s"]]
            trials.plot(range(1, len(best_us) + 1), best_us, **style)
            points = [(at, 1e6 * b) for at, b in curve["time_s"] if b is not None]
            clock.step(*zip(*points, strict=True), where="post", **style)
    trials.set(title=name, xlabel="measured trials", xscale="log")
    trials.set_xticks([1, 4, *AT], ["1", "4", *map(str, AT)])
    trials.minorticks_off()
    clock.set(xlabel="wall time (s)")
    for axis in (trials, clock):
        axis.set_axis_on()
        axis.set(yscale="log", ylim=(0.95 * lowest, 4 * lowest))
        _few_ticks(axis)


def _ratios(result: Mapping[str, Any], axis: Any) -> None:
    """Geometric mean over all searches, trial by trial."""
    for m in result["methods"]:
        if points := mean_ratios(result, m):
            axis.plot(*zip(*points, strict=True), color=COLOURS[m], linewidth=1.8)
    axis.axhline(1.0, color="0.3", linewidth=0.8)
    axis.set_axis_on()
    axis.set(title="over XGBModel's last, all tasks", xlabel="measured trials", xscale="log")
    axis.set(ylim=(0.7, 2.5))
    axis.set_xticks([1, 4, *AT], ["1", "4", *map(str, AT)])
    axis.minorticks_off()


def _few_ticks(axis: Any) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    axis.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())
