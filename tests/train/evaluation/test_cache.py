"""The feature cache: what goes in comes out, and nothing that is wrong with it matters."""

from pathlib import Path

import numpy as np
import pytest

from cdmpp.features.encode import EncodedPrograms, encode_operator
from cdmpp.programs.operators import parse_operator
from cdmpp.train.evaluation.cache import FeatureCache
from cdmpp.utils.cache import cache_dir


@pytest.fixture
def encoded() -> EncodedPrograms:
    return encode_operator(parse_operator("softmax:rows=512,cols=64"))


def entry(folder: Path) -> Path:
    return next(path for path in folder.rglob("*") if path.is_file())


def test_round_trip(tmp_path: Path, encoded: EncodedPrograms) -> None:
    cache = FeatureCache(tmp_path)
    assert cache.get("a program") is None
    cache.put("a program", encoded)
    found = FeatureCache(tmp_path).get("a program")
    assert found is not None
    for name in ("leaves", "positions", "totals"):
        mine, theirs = getattr(found, name), getattr(encoded, name)
        assert mine.dtype == theirs.dtype
        np.testing.assert_array_equal(mine, theirs)
    assert (found.dtype, found.family) == (encoded.dtype, encoded.family)
    assert cache.get("another") is None


@pytest.mark.parametrize("damage", [lambda b: b[:20], lambda b: b[:-4] + b"oops", lambda b: b"", lambda b: b[::-1]])
def test_a_damaged_entry_is_none(tmp_path: Path, encoded: EncodedPrograms, damage: object) -> None:
    cache = FeatureCache(tmp_path)
    cache.put("p", encoded)
    path = entry(tmp_path)
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    assert cache.get("p") is None
    cache.put("p", encoded)
    assert cache.get("p") is not None


def test_a_folder_that_cannot_be_written(tmp_path: Path, encoded: EncodedPrograms) -> None:
    (tmp_path / "file").write_text("not a folder")
    cache = FeatureCache(tmp_path / "file")
    cache.put("p", encoded)
    assert cache.get("p") is None


def test_no_part_is_left_behind(tmp_path: Path, encoded: EncodedPrograms) -> None:
    FeatureCache(tmp_path).put("p", encoded)
    assert [path.suffix for path in tmp_path.rglob("*") if path.is_file()] == [""]


def test_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CDMPP_CACHE", "/somewhere")
    assert cache_dir() == Path("/somewhere")
    monkeypatch.delenv("CDMPP_CACHE")
    assert cache_dir() == Path.home() / ".cache" / "cdmpp"
