"""Report on shapes that were held out of training, on known devices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.report.markdown import ERROR_COLUMNS, error_cells, folded, percent, picture, table
from benchmarks.report.results import Results, not_measured, of_study

TITLES = {
    "neusight": "fp32 PyTorch operators (NeuSight)",
    "neusight_filtered": "fp32 PyTorch operators, rows that pass NeuSight's own filter",
    "aiconfigurator_gemm": "bf16 GEMM (aiconfigurator)",
    "aiconfigurator_gemm_without_b60": "bf16 GEMM, without the Intel Arc B60",
    "aiconfigurator_attention": "bf16 attention (aiconfigurator)",
    "aiconfigurator_attention_without_b60": "bf16 attention, without the Intel Arc B60",
    "vidur": "fp16 LLM layers (vidur)",
    "miopen": "convolutions on AMD GPUs (MIOpen)",
    "deepbench": "operators on devices of 2014-2018 (DeepBench)",
    "cdmpp_collect": "TVM programs on eight CPU configurations (own measurements)",
    "aiconfigurator_gemm_quantised": "quantised GEMM (aiconfigurator)",
    "aiconfigurator_moe": "expert layers (aiconfigurator)",
    "aiconfigurator_mla": "latent attention (aiconfigurator)",
    "pipeweave_moe": "first product of expert layers, Triton (pipeweave)",
    "pipeweave_gemm_fp8": "bare fp8 GEMM (pipeweave)",
    "tensile_gemm": "GEMM of rocBLAS and hipBLASLt (Tensile)",
    "aiter_gemm": "tuned GEMM on AMD GPUs (aiter)",
    "aiter_moe": "tuned expert layers on AMD GPUs (aiter)",
    "llmservingsim_layers": "LLM layers (LLMServingSim)",
    "llmservingsim_attention": "prefill, decode and mixed attention (LLMServingSim)",
    "frontier": "LLM layers and attention (Frontier)",
    "infersim": "DeepGEMM products and attention (InferSim)",
    "liger": "norms, rotary embedding, softmax, cross entropy (Liger-Kernel)",
    "cudnn_attention": "attention and its gradients (cuDNN)",
    "cudnn_norms": "norms and their gradients (cuDNN)",
    "comm_collectives": "collectives",
    "ansor": "TVM programs on GPUs, unseen tasks (schedules of Ansor)",
    "metaschedule": "TVM programs on an A100, unseen tasks (schedules of MetaSchedule)",
}
BASELINES = {
    "xgboost": "XGBoost",
    "utilisation": "bounded-utilisation formula",
    "mean": "mean per operator",
    "roofline": "roofline",
}


def title(source: str) -> str:
    """Display name of a source."""
    return TITLES.get(source, source)


def baseline_columns(entries: Iterable[Mapping[str, Any]]) -> list[str]:
    """Names of the baselines present in ``entries``, in the order of :data:`BASELINES`."""
    present = {name for entry in entries for name in entry.get("baselines", {})}
    return [*(name for name in BASELINES if name in present), *sorted(present - set(BASELINES))]


def baseline_header(names: Iterable[str]) -> tuple[str, ...]:
    """Column titles of baselines."""
    return tuple(f"{BASELINES.get(name, name)}, MAPE" for name in names)


@of_study("model")
def overview(results: Results, errors: dict[str, Any]) -> str:
    """Table of errors: one row per source, with the baselines on the same rows."""
    entries = {title(name): m for name, m in sorted(errors["by_source"].items())}
    entries["all rows"] = errors["overall"]
    names = baseline_columns(entries.values())
    rows = [
        [name, *error_cells(m), *(percent(m["baselines"].get(b, {}).get("mape")) for b in names)]
        for name, m in entries.items()
    ]
    if collectives := results.get("collectives"):
        known = (results.get("collective_baselines") or {}).get("test", {})
        error = [f"**{percent(collectives['test_error'])}**", percent(collectives["test_median"])]
        absent = ["-"] * (len(ERROR_COLUMNS) - 3)
        figures = [f"{collectives['test_rows']:,}", *error, *absent, *(percent(known.get(b)) for b in names)]
        rows.append([f"{title('comm_collectives')} (a model of their own, not in all rows)", *figures])
    pictures = (
        picture("predicted against measured latency, one panel per source", "predicted_vs_measured.png"),
        picture("error by operator, with XGBoost and the roofline", "error_by_operator.png"),
    )
    return "\n\n".join((table(("source", *ERROR_COLUMNS, *baseline_header(names)), rows), *pictures))


@of_study("shapes")
def details(results: Results, shapes: dict[str, Any]) -> str:
    """Tables of errors by family, by device, and by both."""

    def by(*columns: str) -> str:
        """Table of the parts that are cut by these columns and no other."""
        parts = [p for p in shapes["parts"] if [c for c in ("device", "family") if p[c]] == list(columns)]
        rows = ([_source(p), *(p[column] for column in columns), *error_cells(p)] for p in parts)
        return table(("source", *columns, *ERROR_COLUMNS), rows, left=1 + len(columns))

    both = folded("Every device and family", by("device", "family"))
    blocks = [by("family"), folded("Every device", by("device")), both]
    if stale := results.stale():
        blocks.insert(0, f"*{stale}*")
    return "\n\n".join(blocks)


def _source(part: Mapping[str, Any]) -> str:
    return title(part["source"] + ("_filtered" if part["filtered"] else ""))


def part_of(
    shapes: Mapping[str, Any], source: str, *, family: str = "", device: str = "", filtered: bool = False
) -> dict[str, Any] | None:
    """Entry of ``parts`` with these attributes, or None."""
    wanted = {"source": source, "family": family, "device": device, "filtered": filtered}
    return next((part for part in shapes["parts"] if wanted.items() <= part.items()), None)


def training(results: Results) -> str:
    """README's sentence on the training rows of the shipped model."""
    if not results.manifest:
        return not_measured("model")
    rows, devices = results.manifest["train"]["train_rows"], sum(map(bool, results.manifest["devices"]))
    return f"The shipped model was trained on {rows / 1e6:.1f} million measurements on {devices} devices."


@of_study("model")
def readme_rows(results: Results, errors: dict[str, Any]) -> str:
    """README table of known devices.

    It has the rows of every source, as the panels of ``predicted_vs_measured.png``; the subsets of a source
    are in :func:`overview` only.
    """
    sources = set(errors["sample"]["source"])
    shown = {name: m for name, m in errors["by_source"].items() if name in sources}
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
        for name, m in sorted(shown.items(), key=lambda item: item[1]["mape"])
    )
    header = (
        *("held-out shapes on known devices", "test rows", "MAPE", "median error"),
        *("within 20 %", "inside the 80 % interval", "XGBoost MAPE", "roofline MAPE"),
    )
    return table(header, rows)
