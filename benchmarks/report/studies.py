"""Reports on the comparison with the original CDMPP, and on the ablations."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import mean, stdev
from typing import Any

from benchmarks.report.markdown import number, percent, table
from benchmarks.report.results import Results, not_measured


def reference(results: Results) -> str:
    """The original and ours on the same split, data and training time."""
    result = results.get("reference")
    if result is None:
        return not_measured("reference")
    rows = []
    for name, m in result["methods"].items():
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
        "training (s)",
        "samples",
        "samples/s",
        "MAPE",
        "median",
        "within 20 %",
        "tau within a task",
        "top-1",
    )
    return (
        f"`{result['command']}`: {result['test_rows']:,} test rows, split by {result['split']}. "
        f"Ours trains on {result['samples_per_s_ratio']:.0f} times as many samples per second.\n\n"
        + table(header, rows)
    )


FIGURES = {
    "ns_zero_shot": "fp32 operators, unseen device",
    "aic_zero_shot": "bf16 GEMM, unseen device",
    "ns_shapes": "fp32 operators, unseen shapes",
    "aic_shapes": "bf16 GEMM, unseen shapes",
    "unseen_networks": "TVM programs, unseen networks",
}


def ablations(results: Results) -> str:
    """One table per ablation: the default and its variants, mean and spread over seeds."""
    result = results.get("ablations")
    if result is None:
        return not_measured("ablations")
    by_study: dict[str, list[Mapping[str, Any]]] = {}
    for entry in result["studies"]:
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
    held = ", ".join(result.get("held_out", ()))
    about = f"{result['steps']:,} training steps per run" + (f"; devices left out: {held}" if held else "")
    return f"{about}. The tables show the MAPE ± its standard deviation over seeds.\n\n" + "\n\n".join(blocks)


def _over_seeds(values: list[float | None]) -> str:
    known = [100 * value for value in values if value is not None]
    if not known:
        return "-"
    return f"{mean(known):.1f} ± {stdev(known):.1f} %" if len(known) > 1 else f"{known[0]:.1f} %"
