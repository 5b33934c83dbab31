"""Valid programs, models and bodies that the mutations start from."""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

from cdmpp.plan.registry import PLANNERS
from cdmpp.predict.prediction import Prediction
from cdmpp.programs.operators import parse_operator
from cdmpp.programs.templates import template_json
from cdmpp_server.observe.ids import Signer
from cdmpp_server.plan.warm import REQUESTS

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PLANS = Path(__file__).resolve().parents[2] / "docs" / "examples"
OPERATORS = (
    *("linear:m=512,n=4096,k=1024,dtype=float16", "linear:m=4,n=8,k=16,bias=true", "bmm:batch=8,m=64,n=64,k=64"),
    *("conv2d:n=1,c_in=64,h=56,w=56,c_out=64,kh=3,kw=3,pad_h=1,pad_w=1", "softmax:rows=4096,cols=1024"),
    *("layernorm:rows=512,cols=768", "rmsnorm:rows=512,cols=768", "add:rows=512,cols=4096"),
    "attention_encoder:batch=1,q_len=256,heads=16,kv_heads=4,head_dim=64",
    "attention_decode:batch=4,heads=16,kv_heads=4,head_dim=64,past_len=511",
)
DEVICES = ("t4", "l4", "a100-pcie-40gb", "rtx-4090")
DEVICE = {
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


@cache
def operators() -> tuple[dict[str, Any], ...]:
    """Operator objects with all their fields."""
    return tuple(parse_operator(text).canonical() for text in OPERATORS)


def concrete_tir(text: str) -> dict[str, Any]:
    """TVM JSON of an operator without TVM: the shipped template with its sizes written in."""
    spec = parse_operator(text)
    document: dict[str, Any] = json.loads(template_json(spec.structural_class()))
    nodes, sizes = document["nodes"], spec.sizes()
    for node in list(nodes):
        if node["type"] == "ir.Var" and nodes[node["data"]["name"]]["data"] in sizes:
            value = sizes[nodes[node["data"]["name"]]["data"]]
            nodes.append({"type": "int", "data": value})
            node["type"], node["data"] = "ir.IntImm", {"ty": node["data"]["ty"], "value": len(nodes) - 1}
    return document


@cache
def tir_documents() -> tuple[dict[str, Any], ...]:
    """TVM JSON documents of different shapes."""
    texts = ("linear:m=4,n=8,k=16", "softmax:rows=32,cols=16", "layernorm:rows=8,cols=16", "add:rows=8,cols=8")
    return tuple(concrete_tir(text) for text in texts)


SCRIPTS = (
    """@T.prim_func(s_tir=True)
def copy(A: T.Buffer((128, 64), "float32"), B: T.Buffer((128, 64), "float32")):
    for i, j in T.grid(128, 64):
        with T.sblock("B"):
            vi, vj = T.axis.remap("SS", [i, j])
            B[vi, vj] = A[vi, vj] + T.float32(1)
""",
    """from tvm.script import ir as I
from tvm.script import tirx as T
@I.ir_module
class Module:
    @T.prim_func(s_tir=True)
    def main(
        A: T.Buffer((64, 64), "float32"), W: T.Buffer((64, 64), "float32"), C: T.Buffer((64, 64), "float32")
    ):
        T.func_attr({"tirx.noalias": True})
        for i_0, j_0 in T.grid(4, 8):
            for i_1 in T.parallel(16):
                for j_1, k in T.grid(8, 64):
                    with T.sblock("C"):
                        vi = T.axis.spatial(64, i_0 * 16 + i_1)
                        vj = T.axis.spatial(64, j_0 * 8 + j_1)
                        vk = T.axis.reduce(64, k)
                        with T.init():
                            C[vi, vj] = T.float32(0.0)
                        C[vi, vj] = C[vi, vj] + A[vi, vk] * W[vk, vj]
""",
)
HOSTILE_LINES = (
    *("import os", "__import__('os').system('true')", "T.evaluate(open('/etc/passwd'))", "while True: pass"),
    *("x = 2 ** 10 ** 9", "for q in T.grid(1000000, 1000000): pass", "@T.prim_func", "def g(): pass"),
    "T.evaluate(" + "(" * 150 + "1" + ")" * 150 + ")",
    "T.evaluate(" + "1 + " * 3000 + "1)",
    *("class K: pass", "lambda: 0", "T.evaluate(T.__dict__)", "T.func_attr({'a': 'b' * 10})", "B = A", "A[0, 0] = A"),
    *("exec('1')", "return", "assert False", "T.launch_thread('x', 3)", "with T.sblock('B'): pass", "# x"),
    *("\t\tpass", "'''", "T.call_extern('int32', 'system', 'true')", "for q in T.vectorized(99999999): pass"),
    *("x: T.Buffer((10**9,), 'float32') = 1", "T.evaluate(1 // 0)", "T.evaluate(1 << 100)"),
)


@cache
def feature_body() -> bytes:
    """A binary body of three rows."""
    from cdmpp.features.encode import encode_operator
    from cdmpp.predict.bulk import FeaturePart, FeatureQueries

    parts = [
        FeaturePart(encode_operator(parse_operator(text)), text.partition(":")[0], "t4")
        for text in ("linear:m=4,n=8,k=16", "softmax:rows=32,cols=16", "add:rows=8,cols=8")
    ]
    return FeatureQueries.of(parts).to_bytes()


def predict_body(items: int = 3) -> dict[str, Any]:
    """A valid body of /predict with every kind of field."""
    devices: list[Any] = [*DEVICES, DEVICE]
    return {
        "items": [
            {
                "id": str(i),
                "program": copy.deepcopy(operators()[i % len(operators())]),
                "device": copy.deepcopy(devices[i % len(devices)]),
                "backend": (None, "library", "tvm")[i % 3],
                "protocol": ("kernel", "graph", "eager")[i % 3],
                "framework": (None, "pytorch", "vllm")[i % 3],
            }
            for i in range(items)
        ],
        "quantiles": [0.1, 0.9],
        "strict": False,
        "model": None,
    }


def curve_body() -> dict[str, Any]:
    """A valid body of /curve."""
    return {
        "program": {"operator": "linear", "m": "batch*tokens", "n": 4096, "k": 1024},
        "axes": {"batch": [1, 2, 4], "tokens": [16, 32], "dtype": ["float16", "float32"]},
        "devices": ["t4", DEVICE],
        "backend": "library",
        "protocol": "kernel",
        "framework": "pytorch",
        "quantiles": [0.1, 0.9],
        "monotone": None,
        "model": None,
    }


#: Configuration of a language model with experts and latent attention: DeepSeek V2 Lite.
DEEPSEEK_V2_LITE: dict[str, Any] = {
    "model_type": "deepseek_v2",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1,
    "vocab_size": 102400,
}


def llm_body() -> dict[str, Any]:
    """A valid body of /llm: experts, latent attention and quantised weights."""
    return {
        "config": {**DEEPSEEK_V2_LITE, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
        "devices": ["h100-sxm", "l40s"],
        "tp": 2,
        "pp": 3,
        "ep": 4,
        "batch": 8,
        "input": 512,
        "output": 16,
        "dtype": "bfloat16",
        "weights": None,
        "framework": "sglang",
        "cuda_graph": False,
        "model": None,
    }


@cache
def plan_bodies() -> tuple[tuple[str, dict[str, Any]], ...]:
    """Valid requests of every kind of plan, each with its endpoint."""
    documents = []
    for file in sorted(PLANS.glob("*.json")):
        kind = PLANNERS.get(file.stem.partition("_")[0])
        if kind is not None:
            body = json.loads(file.read_text(encoding="utf-8"))
            if "max_steps" in body:
                body |= {"budget_s": 0.2, "max_steps": 10}
            documents.append((kind.path, body))
    small = [(PLANNERS[name].path, body) for name, forms in REQUESTS.items() for body in forms]
    return (*documents, *small)


@cache
def prediction_id() -> str:
    """A token in the service's format, signed with another key."""
    prediction = Prediction(
        "linear", "0" * 32, "t4", "library", "kernel", None, "base-1", latency_s=2e-4, lower_s=1e-4, upper_s=3e-4
    )
    signer = Signer(b"key of another service")
    return signer.receipts(1)[0] + signer.content(prediction, "0" * 16)


def observe_body() -> dict[str, Any]:
    """A valid body of /observe."""
    program = {"operator": "linear", "m": 64, "n": 64, "k": 64}
    return {
        "observations": [
            {"prediction_id": prediction_id(), "latency_s": 1e-4},
            {"program": program, "device": "t4", "protocol": "eager", "framework": "pytorch", "latency_s": 1e-4},
        ]
    }


def adapt_body() -> dict[str, Any]:
    """A valid body of /adapt."""
    return {
        "device": "t4",
        "records": [
            {"program": {"operator": "linear", "m": 64, "n": 64, "k": k}, "latency_s": 1e-5 * k} for k in (8, 16, 32)
        ],
        "k": None,
        "sampler": "kmeans",
        "seed": 0,
    }
