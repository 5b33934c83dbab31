"""Python, the command line and HTTP give one answer, to the last digit, each in its own process."""

import json

import pytest

from cdmpp.cli.demo import running_server
from cdmpp.client.messages import program_fields
from cdmpp.predict.predictor import LatencyPredictor
from cdmpp.programs.frontends.load import load_programs
from tests.waiting import PATIENT, ROOT, run_python

pytestmark = pytest.mark.slow

SOURCES = (
    "linear:m=512,n=4096,k=1024,dtype=float16",
    "linear:m=64,n=4096,k=4096,dtype=fp8,scaling=channel",
    "moe:tokens=64,hidden=2048,intermediate=1024,experts=32,topk=4,dtype=fp8,balance=power_law_1.2",
    "mla_decode:batch=16,past_len=4096,heads=16,module=true,weight_dtype=fp8,scaling=block128",
    str(ROOT / "examples" / "transformer_block.onnx"),
)
DEVICES = ("a100-pcie-40gb", "l4")


def test_three_doors_give_one_answer(predictor: LatencyPredictor, monkeypatch) -> None:
    monkeypatch.delenv("CDMPP_MODEL", raising=False)
    programs = [p for source in SOURCES for p in load_programs(source).programs]
    by_device = [predictor.predict(programs, device, protocol="eager", framework="pytorch") for device in DEVICES]
    here = [p.to_dict() for row in zip(*by_device, strict=True) for p in row]

    items = [
        {"program": program_fields(p), "device": d, "protocol": "eager", "framework": "pytorch"}
        for p in programs
        for d in DEVICES
    ]
    with running_server(environment=PATIENT) as server:
        over_http = server.request("POST", "/predict", {"items": items})["results"]
    assert [{name: r[name] for name in h} for r, h in zip(over_http, here, strict=True)] == here

    options = [*(f"--device={device}" for device in DEVICES), "--protocol=eager", "--framework=pytorch", "--json"]
    done = run_python("-m", "cdmpp.cli.main", "predict", *SOURCES, *options)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)["results"]
    assert [{name: r[name] for name in h} for r, h in zip(printed, here, strict=True)] == here
