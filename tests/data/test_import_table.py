"""Importing a table writes another file, never over the table."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cdmpp.data.load import import_table
from cdmpp.errors import DataError


def test_a_table_is_not_overwritten_by_its_own_records(tmp_path: Path) -> None:
    path = tmp_path / "gemm.parquet"
    columns = {"op": ["linear"], "device": ["Tesla T4"], "framework": ["vllm"], "dtype": ["bfloat16"]}
    pq.write_table(pa.table({**columns, "m": [1], "n": [2], "k": [3], "latency_us": [4.0]}), path)
    before = path.read_bytes()
    with pytest.raises(DataError, match="the table itself"):
        import_table(path, path)
    assert path.read_bytes() == before
    assert len(import_table(path, tmp_path / "records.parquet")) == 1
