"""Small tables in the layouts of the public data, with values made up for the tests."""

import gzip
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest

from tests.data.layouts import LAYOUTS, Columns, layout_of


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> tuple[str, Columns, Columns]:
    """Name, needed and optional columns of each layout in turn."""
    return (request.param, *layout_of(request.param))


@pytest.fixture
def columns_of() -> Callable[[str], Columns]:
    """Needed columns of one layout."""
    return lambda name: layout_of(name)[0]


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    """Write columns to a file whose suffix chooses the format."""

    def write(columns: Columns | pa.Table, name: str = "table.parquet") -> Path:
        path = tmp_path / name
        table = columns if isinstance(columns, pa.Table) else pa.table(columns)
        if name.endswith(".parquet"):
            pq.write_table(table, path)
        else:
            with (gzip.open if name.endswith(".gz") else open)(path, "wb") as stream:
                pa_csv.write_csv(table, stream)
        return path

    return write
