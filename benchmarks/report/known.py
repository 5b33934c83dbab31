"""The report on shapes that training never saw, on known devices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.report.markdown import ERROR_COLUMNS, error_cells, folded, percent, picture, table
from benchmarks.report.results import Results, not_measured

TITLES = {
    "neusight": "fp32 PyTorch operators (NeuSight)",
    "neusight_filtered": "fp32 PyTorch operators, the rows that the authors keep",
    "aiconfigurator_gemm": "bf16 GEMM (aiconfigurator)",
    "aiconfigurator_gemm_without_b60": "bf16 GEMM, without the Intel card, whose repeats disagree by 23 %",
    "aiconfigurator_attention": "bf16 attention (aiconfigurator)",
    "aiconfigurator_attention_without_b60": "bf16 attention, without the Intel card",
    "vidur": "fp16 LLM layers (vidur)",
    "miopen": "convolutions, AMD (MIOpen)",
    "deepbench": "DeepBench, devices of 2014-2018",
    "cdmpp_collect": "scheduled programs of our own, 3 CPU configurations",
}
BASELINES = {
    "xgboost": "XGBoost",
    "utilisation": "bounded utilisation",
    "mean": "mean per operator",
    "roofline": "roofline",
}


def title(source: str) -> str:
    """A source for people."""
    return TITLES.get(source, source)


def baseline_columns(entries: Iterable[Mapping[str, Any]]) -> list[str]:
    """Baselines that any of the entries has, in the order of :data:`BASELINES`."""
    present = {name for entry in entries for name in entry.get("baselines", {})}
    return [*(name for name in BASELINES if name in present), *sorted(present - set(BASELINES))]


def baseline_header(names: Iterable[str]) -> tuple[str, ...]:
    """Column titles of baselines."""
    return tuple(f"{BASELINES.get(name, name)}, MAPE" for name in names)


def overview(results: Results) -> str:
    """One row per source, the baselines on the same rows beside."""
    errors = results.get("model")
    if errors is None:
        return not_measured("model")
    entries = {title(name): m for name, m in sorted(errors["by_source"].items())}
    entries["all rows"] = errors["overall"]
    names = baseline_columns(entries.values())
    rows = (
        [name, *error_cells(m), *(percent(m["baselines"].get(b, {}).get("mape")) for b in names)]
        for name, m in entries.items()
    )
    pictures = (
        picture("predicted against measured", "predicted_vs_measured.png"),
        picture("error by operator", "error_by_operator.png"),
    )
    return "\n\n".join((table(("source", *ERROR_COLUMNS, *baseline_header(names)), rows), *pictures))


def details(results: Results) -> str:
    """Families, then every device: never only a mean."""
    shapes = results.get("shapes")
    if shapes is None:
        return not_measured("shapes")
    parts = shapes["parts"]
    families = [p for p in parts if not p["device"] and p["family"]]
    by_device = [p for p in parts if p["device"] and not p["family"]]
    by_both = [p for p in parts if p["device"] and p["family"]]
    blocks = [
        table(
            ("source", "family", *ERROR_COLUMNS), ([_source(p), p["family"], *error_cells(p)] for p in families), left=2
        ),
        folded(
            "Every device",
            table(
                ("source", "device", *ERROR_COLUMNS),
                ([_source(p), p["device"], *error_cells(p)] for p in by_device),
                left=2,
            ),
        ),
        folded(
            "Every device and family",
            table(
                ("source", "device", "family", *ERROR_COLUMNS),
                ([_source(p), p["device"], p["family"], *error_cells(p)] for p in by_both),
                left=3,
            ),
        ),
    ]
    if stale := results.stale():
        blocks.insert(0, f"*{stale}*")
    return "\n\n".join(blocks)


def _source(part: Mapping[str, Any]) -> str:
    return title(part["source"] + ("_filtered" if part["filtered"] else ""))


def part_of(
    shapes: Mapping[str, Any], source: str, *, family: str = "", device: str = "", filtered: bool = False
) -> dict[str, Any] | None:
    """One entry of ``parts``, None where there is none."""
    wanted = {"source": source, "family": family, "device": device, "filtered": filtered}
    for part in shapes["parts"]:
        if all(part[key] == value for key, value in wanted.items()):
            found: dict[str, Any] = part
            return found
    return None


def readme_rows(results: Results) -> str:
    """The README's table of known devices: less than :func:`overview`, the same figures."""
    errors = results.get("model")
    if errors is None:
        return not_measured("model")
    left_out = {"neusight", "aiconfigurator_gemm", "aiconfigurator_attention"}
    shown = {
        name: m
        for name, m in errors["by_source"].items()
        if not (name in left_out and any(n.startswith(f"{name}_") for n in errors["by_source"]))
    }
    rows = (
        [
            title(name),
            f"{m['n']:,}",
            f"**{percent(m['mape'])}**",
            percent(m["median_ape"]),
            percent(m["within_20"]),
            percent(m["coverage"]),
            *(percent(m["baselines"].get(b, {}).get("mape")) for b in ("xgboost", "roofline")),
        ]
        for name, m in sorted(shown.items())
    )
    header = (
        "unseen shapes on known devices",
        "n",
        "MAPE",
        "median",
        "within 20 %",
        "80 % interval covers",
        "XGBoost",
        "roofline",
    )
    return table(header, rows)
