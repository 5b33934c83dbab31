"""Python, the command line and HTTP give one answer, to the last digit, each in its own process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cdmpp.cli.demo import running_server
from cdmpp.client.messages import program_fields
from cdmpp.predict.predictor import LatencyPredictor
from cdmpp.programs.frontends.load import load_programs
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SOURCES = (
    "linear:m=512,n=4096,k=1024,dtype=float16",
    "linear:m=64,n=4096,k=4096,dtype=fp8,scaling=channel",
    "moe:tokens=64,hidden=2048,intermediate=1024,experts=32,topk=4,dtype=fp8,balance=power_law_1.2",
    "mla_decode:batch=16,past_len=4096,heads=16,module=true,weight_dtype=fp8,scaling=block128",
    str(ROOT / "examples" / "transformer_block.onnx"),
)
DEVICES = ("a100-pcie-40gb", "l4")
FIGURES = (
    "name",
    "program_hash",
    "device",
    "backend",
    "protocol",
    "framework",
    "implementation",
    "model_id",
    "latency_s",
    "lower_s",
    "upper_s",
    "quantiles",
    "domain",
    "domain_score",
    "roofline_s",
)


def figures(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: result[key] for key in FIGURES} for result in results]


def test_three_doors_give_one_answer(predictor: LatencyPredictor, monkeypatch) -> None:
    monkeypatch.delenv("CDMPP_MODEL", raising=False)
    programs = [p for source in SOURCES for p in load_programs(source).programs]
    by_device = [predictor.predict(programs, device, protocol="eager", framework="pytorch") for device in DEVICES]
    here = figures([p.to_dict() for row in zip(*by_device, strict=True) for p in row])

    items = [
        {"program": program_fields(p), "device": d, "protocol": "eager", "framework": "pytorch"}
        for p in programs
        for d in DEVICES
    ]
    with running_server() as server:
        over_http = server.request("POST", "/predict", {"items": items})["results"]
    assert figures(over_http) == here

    options = [text for device in DEVICES for text in ("--device", device)]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "cdmpp.cli.main",
            "predict",
            *SOURCES,
            *options,
            "--protocol",
            "eager",
            "--framework",
            "pytorch",
            "--json",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    assert figures(json.loads(done.stdout)["results"]) == here
