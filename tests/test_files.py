"""Bounded reading: endless files, unpacked content and wide headers are refused early."""

import gzip
import io
import os
import threading
from pathlib import Path

import pytest

from cdmpp.cli.reading import read_json
from cdmpp.data.raw import read_columns, read_raw
from cdmpp.devices import load_device
from cdmpp.errors import CdmppError, DataError
from cdmpp.llm import read_config
from cdmpp.plan.sweep import read_sweep
from cdmpp.predict.tables.sources import open_table
from cdmpp.programs.frontends.load import load_programs
from cdmpp.train.config import load_config
from cdmpp.utils import files
from cdmpp.utils.files import MAX_COLUMNS, check_columns, check_regular, open_gzip, read_at_most, read_bytes


def test_at_most_the_limit_is_read(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"12345")
    assert read_bytes(file, 5) == b"12345" == read_at_most(io.BytesIO(b"12345"), 5)
    for read in (lambda: read_bytes(file, 4), lambda: read_at_most(io.BytesIO(b"12345"), 4)):
        with pytest.raises(OSError, match="more than 4 bytes"):
            read()


def test_pipes_are_read_to_the_limit(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    writer = threading.Thread(target=lambda: fifo.write_bytes(b"{}"), daemon=True)
    writer.start()
    assert read_json(fifo) == {}
    writer.join(60)
    with pytest.raises(OSError, match="not a regular file"):
        check_regular(fifo)


@pytest.mark.timeout(60)
def test_endless_devices_are_refused(tmp_path: Path) -> None:
    def endless(suffix: str) -> Path:
        path = tmp_path / f"zero{suffix}"
        path.symlink_to("/dev/zero")
        return path

    reads = {
        ".json": (read_json, read_config, load_programs, lambda path: load_device(str(path))),
        ".toml": (read_sweep, load_config),
        ".onnx": (load_programs,),
        ".csv": (open_table, read_columns),
    }
    for suffix, functions in reads.items():
        path = endless(suffix)
        for read in functions:
            with pytest.raises(CdmppError, match="device"):
                read(path)


@pytest.mark.timeout(60)
def test_tables_of_many_columns_are_refused_at_once(tmp_path: Path) -> None:
    names = [f"column{i}" for i in range(200_000)]
    wide = tmp_path / "wide.csv"
    wide.write_text(",".join(names) + "\n" + ",".join("1" for _ in names) + "\n")
    for read in (open_table, read_columns):
        with pytest.raises(DataError, match="more than 4,096 columns"):
            read(wide)
    check_columns(wide, names[:MAX_COLUMNS])


def test_unpacking_is_bounded_by_the_size_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "table.csv.gz"
    table.write_bytes(gzip.compress(b"program,latency_us\n" + b"a,1\n" * 1_000_000))
    assert read_columns(table) == ["program", "latency_us"]
    monkeypatch.setattr(files, "_UNPACKED_BYTES", 0)
    with open_gzip(table) as stream, pytest.raises(OSError, match="unpacks to more than"):
        stream.read()
    with pytest.raises(DataError, match=r"no readable table: it unpacks to more than [\d,]+ bytes"):
        read_raw(table, ["program"])
