"""Requests whose answers are stored: predictions, replays, and every planner at a fixed number of steps."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cdmpp import LatencyPredictor, make_plan
from cdmpp.errors import CdmppError
from cdmpp.predict.prediction import Prediction

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "docs" / "examples"

OPERATORS = [
    "linear:m=512,n=4096,k=1024,bias=true",
    "linear:m=1,n=4096,k=4096,dtype=float16",
    "linear:m=8192,n=8192,k=8192,dtype=bfloat16",
    "linear:m=7,n=13,k=5,dtype=int8",
    "bmm:batch=96,m=128,n=128,k=64,dtype=float16",
    "conv2d:n=8,c_in=64,h=56,w=56,c_out=64,kh=3,kw=3,pad_h=1,pad_w=1",
    "conv2d:n=8,c_in=64,h=56,w=56,c_out=64,kh=1,kw=1,direction=bwd_weight,dtype=float16",
    "softmax:rows=16384,cols=4096",
    "layernorm:rows=4096,cols=768",
    "rmsnorm:rows=4096,cols=4096,dtype=bfloat16",
    "gelu:rows=4096,cols=4096",
    "add:rows=4096,cols=1024,dtype=float16",
    "embedding:rows=4096,cols=1024,table_rows=8192",
    "attention_prefill:batch=2,q_len=2048,heads=16,kv_heads=16,head_dim=128,dtype=float16",
    "attention_decode:batch=32,past_len=2048,heads=32,kv_heads=8,head_dim=128,dtype=bfloat16",
    "linear:m=0,n=1,k=1",
    "not_an_operator:m=1",
]
CUSTOM_DEVICE = {
    "name": "my-gpu",
    "vendor": "Example",
    "arch": "imaginary",
    "kind": "gpu",
    "compute_units": 64,
    "cores_per_unit": 128,
    "clock_hz": 1.8e9,
    "mem_bandwidth_bytes_per_s": 640e9,
    "peak_flops_fp32": 29.5e12,
    "peak_flops_fp16_matrix": 118e12,
    "l2_bytes": 32e6,
}
SETTINGS: list[tuple[Any, str, str | None]] = [
    ("t4", "kernel", None),
    ("a100-pcie-40gb", "eager", "pytorch"),
    ("a100-sxm4-80gb", "graph", "vllm"),
    ("l4", "kernel", None),
    ("h100-sxm", "graph", "trtllm"),
    ("mi250-gcd", "kernel", "miopen"),
    (CUSTOM_DEVICE, "kernel", None),
    ("no-such-device", "kernel", None),
]
#: Changes to an example request, by the example's file name: more paths of the same planner.
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "afd": [{"tpot_s": 0.1}],
    "application": [{"max_steps": 40, "seed": 1}],
    "cluster": [{"gpus": 12}, {"reclaim": 2}],
    "pipeline": [
        {"seed": 3, "max_steps": 64},
        {"max_activations": None, "max_steps": 64},
        {"models": [{"stages": 4, "micro_batches": 6, "forward_s": 0.003, "backward_s": 0.007}], "max_steps": 64},
    ],
    "pipeline_modules": [
        {"seed": 2, "max_steps": 200},
        {"memory_bytes": 12e9, "knobs": ["keep", "recompute"], "max_steps": 50},
        {"memory_bytes": 16e9, "knobs": ["keep", "offload"], "host_bandwidth_bytes_per_s": 2e10, "max_steps": 50},
    ],
    "precision": [{"max_steps": 2000}],
    "rl": [
        {"mode": "async"},
        {"layout": "separate", "objective": "cost", "slack": 0.1},
        {"layout": "shared"},
        {"seed": 5, "draws": 4, "lengths": {"samples": [100, 250, 900, 4000, 120, 8000, 640, 333]}},
    ],
    "split": [{"max_steps": 50}],
}


def _predictions(predictor: LatencyPredictor) -> Iterator[tuple[str, Any]]:
    for device, protocol, framework in SETTINGS:
        name = device if isinstance(device, str) else device["name"]
        try:
            predictions = predictor.predict(
                OPERATORS, device, protocol=protocol, framework=framework, quantiles=(0.1, 0.5, 0.9)
            )
        except CdmppError as error:
            yield f"predict/{name}/{protocol}/{framework}", _error(error)
            continue
        yield f"predict/{name}/{protocol}/{framework}", [_figures(p) for p in predictions]
    programs = _tir_programs()
    yield "predict/tir", [_figures(p) for p in predictor.predict(programs, "intel-xeon-amx-2t-avx2")]
    yield "predict/tir/t4", [_figures(p) for p in predictor.predict(programs, "t4")]


def _figures(prediction: Prediction) -> dict[str, Any]:
    """A prediction as JSON values; of an error only its code, for its words may be improved."""
    answer = prediction.to_dict()
    if "error" in answer:
        answer["error"] = answer["error"]["code"]
    return answer


def _error(error: CdmppError) -> dict[str, str]:
    return {"error": error.code}


def _tir_programs() -> list[dict[str, Any]]:
    """The first scheduled programs of the project's own measurements."""
    import pyarrow.parquet as pq

    table = pq.read_table(ROOT / "data" / "cdmpp-measured" / "records.parquet", columns=["program", "program_kind"])
    texts = [row["program"] for row in table.slice(0, 40).to_pylist() if row["program_kind"] == "tvm_json"]
    return [{"tvm_json": text} for text in dict.fromkeys(texts)][:8]


def _requests() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Case name, planner, request; searches end by ``max_steps``, never by time."""
    for file in sorted(EXAMPLES.glob("*.json")):
        kind = file.stem.partition("_")[0]
        request = json.loads(file.read_text())
        searches = kind in ("pipeline", "rl", "split", "precision", "application")
        if searches:
            request.setdefault("max_steps", 100)
            request["budget_s"] = 300
        yield f"plan/{file.stem}", kind, request
        for number, changes in enumerate(VARIANTS.get(file.stem, [])):
            variant = copy.deepcopy(request)
            variant.update(changes)
            yield f"plan/{file.stem}/{number}", kind, variant


def make_answers() -> Iterator[tuple[str, Any]]:
    """Yield the name of every case and its answer as JSON values."""
    predictor = LatencyPredictor.load()
    yield from _predictions(predictor)
    for name, planner, request in _requests():
        try:
            yield name, make_plan(planner, request, predictor)
        except CdmppError as error:
            yield name, _error(error)
