"""Whole serving systems against published measurements, per engine profile.

``python -m benchmarks.serving_truth --public-data DIR --configs DIR``: reads ``e2e_llm_serving.csv.gz``, prices every cell
with ``kernels-only``, with the shipped profile of its engine and with profiles calibrated to four other rows of its device
and engine, and writes ``benchmarks/results/serving_truth.json`` and ``docs/serving-accuracy.md``. ``--fit`` prints the
figures of the shipped profiles, fitted to all these rows.

Rows below the time in which the device reads the weights are counted and left out.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from cdmpp import LatencyPredictor
from cdmpp.errors import CdmppError
from cdmpp.predict.engines import EngineProfile, load_engine
from cdmpp.predict.llm import read_config
from cdmpp.predict.llm.calibrate import fit, fit_engine
from cdmpp.utils.writing import replacing

RESULTS = Path("benchmarks/results/serving_truth.json")
PAGE = Path("docs/serving-accuracy.md")
#: Devices of the sources by our name. A GPU of the MI250 rows is one die: dense models take the time of one, though
#: Mixtral's 93 GB, which no die holds, are there as well (left out, counted).
DEVICES = {
    "Nvidia A100 GPU": "a100-sxm4-40gb",
    "Nvidia GH200 GPU": "gh200",
    "AMD MI250 GPU": "mi250-gcd",
    "b200_sxm": "b200",
    "b300_sxm": "b300",
    "gb200": "gb200",
    "gb300": "gb300",
    "h100_sxm": "h100-sxm",
    "h200_sxm": "h200",
}
ENGINES = {"vLLM": "vllm-2024", "TensorRT-LLM": "trtllm-2024", "vllm": "vllm", "sglang": "sglang", "trtllm": "trtllm"}
WEIGHTS = {"fp8": "float8_e4m3", "fp8_block": "float8_e4m3", "nvfp4": "float4_e2m1"}
#: Draws of four rows.
DRAWS, DRAWN = 5, 4


@dataclass
class Cell:
    """A measured row in our terms."""

    source: str
    engine: str
    device: str
    model: str
    config: str
    measurement: dict[str, Any]
    version: str


class Remembering:
    """A predictor that asks each query once."""

    def __init__(self, predictor: LatencyPredictor) -> None:
        self._predictor, self.model_id, self.artifact = predictor, predictor.model_id, predictor.artifact
        self._known: dict[Any, Any] = {}

    def predict_queries(self, queries: Sequence[Any], **options: Any) -> list[Any]:
        """Predictions in order."""
        keys = [(q.program.operator.text(), q.device.name, q.protocol, q.framework) for q in queries]
        new = {key: query for key, query in zip(keys, queries, strict=True) if key not in self._known}
        self._known.update(zip(new, self._predictor.predict_queries(list(new.values()), **options), strict=True))
        return [self._known[key] for key in keys]


def read_cells(data: Path, configs: Path) -> list[Cell]:
    """Rows of static batches and of closed loops that our names cover, one for repeated keys (their median)."""
    with (configs / "aliases.csv").open(encoding="utf-8") as file:
        alias = {row["name"]: row["config"] for row in csv.DictReader(file) if row["table"] == "serving"}
    table = pd.read_csv(data / "e2e_llm_serving.csv.gz", low_memory=False)
    wanted = (table.kind == "static_batch") | ((table.kind == "closed_loop_agg") & (table.quantity == "tpot_ms"))
    table = table[wanted & table.device.isin(DEVICES) & table.model.isin(alias) & table.framework.isin(ENGINES)]
    table = table[(table.tp * table.dp == table.gpus) | (table.kind == "static_batch")]
    keys = ["source", "framework", "device", "model", "tp", "ep", "dp", "dtype", "batch"]
    keys += ["input_tokens", "output_tokens"]
    cells = []
    for key, group in table.groupby(keys, dropna=False):
        source, framework, device, model, tp, ep, dp, dtype, batch, tokens, output = key
        static = source == "argonne"
        measurement = {
            "batch": int(batch),
            "input": int(tokens),
            "output": int(output),
            "tp": int(tp),
            "dtype": "float16" if static else "bfloat16",
            ("total_s" if static else "tpot_s"): float(group.value.median()) / 1e3,
        }
        if not static:
            measurement["closed_loop"] = True
            measurement |= {"ep": max(1, int(ep)), "dp": max(1, int(dp))}
            if str(dtype).startswith(("fp8", "fp4")):
                measurement["kv_dtype"] = "float8_e4m3"
            if weights := WEIGHTS.get(str(dtype).partition("gemm=")[2].partition(";")[0]):
                measurement["weights"] = weights
        cells.append(
            Cell(
                str(source),
                ENGINES[str(framework)],
                DEVICES[str(device)],
                str(model),
                str(configs / alias[str(model)]),
                measurement,
                str(group.version.iloc[0]),
            )
        )
    return cells
