"""Requests as Parquet files: the same answers as from JSON, and errors that name the row and the column."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cdmpp import make_plan
from cdmpp.errors import CdmppError, DataError, FieldError
from cdmpp.plan.base.solve import read_request
from cdmpp.predict.predictor import LatencyPredictor
from cdmpp.simulate.replay.parquet import METADATA, read_parquet, write_parquet
from cdmpp.simulate.replay.records import _CHUNK, Nodes, as_json
from cdmpp.simulate.replay.schema import ReplayRequest

EXAMPLE = Path(__file__).resolve().parents[3] / "docs/examples/replay.json"
LINEAR = {"operator": "linear", "m": 64, "n": 64, "k": 64}
#: A node of each form.
VALUE: dict[str, Any] = {
    "nodes": [
        {"id": "a", "device": "rank0", "duration_s": 1, "records": ["done"]},
        {"id": "b", "device": "rank1", "stream": 1, "duration_s": 2e-5, "gap_s": 1e-6, "class": "gap"},
        {"id": "p", "device": "rank0", "program": LINEAR, "count": 2, "deps": ["a"]},
        {"id": "q", "device": "rank1", "programs": [{"program": LINEAR, "count": 3}], "waits": ["done"]},
        {"id": "s", "device": "rank0", "bytes": 1e6, "link": "net", "deps": ["p", "b"]},
        {"id": "c", "collective": {"op": "all_reduce", "ranks": ["rank0", "rank1"], "bytes": 8, "link": "net"}},
    ],
    "devices": {"rank0": "t4", "rank1": {"device": "l4", "gap_s": 1e-6}},
    "links": {"net": {"alpha_s": 1e-5, "bandwidth_bytes_per_s": 1e9}},
    "order": "listed",
}


def saved(path: Path, value: dict[str, Any]) -> Path:
    write_parquet(path, value, read_request(ReplayRequest, value).nodes)
    return path


def table(path: Path, columns: dict[str, Any], rest: str = "{}") -> Path:
    pq.write_table(pa.table(columns).replace_schema_metadata({METADATA: rest.encode()}), path)
    return path


def test_answer_is_that_of_the_json_request(predictor: LatencyPredictor, tmp_path: Path) -> None:
    for value in (VALUE, json.loads(EXAMPLE.read_text())):
        read = read_parquet(saved(tmp_path / "graph.parquet", value))
        assert make_plan("replay", read, predictor) == make_plan("replay", value, predictor)


def test_columns_may_be_dictionaries_or_nulls(tmp_path: Path) -> None:
    path = table(
        tmp_path / "g.parquet",
        {
            "id": ["a", "b"],
            "device": pa.array(["x", "x"]).dictionary_encode(),
            "duration_s": [1, 2],
            "deps": [None, ["a"]],
            "class": [None, "comm"],
        },
    )
    assert make_plan("replay", read_parquet(path))["makespan_s"] == 3


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ({"id": ["a", "b"], "device": ["x", "x"], "duration_s": [1.0, -1.0]}, "nodes.1.duration_s"),
        ({"id": ["a", "b"], "device": ["x", "x"], "duration_s": [1.0, float("nan")]}, "nodes.1.duration_s"),
        ({"id": ["a", "b"], "device": ["x", ""], "duration_s": [1.0, 1.0]}, "nodes.1.device"),
        ({"id": ["a", None], "device": ["x", "x"], "duration_s": [1.0, 1.0]}, "nodes.1.id"),
        ({"id": ["a", "b"], "device": ["x", "x"], "program": ["[1]", "[1]"]}, "nodes.0.program"),
        ({"id": ["a"], "device": ["x"], "duration_s": ["1"]}, "nodes.0.duration_s"),
        ({"id": ["a"], "device": ["x"], "duration_s": [1.0], "deps": [["b", ""]]}, "nodes.0.deps.1"),
        ({"id": ["a"], "durations": [1.0]}, "'durations'"),
        ({"device": ["a"]}, "no column 'id'"),
        ({"id": pa.array([], pa.string())}, "no rows"),
    ],
)
def test_error_names_row_and_column(tmp_path: Path, columns: dict[str, Any], text: str) -> None:
    with pytest.raises(FieldError, match=text):
        read_parquet(table(tmp_path / "g.parquet", columns))


def test_invalid_parquet_file_or_metadata_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.parquet").write_text("{}")
    for path in (
        tmp_path / "text.parquet",
        tmp_path / "none.parquet",
        table(tmp_path / "a.parquet", {"id": ["a"]}, "{"),
        table(tmp_path / "b.parquet", {"id": ["a"]}, '{"nodes": []}'),
    ):
        with pytest.raises(DataError, match=path.name):
            read_parquet(path)


def test_failed_write_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(CdmppError, match="cannot write"):
        saved(tmp_path / "missing" / "g.parquet", VALUE)
    assert not list(tmp_path.iterdir())


def test_long_list_of_nodes_is_checked_like_a_short_one() -> None:
    nodes = [{"id": str(i), "device": "x", "duration_s": 1.0} for i in range(_CHUNK + 2)]
    read = read_request(ReplayRequest, {"nodes": nodes})
    assert isinstance(read.nodes, Nodes)
    assert as_json(read.nodes) == nodes
    nodes[-1]["duration_s"] = -1
    with pytest.raises(FieldError) as error:
        read_request(ReplayRequest, {"nodes": nodes})
    assert error.value.path == f"nodes.{_CHUNK + 1}.duration_s"
