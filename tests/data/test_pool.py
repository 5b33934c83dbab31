"""A pool of programs for a model folder: from training programs, spread over their kinds."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from cdmpp.data.pool import POOL, model_pool, pool_of, read_pool
from cdmpp.data.records import Measurement, from_measurements, write_records
from cdmpp.data.table import MeasurementTable
from cdmpp.errors import ArtifactError, DataError
from cdmpp.programs.operators import parse_operator


def table() -> MeasurementTable:
    texts = [
        *(f"linear:m={m},n=64,k=64" for m in range(1, 901)),
        *(f"softmax:rows={rows},cols=8" for rows in range(1, 101)),
        "conv2d:n=1,c_in=3,h=8,w=8,c_out=4,kh=3,kw=3",
        "linear:m=65536,n=65536,k=65536",  # seconds on any GPU
        "copy:rows=1000000,cols=4096",  # too large for some
    ]
    return from_measurements([Measurement(text, "operator", "t4", 1e-3) for text in texts])


def test_every_kind_has_a_share(tmp_path: Path) -> None:
    measured = table()
    content = pool_of(measured, measured.program_key, programs=100)
    assert content == pool_of(measured, np.concatenate([measured.program_key] * 2), programs=100)
    assert content != pool_of(measured, measured.program_key, programs=100, seed=1)
    (tmp_path / POOL).write_bytes(content)
    pool = model_pool(tmp_path)
    counts = Counter(spec.operator for spec in pool)
    assert counts["conv2d"] == 1 and 15 < counts["softmax"] < 35 and 60 < counts["linear"] < 80
    assert len({spec.hash() for spec in pool}) == len(pool)
    assert max(spec.sizes().get("m", 0) for spec in pool) <= 900 and counts["copy"] == 0


def test_only_training_programs(tmp_path: Path) -> None:
    measured = table()
    allowed = measured.program_key[:50]
    pool = json.loads(pool_of(measured, allowed, programs=1000))["programs"]
    assert len(pool) == 50
    hashes = {measured.program_hashes[key] for key in allowed}
    assert {parse_operator(text).hash() for text in pool} == hashes


def test_user_pools_are_read(tmp_path: Path) -> None:
    lines = tmp_path / "mine.txt"
    lines.write_text("# a comment\n\nlinear:m=1,n=2,k=3\nlinear:k=3,m=1,n=2\n  relu:rows=1,cols=1\n")
    assert [s.text() for s in read_pool(lines)] == [
        "linear:dtype=float32,m=1,n=2,k=3",
        "relu:dtype=float32,rows=1,cols=1",
    ]
    write_records(table(), tmp_path / "records.parquet")
    assert len(read_pool(tmp_path / "records.parquet")) == 1003
    assert len(read_pool(tmp_path)) == 1003


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.txt", "linear:m=1,n=2,k=3\nsoft\n", "line 2: operator 'soft'"),
        ("a.txt", "# nothing\n", "columns"),
        ("a.json", "{}", "no pool"),
        ("a.json", '{"cdmpp_programs": 1, "programs": ["relu:rows=1"]}', "program 1: relu"),
        ("a.json", '{"cdmpp_programs": 2, "programs": []}', "another version"),
        ("a.csv", "x,y\n1,2\n", "no known table"),
    ],
)
def test_pools_that_cannot_be_read(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        read_pool(tmp_path / name)


def test_a_model_without_a_pool_and_one_with_a_broken_one(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="carries no pool") as caught:
        model_pool(tmp_path)
    assert "--pool FILE" in caught.value.hint
    (tmp_path / POOL).write_text("[]")
    with pytest.raises(ArtifactError, match="no pool"):
        model_pool(tmp_path)
