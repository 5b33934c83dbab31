"""A table of collectives in the layout of ``comm_collectives``."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.layouts import layout_of


@pytest.fixture
def table_file(tmp_path: Path) -> Path:
    """A file of seven rows."""
    path = tmp_path / "comm_collectives.parquet"
    pq.write_table(pa.table(layout_of("comm_collectives")[0]), path)
    return path
