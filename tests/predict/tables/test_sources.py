"""Tables are read in slices that can be read in any order and together have every row once."""

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cdmpp.errors import CdmppError, DataError
from cdmpp.predict.tables.sources import MAX_LINE, open_table

COUNT = 103


def write_table(path: Path) -> Path:
    """Rows 0 to COUNT, with cells that contain separators, quotes and line breaks."""
    texts = [f'relu:rows={i},"x",\n{i}' if i % 7 == 0 else f"relu:rows={i}" for i in range(COUNT)]
    match path.suffix:
        case ".parquet":
            pq.write_table(pa.table({"n": range(COUNT), "program": texts}), path, row_group_size=40)
        case ".csv":
            quoted = (t.replace('"', '""') for t in texts)
            lines = [f'{i},"{text}"\r\n' + ("\r\n" if i % 5 == 0 else "") for i, text in enumerate(quoted)]
            path.write_bytes(("\ufeffn,program\r\n" + "".join(lines)).encode())
        case ".txt":
            path.write_text("".join(f"relu:rows={i}\n" for i in range(COUNT)))
    return path


@pytest.mark.parametrize("name", ["t.csv", "t.parquet", "t.txt"])
@pytest.mark.parametrize("rows", [1, 10, 40, 1000])
def test_slices_in_any_order_have_every_row_once(tmp_path: Path, name: str, rows: int) -> None:
    path = write_table(tmp_path / name)
    source = open_table(path)
    slices = list(source.slices(rows))
    assert max(part.rows for part in slices) <= rows and sum(part.rows for part in slices) == COUNT
    assert [part.read for part in slices] == sorted(part.read for part in slices)
    assert slices[-1].read == pytest.approx(1.0, abs=0.1)

    def read(parts: list[Any]) -> dict[int, Any]:
        return {row.number: row.cells["program"] for part in parts for row in source.read(part, ["program"])}

    in_order = read(slices)
    assert list(in_order) == list(range(1, COUNT + 1))
    assert all(text.startswith(f"relu:rows={number - 1}") for number, text in in_order.items())
    random.Random(0).shuffle(slices)
    shuffled = read(slices)
    assert (shuffled == in_order and list(shuffled) != list(in_order)) or len(slices) == 1


def test_text_numbers_rows_by_line_and_leaves_comments_out(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_text("# layers\n\nrelu:rows=1,cols=2\n  relu:rows=2,cols=2  \n")
    source = open_table(path)
    rows = [row for part in source.slices(2) for row in source.read(part, ["program"])]
    assert [(row.number, row.cells) for row in rows] == [
        (3, {"program": "relu:rows=1,cols=2"}),
        (4, {"program": "relu:rows=2,cols=2"}),
    ]


def test_invalid_records_are_errors_of_their_rows(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(b"n,program\n1,a,b\n2,ok\n3," + b"x" * (3 * MAX_LINE) + b"\n4,\xff\n")
    source = open_table(path)
    rows = {row.number: row.cells for part in source.slices() for row in source.read(part, ["program"])}
    assert isinstance(rows[1], CdmppError) and "3 cells, the header has 2" in rows[1].message
    assert rows[2] == {"program": "ok"}
    assert isinstance(rows[3], CdmppError)
    assert rows[4] == {"program": "\ufffd"}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.csv", b"", "no header"),
        ("t.csv", b"a,a\n", "two columns called 'a'"),
        ("t.parquet", b"PAR1", "not a Parquet file"),
        ("t.xlsx", b"", "not read as tables"),
        ("missing.csv", None, "cannot be read"),
    ],
)
def test_invalid_files_are_refused(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        open_table(path)
