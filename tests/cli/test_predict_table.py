"""``cdmpp predict`` for tables: the predictor's results as rows, in order, with errors in their own columns."""

import csv
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cdmpp.predict.predictor import LatencyPredictor, Query
from cdmpp.predict.tables.answers import answer_columns, answer_row
from cdmpp.programs.program import TensorProgram
from tests.cli.conftest import ROOT, Run
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.slow

LEVELS = (0.1, 0.9)
PROGRAMS = [
    "linear:m=512,n=4096,k=1024,dtype=float16",
    "softmax:rows=4096,cols=512",
    "linear:m=0,n=1,k=1",
    "nothing:m=1",
    "",
    "all_reduce:bytes=1048576,ranks=8",
    "attention_prefill:batch=1,q_len=128,heads=8,kv_heads=2,head_dim=64,dtype=bfloat16",
]


def write_csv(path: Path, rows: list[dict[str, Any]]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return path


def read_csv(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(text.splitlines()))


def expected(predictor: LatencyPredictor, devices: list[str]) -> list[dict[str, Any]]:
    """Rows of the answer for PROGRAMS; those that are no program have None where the table's text is the name."""
    rows = []
    for number, text in enumerate(PROGRAMS, 1):
        for device in devices:
            try:
                prediction = predictor.predict_queries([Query(TensorProgram.from_operator(text), device)])[0]
            except ValueError:
                prediction = predictor.predict([text], device)[0]
            rows.append(dict(zip(answer_columns(LEVELS), answer_row(number, prediction, LEVELS), strict=True)))
    return rows


def test_csv_equals_the_predictions_to_the_last_digit(run: Run, predictor: LatencyPredictor, tmp_path: Path) -> None:
    table = write_csv(tmp_path / "ops.csv", [{"id": i, "program": text} for i, text in enumerate(PROGRAMS)])
    result = run.ok("predict", table, "-d", "t4", "-d", "l4")
    rows = read_csv(result.stdout)
    assert [(row["row"], row["device"]) for row in rows] == [
        (str(n), device) for n in range(1, len(PROGRAMS) + 1) for device in ("t4", "l4")
    ]
    for row, answer in zip(rows, expected(predictor, ["t4", "l4"]), strict=True):
        if row["name"] == "":  # the predictor calls an empty text an unsupported operator
            assert row["error_code"] == "data_error" and "empty" in row["error"]
            continue
        assert row == {name: "" if value is None else str(value) for name, value in answer.items()}
    assert "note: columns that are not read: id" in result.stderr
    assert "6 of 14 answers have an error; row 3: linear: m: " in result.stderr
    assert len(result.stderr.splitlines()) == 3  # no progress bar


@pytest.mark.parametrize("name", ["ops.txt", "ops.csv", "ops.parquet"])
def test_every_format_has_the_same_answers(run: Run, tmp_path: Path, name: str) -> None:
    table, out = tmp_path / name, tmp_path / "out.parquet"
    texts = [text for text in PROGRAMS if text]
    match table.suffix:
        case ".txt":
            table.write_text("\n".join(texts))
        case ".csv":  # the only column: its quotes may be left out
            table.write_text("program\n" + "\n".join(texts))
        case ".parquet":
            pq.write_table(pa.table({"program": texts}), table)
    result = run("predict", table, "-d", "t4", "--out", out, "--strict")
    assert result.exit_code == 3, result.output
    as_parquet = pq.read_table(out).to_pylist()
    assert result.stdout == ""
    rows = read_csv(run("predict", table, "-d", "t4").stdout)
    assert [{k: "" if v is None else str(v) for k, v in row.items()} for row in as_parquet] == rows
    assert [path.name for path in tmp_path.glob(".*.part")] == []


def test_fields_of_operators_as_columns(run: Run, tmp_path: Path) -> None:
    rows = [
        {"operator": "linear", "m": 512, "n": 4096, "k": 1024, "rows": "", "cols": "", "dtype": "float16", "bias": ""},
        {"operator": "softmax", "m": "", "n": "", "k": "", "rows": 4096, "cols": 512, "dtype": "", "bias": ""},
        {"operator": "softmax", "m": 1, "n": "", "k": "", "rows": 4096, "cols": 512, "dtype": "", "bias": ""},
    ]
    answers = read_csv(run("predict", write_csv(tmp_path / "fields.csv", rows), "-d", "t4").stdout)
    plain = tmp_path / "plain.txt"
    plain.write_text("\n".join(PROGRAMS[:2]))
    assert answers[:2] == read_csv(run("predict", plain, "-d", "t4").stdout)
    assert "m: unknown field" in answers[2]["error"] and answers[2]["name"] == "softmax:m=1,rows=4096,cols=512"
    # pandas stores integers with gaps as floats; Parquet of another tool may store the fields as a struct.
    floats = {name: [None if row[name] == "" else row[name] for row in rows] for name in rows[0]}
    for name in ("m", "n", "k", "rows", "cols"):
        floats[name] = [None if value is None else float(str(value)) for value in floats[name]]
    path = tmp_path / "fields.parquet"
    pq.write_table(pa.table(floats), path)
    assert read_csv(run("predict", path, "-d", "t4").stdout)[:2] == answers[:2]
    pq.write_table(
        pa.table({"program": pa.StructArray.from_arrays([pa.array(v) for v in floats.values()], floats)}), path
    )
    assert read_csv(run("predict", path, "-d", "t4").stdout)[:2] == answers[:2]


def test_row_has_its_own_device_and_settings(run: Run, predictor: LatencyPredictor, tmp_path: Path) -> None:
    text, norm = PROGRAMS[0], "rmsnorm:rows=1024,cols=4096,dtype=bfloat16"
    rows = [
        {"program": text, "device": "l4", "protocol": "eager", "framework": "pytorch", "backend": ""},
        {"program": text, "device": "t4", "protocol": "", "framework": "", "backend": "tvm"},
        {"program": text, "device": "t4x", "protocol": "", "framework": "", "backend": ""},
        {"program": text, "device": "t4", "protocol": "fast", "framework": "", "backend": ""},
        {"program": text, "device": "", "protocol": "", "framework": "", "backend": ""},
        {"program": json.dumps({"operator": "linear", "m": 512, "n": 4096, "k": 1024, "dtype": "float16"})}
        | {"device": "t4", "protocol": "", "framework": "", "backend": ""},
        *({"program": norm, "device": "t4", "implementation": name} for name in ("composed", "", "unfused")),
    ]
    rows[0]["implementation"] = ""
    result = run("predict", write_csv(tmp_path / "t.csv", rows), "--protocol", "graph", "--implementation", "tuned")
    answers = read_csv(result.stdout)
    tvm = TensorProgram.from_operator(text, "tvm")
    queries = [Query(TensorProgram.from_operator(text), "l4", "eager", "pytorch"), Query(tvm, "t4", "graph")]
    queries.append(Query(TensorProgram.from_operator(text), "t4", "graph"))
    queries += [Query(TensorProgram.from_operator(norm), "t4", "graph", None, name) for name in ("composed", "tuned")]
    figures = [str(p.latency_s) for p in predictor.predict_queries(queries)]
    assert [answers[i]["latency_s"] for i in (0, 1, 5, 6, 7)] == figures
    assert [answer["error_code"] for answer in answers[2:5]] == ["unknown_device", "data_error", "data_error"]
    # A TVM program has no implementation.
    assert [answers[i]["implementation"] for i in (0, 1, 5, 6, 7)] == ["tuned", "", "tuned", "composed", "tuned"]
    assert "implementation 'unfused' is not known; did you mean fused?" in answers[8]["error"]
    assert run("predict", tmp_path / "t.csv", "-d", "t4").stdout.count(",t4,") == len(rows)


def test_wrong_use_is_refused(run: Run, tmp_path: Path) -> None:
    table = tmp_path / "t.txt"
    table.write_text(PROGRAMS[0])
    other = write_csv(tmp_path / "other.csv", [{"latency": 1, "shape": 2}])
    cases = {
        ("predict", table, "-d", "t4x"): "no device named 't4x'",
        ("predict", table): "no device is named",
        ("predict", table, PROGRAMS[0], "-d", "t4"): "is predicted alone",
        ("predict", table, "-d", "t4", "--json"): "--json is not for tables",
        ("predict", PROGRAMS[0], "-d", "t4", "--out", "x.csv"): "--out is not for programs",
        ("predict", table, "-d", "t4", "--out", "x.json"): "not written in this format",
        ("predict", table, "-d", "t4", "--out", tmp_path / "none" / "x.csv"): "the folder does not exist",
        ("predict", other, "-d", "t4", "--out", other): "is the table itself",
        ("predict", other, "-d", "t4"): "no column names the programs; the table has latency, shape",
    }
    for arguments, message in cases.items():
        result = run(*arguments)
        assert result.exit_code == 1 and message in result.stderr, (arguments, result.output)
    assert run("predict", PROGRAMS[0]).exit_code == 2
    table.write_text("nothing:m=1\n")
    assert run("predict", table, "-d", "t4").exit_code == 1
    table.write_text("\n")
    assert "no rows" in run("predict", table, "-d", "t4").stderr


def test_killed_command_leaves_the_previous_file(tmp_path: Path) -> None:
    table, out = tmp_path / "t.txt", tmp_path / "out.csv"
    table.write_text("".join(f"relu:rows={i},cols=64\n" for i in range(1, 50_000)))
    out.write_text("before")
    command = [sys.executable, "-m", "cdmpp", "predict", str(table), "-d", "t4", "--out", str(out)]
    with subprocess.Popen(command, cwd=ROOT) as process:
        wait_until(lambda: any(path.stat().st_size > 1000 for path in tmp_path.glob(".out.csv.*.part")), "answers")
        process.send_signal(signal.SIGKILL)
        process.wait(PATIENCE_S)
    assert out.read_text() == "before"
