"""Library and host parts of the kit: variants, runtime on the CPU, and the way from export to records."""

from __future__ import annotations

import json
import types
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner, Result

from cdmpp.cli.main import app
from cdmpp.data.load import load_table
from cdmpp.data.measure.kit.export_library import Variant, export_library, extra_variants, new_sizes, variants_of
from cdmpp.data.measure.kit.import_results import import_results
from cdmpp.data.measure.kit.parts import read_part
from cdmpp.data.measure.runtime import further_calls, library
from cdmpp.data.measure.runtime.library_calls import Tensors, make_call
from cdmpp.data.measure.runtime.run import COMPLETE, FAILED, main
from cdmpp.devices import lookup
from cdmpp.errors import DataError, InvalidDeviceError
from cdmpp.programs.operators import make_operator, parse_operator
from tests.data.measure.stand_in_library import STAND_IN_S

POOL = [
    parse_operator(text)
    for text in (
        "linear:m=32,n=32,k=32,dtype=float32",
        "attention_encoder:batch=1,q_len=4,heads=2,kv_heads=2,head_dim=8,dtype=float16",
        "rmsnorm:rows=4,cols=8,dtype=float32",
        "rotary_embedding:rows=4,cols=16,head_dim=8,dtype=float32",
        "conv2d:n=1,c_in=4,h=8,w=8,c_out=4,kh=3,kw=3,groups=4,dtype=float32",
        "moe:tokens=4,hidden=8,intermediate=8,experts=2,topk=1",
    )
]
MODULES = {"library": "tests.data.measure.stand_in_library", "host": "tests.data.measure.stand_in_host"}
H100 = lookup("h100-sxm")
SMALL = {
    **dict.fromkeys(("n", "layers", "stride", "axis"), 1),
    **dict.fromkeys(("c", "c_in", "c_out", "rows", "cols", "batch", "steps", "input", "hidden"), 4),
    **dict.fromkeys(("length", "depth", "h", "w"), 6),
    **{"kernel": 3, "pad": 1, "groups": 2, "bidirectional": 1},
}


def test_variants_are_what_pytorch_can_run() -> None:
    kinds = {spec.operator: [v.kind for v in variants_of(spec, "training", 1e9)] for spec in POOL}
    assert kinds["linear"] == ["library"] == kinds["conv2d"]
    assert kinds["rmsnorm"] == ["library", "composed", "compiled"]
    assert kinds["rotary_embedding"] == ["composed", "compiled"]
    backends = ["FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH"]
    assert kinds["attention_encoder"] == ["library", *(f"library {name}" for name in backends)]
    assert kinds["moe"] == []
    without_scores = [v.sdpa for v in variants_of(POOL[1], "training", 0.0)]
    assert "MATH" not in without_scores


def test_new_sizes_are_valid_and_not_in_the_pool() -> None:
    pool = [spec for spec in POOL if spec.operator != "moe"]
    new = new_sizes(pool, np.random.default_rng(0), 3)
    assert not {spec.hash() for spec in new} & {spec.hash() for spec in pool}
    assert {spec.operator for spec in pool} <= {spec.operator for spec in new}
    assert all(any(variants_of(spec, "new", 1e12)) for spec in new)


def test_extra_variants_are_distinct_and_can_be_run() -> None:
    drawn = extra_variants([spec.canonical() for spec in POOL], 300, np.random.default_rng(0))
    assert len({variant.item()["id"] for variant in drawn}) == 300
    assert {v.operator["operator"] for v in drawn} == set(further_calls.FIELDS)
    assert not any(further_calls.extra_problem(variant.operator) for variant in drawn)
    kinds = {v.operator["of"]["operator"] for v in drawn if v.operator["operator"] == "backward"}
    assert "linear" in kinds and "lstm" in kinds


@pytest.mark.parametrize("operator", [name for name in further_calls.FIELDS if name != "backward"])
def test_extra_operators_and_their_backward_passes_run(operator: str) -> None:
    fields = {
        "operator": operator,
        "dtype": "float32",
        **{name: SMALL[name] for name in further_calls.FIELDS[operator]},
    }
    with torch.inference_mode():
        output = further_calls.make_extra(fields, Tensors(torch.device("cpu")))()
    assert torch.isfinite(output[0] if isinstance(output, tuple) else output).all()
    backward = {"operator": "backward", "of": fields}
    tensors = Tensors(torch.device("cpu"), gradients=True)
    gradients = further_calls.make_extra(backward, tensors)()
    assert [g.shape for g in gradients] == [leaf.shape for leaf in tensors.leaves]


@pytest.mark.parametrize("operator", ["rmsnorm", "layernorm", "softmax", "gelu", "silu", "silu_and_mul"])
def test_composed_form_computes_the_operator(operator: str) -> None:
    fields = parse_operator(f"{operator}:rows=4,cols=8").canonical()
    function, arguments = further_calls.make_composed(fields, Tensors(torch.device("cpu")))
    expected = make_call(fields, Tensors(torch.device("cpu")))()
    torch.testing.assert_close(function(*arguments), expected, rtol=2e-3, atol=2e-3)


def test_unknown_operators_are_failures() -> None:
    kind = library.Kind(types.SimpleNamespace(items=[]), Path())
    for implementation, message in (("extra", "unknown"), ("composed", "no composed form"), ("library", "no PyTorch")):
        item = {"operator": {"operator": "x", "dtype": "float32"}, "implementation": implementation, "protocols": []}
        assert message in kind.measure(item)["failure"]


def test_compiled_functions_are_compiled_and_called(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda function, **_: compiled.append(function) or function)
    item = Variant(parse_operator("gelu:rows=4,cols=8").canonical(), "compiled").item()
    assert library.operator_call(item, torch.device("cpu"))().shape == (4, 8)
    assert compiled == [further_calls.gelu]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_machine_without_gpu_is_one_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    compiled = Variant(parse_operator("gelu:rows=4,cols=8").canonical(), "compiled")
    export_library([compiled], [1e-5], H100, tmp_path / "job", about={"command": ""})
    for part in ("part-000.zip", "part-001.zip"):
        assert main([str(tmp_path / "job" / part), "--out", str(tmp_path / "out")]) == FAILED
        error = capfd.readouterr().err
        assert "finds no CUDA device" in error and "Traceback" not in error


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kit") / "job"
    variants = [v for spec in POOL for v in variants_of(spec, "training", 1e9) if v.implementation != "compiled"]
    variants.append(Variant(parse_operator("relu:rows=13,cols=8").canonical(), "library"))
    lstm = {"operator": "lstm", "dtype": "float32", **{name: SMALL[name] for name in further_calls.FIELDS["lstm"]}}
    variants.append(Variant({"operator": "backward", "of": lstm}, "extra"))
    export_library(variants, [1e-5] * len(variants), H100, folder, about={"command": "cdmpp measure"})
    return folder


@pytest.fixture(scope="module")
def results(job: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    out = tmp_path_factory.mktemp("kit-results")
    parts = [str(path) for path in sorted(job.glob("part-*.zip"))]
    assert main([*parts, "--out", str(out)], MODULES) == COMPLETE
    return sorted(out.glob("*.npz"))


def test_library_and_host_results_become_files(job: Path, results: list[Path], tmp_path: Path) -> None:
    import_results(job, results, tmp_path)
    table = load_table(tmp_path)
    texts = {table.program_fields(key)["operator"] for key in table.program_key.tolist()}
    assert texts == {"linear", "attention_encoder", "rmsnorm", "conv2d", "relu"}
    eager = table.protocol.is_("eager")
    measured = ~table.failed
    assert set(table.latency_s[measured].tolist()) == {STAND_IN_S} and measured[eager].sum() == 4
    assert "exit code 13" in " ".join(table.failure.used())  # type: ignore[union-attr]
    unmapped = pq.read_table(tmp_path / "unmapped.parquet").to_pylist()
    kinds = {(json.loads(row["operator"])["operator"], row["implementation"], row["sdpa"]) for row in unmapped}
    assert {("backward", "extra", ""), ("rmsnorm", "composed", "")} <= kinds
    assert ("attention_encoder", "library", "MATH") in kinds and len(unmapped) == 3 * len(kinds)
    rows = json.loads((tmp_path / "host.json").read_text())["rows"]
    by_case = {(row["case"], row["queue"]): row for row in rows if row["nodes"] == 1}
    assert by_case["view", "idle"]["host_s"] == STAND_IN_S and by_case["view", "full"]["failure"]
    card = (tmp_path / "README.md").read_text()
    assert "unmapped.parquet" in card and "host.json" in card


def test_import_refuses_operators_faster_than_the_peak(
    job: Path, results: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cdmpp.data.measure.kit.import_results.PEAK_SLACK", 1e-12)
    with pytest.raises(DataError, match="at its peak"):
        import_results(job, results, tmp_path / "records")
    assert not (tmp_path / "records").exists()


def test_command_chooses_operators_and_exports_them(tmp_path: Path) -> None:
    def run(*arguments: object) -> Result:
        return CliRunner().invoke(app, ["measure", "--export-library", *(str(a) for a in arguments)])

    pool = tmp_path / "pool.txt"
    sizes = [16 * 2**i for i in range(5)]
    lines = [f"linear:m={m},n={n},k=64" for m in sizes for n in sizes]
    lines += [f"rmsnorm:rows={rows},cols=256,dtype=float16" for rows in sizes]
    pool.write_text("\n".join([*lines, POOL[1].text(), POOL[-1].text()]))
    done = run("--device", "h100-sxm", "--count", 20, "--pool", pool, "--out", tmp_path / "job", "--json")
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    assert (answer["operators"], answer["new"], answer["parts"]) == (20, 12, 2)
    items = read_part(tmp_path / "job" / "part-000.zip").items
    assert {item["operator"]["operator"] for item in items} >= {"linear", "rmsnorm"}
    known = {spec.hash() for spec in map(parse_operator, lines)} | {POOL[1].hash()}
    for item in items:
        if item["implementation"] != "extra":
            assert (make_operator(item["operator"]).hash() in known) == (item["origin"] == "training")
    for arguments, message in [
        (("--out", tmp_path / "new"), "--device NAME"),
        (("--device", "h100-sxm"), "--out DIR"),
        (("--device", "h100-sxm", "--out", tmp_path / "new", "--on", "cuda"), "runs nothing"),
    ]:
        refused = run(*arguments)
        assert (refused.exit_code, message in refused.output) == (2, True), refused.output
    many = run("--device", "h100-sxm", "--count", 2000, "--pool", pool, "--out", tmp_path / "new")
    assert many.exit_code == 1 and not (tmp_path / "new").exists()


def test_export_refuses_a_cpu_and_a_used_folder(job: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidDeviceError, match="not a GPU"):
        export_library([], [], lookup("raspberry-pi-3"), tmp_path / "job")
    with pytest.raises(DataError, match="not empty"):
        export_library([], [], H100, job)
