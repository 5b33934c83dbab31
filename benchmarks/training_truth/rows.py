"""Rows of ``e2e_llm_training.csv.gz`` as training steps, and those left out with their reasons."""

from __future__ import annotations

import csv
import gzip
import io
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TABLE, ALIASES = "e2e_llm_training.csv.gz", "aliases.csv"
#: Names of devices in the table -> names of the registry.
DEVICES = {
    "DGX-GB200": "gb200",
    "DGX-GB300": "gb300",
    "DGX-H100": "h100-sxm",
    "DGX-H200": "h200",
    "DGX-B200": "b200",
    "DGX-B300": "b300",
    "a100_40gb": "a100-sxm4-40gb",
    "a100_80gb": "a100-sxm4-80gb",
    "h100_80gb": "h100-sxm",
    "h100_80gb_bf16": "h100-sxm",
    "h100_80gb_fp8": "h100-sxm",
}
#: Types of the products in the table -> ``products``.
PRODUCTS = {
    "BF16": None,
    "bf16": None,
    "FP8": "float8_e4m3",
    "FP8-CS": "float8_e4m3",
    "fp8": "float8_e4m3",
    "MXFP8": "mxfp8",
    "FP8-MX": "mxfp8",
}


@dataclass(frozen=True)
class Row:
    """A measured step.

    Attributes
    ----------
    source, model, device : str
    config : Path
        The model's config.json.
    options : dict
        Keyword arguments of ``training_step``.
    tokens_per_s : float
        Tokens per second and device.
    engine : str
    recompute_known : bool
        Whether the table says what is recomputed.
    release : str
        Release of the framework.
    """

    source: str
    model: str
    device: str
    config: Path
    options: dict[str, Any]
    tokens_per_s: float
    engine: str
    recompute_known: bool
    release: str

    @property
    def seconds(self) -> float:
        """Measured duration of the step."""
        o = self.options
        return float(o["global_batch"] * o["sequence"] / self.tokens_per_s / o["gpus"])


def read_rows(public_data: Path, configs: Path) -> tuple[list[Row], Counter[tuple[str, str]]]:
    """Steps, and the number of rows left out by source and reason."""
    with (configs / ALIASES).open(encoding="utf-8") as file:
        names = {a["name"]: configs / a["config"] for a in csv.DictReader(file) if a["table"] == "training"}
    rows, left_out = [], Counter[tuple[str, str]]()
    text = gzip.decompress((public_data / TABLE).read_bytes()).decode()
    for record in csv.DictReader(io.StringIO(text)):
        found = _row(record, names, configs)
        if isinstance(found, str):
            left_out[record["source"], found] += 1
        else:
            rows.append(found)
    return rows, left_out


def _row(record: dict[str, str], names: dict[str, Path], configs: Path) -> Row | str:
    """A step, or the reason why the row is left out."""
    if not record["quantity"].startswith("train_tokens_per_s_per_gpu"):
        return "a step of reinforcement learning" if record["source"] == "nemo-rl" else "another quantity"
    for word in ("SFT", "LoRA"):
        if word in record["quantity"]:
            return f"{word}, no pre-training"
    if "(" in record["parallelism"] or "(" in record["dtype"]:
        return "two layouts or types in one row"
    if not record["dtype"]:
        return "no type is stated"
    if record["dtype"] not in PRODUCTS:
        return f"products in {record['dtype']}"
    if record["device"] not in DEVICES:
        return "device not known"
    model = re.sub(r" \(.*\)$", "", record["model"])
    config = names.get(model, configs / f"more/{model}_config.json")
    if not config.is_file():
        return f"no configuration of {model}"
    foundry = record["source"] == "llm-foundry"
    layout = dict(re.findall(r"(\w+)=([^;]+)", record["parallelism"]))
    note = dict(re.findall(r"(\w+)=([^;\[]+)", record["note"]))
    number = {k: int(v) if v.isdecimal() else 1 for k, v in layout.items()}
    options: dict[str, Any] = {
        "gpus": int(record["gpus"]),
        "tp": number.get("tp", 1),
        "pp": number.get("pp", 1),
        "virtual_pp": number.get("vp", 1),
        "cp": number.get("cp", 1),
        "ep": number.get("ep", 1),
        "sharding": "fsdp" if number.get("fsdp", 0) > 1 else "optimizer",
        "micro_batch": int(note["micro_batch"] if foundry else note["mbs"]),
        "global_batch": int(record["batch"]),
        "sequence": int(record["sequence"]),
        "products": PRODUCTS[record["dtype"]],
    }
    if foundry:
        options["recompute"] = "full" if layout["act_ckpt"] == "True" else "none"
    release = re.sub(r"Megatron-Bridge (.*) NeMo Container", r"\1", record["framework"])
    engine = "llm-foundry" if foundry else "megatron"
    device = DEVICES[record["device"]]
    tokens = float(record["value"])
    return Row(record["source"], model, device, config, options, tokens, engine, foundry, release)


def read_rl_steps(public_data: Path) -> list[dict[str, Any]]:
    """Measured steps of reinforcement learning, with what is doubtful about a row."""
    text = gzip.decompress((public_data / TABLE).read_bytes()).decode()
    records = [r for r in csv.DictReader(io.StringIO(text)) if r["quantity"] == "rl_step_time"]
    seconds: dict[tuple[str, ...], set[float]] = {}
    for r in records:
        seconds.setdefault((r["model"], r["gpus"], r["device"], r["parallelism"], r["note"]), set()).add(
            float(r["value"])
        )
    steps = []
    for r in records:
        several = sorted(seconds[r["model"], r["gpus"], r["device"], r["parallelism"], r["note"]])
        doubt = "" if len(several) == 1 else f"; the same key has {' and '.join(f'{s:g}' for s in several)} s"
        doubt += "; the layout has one number more than names" if "[1,1,1,1,1," in r["parallelism"] else ""
        generated = re.search(r"G-GBS=([\d,]+)", r["batch"])
        longest = re.search(r"max_seq=([\d,]+)", r["note"])
        steps.append(
            {
                "model": r["model"],
                "device": r["device"],
                "gpus": int(r["gpus"]),
                "samples": int((generated[1] if generated else "512").replace(",", "")),
                "mean_length": int(r["output_tokens"].replace(",", "")),
                "longest": int((longest[1] if longest else "4096").replace(",", "")),
                "colocated": "On policy" in r["note"],
                "layout": r["parallelism"],
                "step_s": float(r["value"]),
                "note": f"{r['note']}; mean length {r['output_tokens']}{doubt}",
            }
        )
    return steps
