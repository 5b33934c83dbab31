"""Finding the public tables, and saying which is missing and where it comes from."""

from __future__ import annotations

import pytest

from cdmpp.data.importers import IMPORTERS
from cdmpp.data.public import ENVIRONMENT, find_public_tables, list_public_tables, load_public, public_data_dir
from cdmpp.errors import DataError


@pytest.fixture
def folder(columns_of, save, tmp_path):
    for importer in IMPORTERS:
        save(columns_of(importer.name), importer.file_name)
    save({"device": ["x"], "step_time_ms": [1.0]}, "e2e_other.csv.gz")
    (tmp_path / "README.md").write_text("no table")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1")
    return tmp_path


def test_finds_every_table_and_passes_over_the_rest(folder, monkeypatch):
    assert {source: t.path.name for t in list_public_tables(folder) for source in t.sources} == {
        i.name: i.file_name for i in IMPORTERS
    }
    monkeypatch.setenv(ENVIRONMENT, str(folder))
    assert len(find_public_tables()) == len(IMPORTERS)
    table = load_public(sources=["vidur", "miopen"])
    assert sorted(table.source.used()) == ["miopen", "vidur"]


def test_missing_table_is_named_with_its_source(folder):
    (folder / "ops_vidur_fp16.parquet").unlink()
    with pytest.raises(DataError) as caught:
        find_public_tables(folder)
    assert "ops_vidur_fp16.parquet" in caught.value.message
    assert "microsoft/vidur @ 7d47513, MIT" in caught.value.hint
    assert len(find_public_tables(folder, ["neusight"])) == 1


def test_no_folder(tmp_path, monkeypatch):
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    with pytest.raises(DataError) as caught:
        public_data_dir()
    assert "--public-data" in caught.value.hint
    assert ENVIRONMENT in caught.value.hint
    with pytest.raises(DataError, match="absent"):
        public_data_dir(tmp_path / "absent")


def test_unknown_source(folder):
    with pytest.raises(DataError, match="atari"):
        find_public_tables(folder, ["atari"])
