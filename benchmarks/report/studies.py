"""The report on scheduled programs, on the original beside ours, and on what each choice is worth."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import mean, stdev
from typing import Any

from benchmarks.report.markdown import number, percent, table
from benchmarks.report.results import Results, not_measured

#: Splits of the scheduled programs and what is unseen in each.
SPLITS = {"task": "tasks", "network": "networks"}
_RANKS = ("task_kendall_tau", "top1_score", "top5_score")


def schedules(results: Results) -> str:
    """Every method on every split of the scheduled programs."""
    found = results.get("schedules")
    if found is None:
        return not_measured("schedules")
    rows = [
        [
            SPLITS.get(split, f"configuration {split}"),
            method,
            f"{m['n']:,}",
            f"**{percent(m['mape'])}**",
            percent(m["median_ape"]),
            percent(m["within_20"]),
            *(number(m.get(key)) for key in _RANKS),
            str(m.get("ranked_groups", "-")),
        ]
        for split, methods in found["splits"].items()
        for method, m in methods.items()
    ]
    header = (
        "what is unseen",
        "method",
        "n",
        "MAPE",
        "median",
        "within 20 %",
        "tau in a task",
        "top-1",
        "top-5",
        "groups",
    )
    held = ", ".join(found.get("held_out_networks", ())) or "none"
    return f"`{found['command']}`. Networks left out: {held}.\n\n{table(header, rows, left=2)}"


def reference(results: Results) -> str:
    """The original beside ours on one split, data and budget of time."""
    found = results.get("reference")
    if found is None:
        return not_measured("reference")
    rows = []
    for name, m in found["methods"].items():
        test = m["test"]
        parameters = f"{m['parameters']:,}" if "parameters" in m else "-"
        rows.append(
            [
                name,
                parameters,
                number(m.get("train_seconds"), 0),
                f"{m['samples']:,}" if "samples" in m else "-",
                number(m.get("samples_per_s"), 0),
                f"**{percent(test['mape'])}**",
                percent(test["median_ape"]),
                percent(test["within_20"]),
                number(test["task_kendall_tau"]),
                number(test["top1_score"]),
            ]
        )
    header = (
        "method",
        "parameters",
        "seconds",
        "samples",
        "a second",
        "MAPE",
        "median",
        "within 20 %",
        "tau in a task",
        "top-1",
    )
    return (
        f"`{found['command']}`: {found['test_rows']:,} test rows, split by {found['split']}. "
        f"Ours trains on {found['samples_per_s_ratio']:.0f} times the samples a second.\n\n" + table(header, rows)
    )


FIGURES = {
    "ns_zero_shot": "NS, device unseen",
    "aic_zero_shot": "AIC, device unseen",
    "ns_shapes": "NS, shapes unseen",
    "aic_shapes": "AIC, shapes unseen",
    "unseen_networks": "own programs, networks unseen",
}


def ablations(results: Results) -> str:
    """One table per study: the default and its variants, mean and spread over seeds."""
    found = results.get("ablations")
    if found is None:
        return not_measured("ablations")
    by_study: dict[str, list[Mapping[str, Any]]] = {}
    for entry in found["studies"]:
        by_study.setdefault(entry["study"], []).append(entry)
    default = by_study.pop("default", [])
    blocks = []
    for study, entries in by_study.items():
        own = {key for entry in entries for seed in entry["seeds"] for key in seed["figures"]}
        shared = [e for e in default if own & set(e["seeds"][0]["figures"])]
        names = [name for name in FIGURES if name in own] + sorted(own - set(FIGURES))
        rows = []
        for entry in [*shared, *entries]:
            cells = [_over_seeds([seed["figures"].get(name) for seed in entry["seeds"]]) for name in names]
            mark = "**" if entry["default"] else ""
            rows.append([f"{mark}{entry['variant']}{mark}", str(len(entry["seeds"])), *cells])
        header = ["variant", "seeds", *(FIGURES.get(str(name), str(name)) for name in names)]
        blocks.append(f"**{study[:1].upper()}{study[1:]}**:\n\n{table(header, rows)}")
    if not blocks:
        return not_measured("ablations")
    held = ", ".join(found.get("held_out", ()))
    about = f"{found['steps']:,} steps a run" + (f"; left out: {held}" if held else "")
    return f"{about}. MAPE, ± standard deviation over seeds.\n\n" + "\n\n".join(blocks)


def _over_seeds(values: list[float | None]) -> str:
    known = [100 * value for value in values if value is not None]
    if not known:
        return "-"
    return f"{mean(known):.1f} ± {stdev(known):.1f} %" if len(known) > 1 else f"{known[0]:.1f} %"
