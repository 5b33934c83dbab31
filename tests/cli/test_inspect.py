"""``cdmpp inspect`` and ``cdmpp devices``: features of a program, figures of a device."""

from pathlib import Path

import pytest

from cdmpp.features.encode import encode_operator
from cdmpp.features.schedule import SCHEDULE_COLUMNS
from cdmpp.features.schema import COLUMN, GROUPS, SCHEMA_HASH
from cdmpp.programs.operators import parse_operator
from cdmpp.programs.program import TensorProgram
from tests.cli.conftest import ROOT, Run

TEXT = "linear:m=64,n=128,k=32,bias=true"


def test_json_shows_the_model_inputs(run: Run) -> None:
    report = run.json("inspect", TEXT)
    assert report["feature_schema"] == SCHEMA_HASH
    (program,) = report["programs"]
    encoded = encode_operator(parse_operator(TEXT))
    assert program["hash"] == TensorProgram.from_operator(TEXT).hash
    assert program["flops"] == encoded.totals[0, 0] and program["bytes"] == encoded.totals[0, 1]
    assert [leaf["position"] for leaf in program["leaves"]] == encoded.positions.tolist()
    for leaf, row in zip(program["leaves"], encoded.leaves[0], strict=True):
        shown = {n: about["scaled"] for columns in leaf["vector"].values() for n, about in columns.items()}
        assert set(leaf["vector"]) <= set(GROUPS)
        assert shown == pytest.approx({name: float(row[i]) for name, i in COLUMN.items() if row[i]}, rel=1e-6)
    loops = [(node["loop"], node["extent"]) for node in program["tree"] if "loop" in node]
    assert {64, 128, 32} <= {extent for _, extent in loops}
    assert sum("leaf" in node for node in program["tree"]) == len(program["leaves"])


def test_scaled_features_have_their_unscaled_values(run: Run) -> None:
    leaves = run.json("inspect", TEXT)["programs"][0]["leaves"]
    product = max(leaves, key=lambda leaf: leaf["vector"]["loops"]["trips"]["value"])
    assert product["vector"]["loops"]["trips"]["value"] == 64 * 128 * 32
    assert product["vector"]["contraction"]["contraction_k"]["value"] == 32
    assert product["reduces"] and not product["init"]
    for columns in product["vector"].values():
        for about in columns.values():
            if "value" in about:
                assert 2 ** abs(about["scaled"]) - 1 == pytest.approx(abs(about["value"]), rel=1e-4)


def test_text_shows_hash_loops_and_vectors(run: Run) -> None:
    lines = run.ok("inspect", TEXT).stdout.splitlines()
    assert lines[0] == TensorProgram.from_operator(TEXT).name
    assert f"hash {TensorProgram.from_operator(TEXT).hash}" in lines[1]
    assert any(line.strip().startswith("for ") and "in 128" in line for line in lines)
    assert any("(reduces), position" in line for line in lines)
    assert any(line.startswith("  contraction: ") for line in lines)


def test_every_program_of_a_model_is_shown(run: Run) -> None:
    report = run.json("inspect", ROOT / "examples" / "transformer_block.onnx")
    assert len({program["hash"] for program in report["programs"]}) == len(report["programs"]) > 3


@pytest.mark.tvm
def test_tvm_program_has_schedule_features(run: Run, tmp_path: Path) -> None:
    from cdmpp.programs.lowering import lower, to_json

    path = tmp_path / "program.json"
    path.write_text(to_json(lower(parse_operator("softmax:rows=64,cols=32"))))
    (program,) = run.json("inspect", path)["programs"]
    assert program["family"] == "tir" and len(program["leaves"]) >= 4
    for leaf in program["leaves"]:
        schedule = leaf["vector"]["schedule"]
        assert set(schedule) <= set(SCHEDULE_COLUMNS)
        # At most one row of 32 floats per array in the innermost loop.
        assert 64 <= schedule["working_set_1"]["value"] <= 3 * 32 * 4 + 64
    assert any(line.startswith("  schedule: ") and " B)" in line for line in run("inspect", path).stdout.splitlines())


def test_invalid_programs_are_refused(run: Run) -> None:
    messages = run.refused("inspect", "linear:m=1", "--json")
    assert messages.startswith("error: ") and "hint: " in messages


def test_sustained_shares_are_the_data_sheets_seconds_over_predicted_ones(run: Run) -> None:
    rows = run.json("devices", "rtx-4090", "h100-sxm", "--sustained")["sustained"]
    assert {row["device"] for row in rows} == {"rtx-4090", "h100-sxm"}
    for row in rows:
        assert 0 < row["lower_share"] <= row["share"] <= row["upper_share"] and row["latency_s"] > 0
        assert row["kernel"] == "launch" or row["share"] > 0.2
    (product,) = (r for r in rows if (r["device"], r["kernel"], r["dtype"]) == ("rtx-4090", "product", "bfloat16"))
    assert product["share"] == pytest.approx(2 * 8192**3 / 165.2e12 / product["latency_s"], rel=0.02)
    assert product["domain"] == "near" and "carried over from" in product["domain_reason"]
    text = run("devices", "rtx-4090", "--sustained").stdout
    assert text.startswith("device") and "pass over memory" in text and "interval" in text
