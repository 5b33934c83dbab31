"""Rows of ``e2e_llm_training.csv.gz`` as training steps, and those left out with their reasons."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cdmpp.devices.registry import lookup
from cdmpp.devices.spec import DeviceSpec

TABLE, ALIASES = "e2e_llm_training.csv.gz", "aliases.csv"
#: Names of devices in the table -> names of the registry.
DEVICES = {
    **{f"DGX-{name.upper()}": name for name in ("gb200", "gb300", "h200", "b200", "b300")},
    **dict.fromkeys(("DGX-H100", "h100_80gb", "h100_80gb_bf16", "h100_80gb_fp8", "H100"), "h100-sxm"),
    "H100 96GB HBM2e 500W (Grand Teton)": "h100-sxm",
    **dict.fromkeys(("a100_80gb", "A100 80GB"), "a100-sxm4-80gb"),
    "a100_40gb": "a100-sxm4-40gb",
}
#: Figures of boards that the registry does not have.
BOARDS: dict[str, dict[str, Any]] = {
    "H100 96GB HBM2e 500W (Grand Teton)": {
        "name": "h100-500w",
        "aliases": (),
        "memory_bytes": 95 * 2**30,
        "mem_bandwidth_bytes_per_s": 2.4e12,
        "tdp_w": 500.0,
    }
}
#: Types of the products in the table -> ``products``.
PRODUCTS = {
    **dict.fromkeys(("BF16", "bf16")),
    **dict.fromkeys(("FP8", "FP8-CS", "fp8", "bf16+float8"), "float8_e4m3"),
    **dict.fromkeys(("MXFP8", "FP8-MX"), "mxfp8"),
}
#: Models of sources that name no file -> file in the folder of configurations, and figures that differ from it.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 3.1 8B": ("meta-llama--Meta-Llama-3.1-8B_config.json", {}),
    "Llama 3.1 70B": ("meta-llama--Meta-Llama-3.1-70B_config.json", {}),
    "Llama 3.1 405B": ("meta-llama--Meta-Llama-3.1-405B_config.json", {}),
    "llama-arch 7b": ("more/Llama-2-7b_config.json", {}),
    "llama-arch 13b": (
        "more/Llama-2-7b_config.json",
        {
            "hidden_size": 5120,
            "intermediate_size": 13824,
            "num_hidden_layers": 40,
            "num_attention_heads": 40,
            "num_key_value_heads": 40,
        },
    ),
    "llama-arch 34b": ("more/Llama-2-70b_config.json", {"num_hidden_layers": 48, "intermediate_size": 22016}),
    "llama-arch 70b": ("more/Llama-2-70b_config.json", {}),
}


@dataclass(frozen=True)
class PublishedStep:
    """A measured step."""

    source: str
    model: str
    device: DeviceSpec
    config: dict[str, Any]  # the model's config.json
    # keyword arguments of ``training_step``; without ``recompute`` where the table does not say what is recomputed
    options: dict[str, Any]
    tokens_per_s: float  # per device
    engine: str
    release: str  # of the framework
    memory_bytes: float | None = None  # of the fullest device, where the table has it

    @property
    def seconds(self) -> float:
        """Measured duration of the step."""
        o = self.options
        return float(o["global_batch"] * o["sequence"] / self.tokens_per_s / o["gpus"])


def read_rows(public_data: Path, configs: Path) -> tuple[list[PublishedStep], Counter[tuple[str, str]]]:
    """Steps, and the number of rows left out by source and reason."""
    with (configs / ALIASES).open(encoding="utf-8") as file:
        names = {a["name"]: a["config"] for a in csv.DictReader(file) if a["table"] == "training"}
    rows, left_out = [], Counter[tuple[str, str]]()
    text = gzip.decompress((public_data / TABLE).read_bytes()).decode()
    for record in csv.DictReader(io.StringIO(text)):
        row = _row(record, names, configs)
        if isinstance(row, str):
            left_out[record["source"], row] += 1
        else:
            rows.append(row)
    return rows, left_out


def _row(record: dict[str, str], names: dict[str, str], configs: Path) -> PublishedStep | str:
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
    file, changes = MODELS.get(model, (names.get(model, f"more/{model}_config.json"), {}))
    if not (configs / file).is_file():
        return f"no configuration of {model}"
    config = {**json.loads((configs / file).read_text(encoding="utf-8")), **changes}
    read = {"llm-foundry": _foundry, "torchtitan": _torchtitan, "fms-fsdp": _fms}.get(record["source"], _bridge)
    engine, options = read(record)
    options |= {"sequence": int(record["sequence"]), "products": PRODUCTS[record["dtype"]]}
    spec = lookup(DEVICES[record["device"]])
    spec = spec.model_copy(update=BOARDS.get(record["device"], {}))
    release = re.sub(r"Megatron-Bridge (.*) NeMo Container", r"\1", record["framework"])
    memory = re.search(r"memory_gib=([\d.]+)", record["note"])
    memory_bytes = float(memory[1]) * 2**30 if memory else None
    return PublishedStep(
        record["source"], model, spec, config, options, float(record["value"]), engine, release, memory_bytes
    )


def _bridge(record: dict[str, str]) -> tuple[str, dict[str, Any]]:
    """Engine and options of a row of Megatron-Bridge; what is recomputed is not stated."""
    number = _numbers(record["parallelism"])
    options: dict[str, Any] = {
        "gpus": int(record["gpus"]),
        "tp": number.get("tp", 1),
        "pp": number.get("pp", 1),
        "virtual_pp": number.get("vp", 1),
        "cp": number.get("cp", 1),
        "ep": number.get("ep", 1),
        "sharding": "fsdp" if number.get("fsdp", 0) > 1 else "optimizer",
        "micro_batch": _numbers(record["note"])["mbs"],
        "global_batch": int(record["batch"]),
    }
    return "megatron", options


def _foundry(record: dict[str, str]) -> tuple[str, dict[str, Any]]:
    options = {
        "gpus": int(record["gpus"]),
        "sharding": "fsdp",
        "micro_batch": _numbers(record["note"])["micro_batch"],
        "global_batch": int(record["batch"]),
        "recompute": "full" if "act_ckpt=True" in record["parallelism"] else "none",
    }
    return "llm-foundry", options


def _torchtitan(record: dict[str, str]) -> tuple[str, dict[str, Any]]:
    """Degrees stand in the layout or in the note; with stages each copy passes as many micro-batches as stages."""
    kind, note, local = record["parallelism"], record["note"], int(record["batch"].removeprefix("local="))
    degrees = {name: int(n) for text in (note, kind) for name, n in re.findall(r"\b(TP|PP|CP) ?(\d+)", text)}
    tp, pp, cp = (degrees.get(name, 1) for name in ("TP", "PP", "CP"))
    gpus = int(record["gpus"])
    options: dict[str, Any] = {
        "gpus": gpus,
        "tp": tp,
        "pp": pp,
        "virtual_pp": 2 if "Interleaved" in kind else 1,
        "cp": cp,
        "sharding": "fsdp",
        "micro_batch": local // pp,
        "global_batch": local * gpus // (tp * pp * cp),
        "recompute": "full" if "Full activation" in note else "selective",
        "overlap": "all" if "AsyncTP" in kind + note else "gradients",
    }
    return "torchtitan" if "compile" in kind + note else "torchtitan-eager", options


def _fms(record: dict[str, str]) -> tuple[str, dict[str, Any]]:
    """Some blocks are recomputed where the table says selective; how many is not stated."""
    gpus, local = int(record["gpus"]), int(record["batch"].removeprefix("local="))
    options: dict[str, Any] = {"gpus": gpus, "sharding": "fsdp", "micro_batch": local, "global_batch": local * gpus}
    if "No AC" in record["parallelism"]:
        options["recompute"] = "none"
    return "torchtitan", options


def _numbers(text: str) -> dict[str, int]:
    """Whole numbers of ``name=value;...``; 1 for a value that is none."""
    return {name: int(n) if n.isdecimal() else 1 for name, n in re.findall(r"(\w+)=([^;\[]+)", text)}
