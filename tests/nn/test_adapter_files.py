"""An adapted model's folder: found with its base, refused without, damaged or in the way."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from cdmpp.artifact.adapted import ADAPTER, check_target
from cdmpp.artifact.folder import MANIFEST, TENSORS
from cdmpp.artifact.load import load_artifact
from cdmpp.errors import ArtifactError
from cdmpp.predictor import LatencyPredictor
from tests.nn.synthetic import write_artifact

TEXT = "linear:m={},n=256,k=512"


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A base and a model adapted from it, beside each other."""
    base, mine = tmp_path / "base", tmp_path / "mine"
    write_artifact(base)
    predictor = LatencyPredictor.load(base)
    texts = [TEXT.format(m) for m in (16, 64, 256, 1024, 4096, 8192)]
    measured = [(t, 1.5 * (a.latency_s or 0)) for t, a in zip(texts, predictor.predict(texts, "h200"), strict=True)]
    predictor.adapt(measured, "h200").save(mine)
    return base, mine


def edit(folder: Path, **values: Any) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps({**manifest, **values}))


def test_nothing_of_the_base_is_copied(folders: tuple[Path, Path]) -> None:
    base, mine = folders
    assert sorted(f.name for f in mine.iterdir()) == [ADAPTER, MANIFEST]
    manifest = json.loads((mine / MANIFEST).read_text())
    assert manifest["kind"] == "adapter" and manifest["base"]["path"] == "../base"
    assert manifest["base"]["model_id"] == load_artifact(base).model_id


def test_both_may_be_moved_together_and_the_base_may_stay_where_it_was(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    base, mine = folders
    model_id = load_artifact(mine).model_id
    (tmp_path / "far" / "away").mkdir(parents=True)
    elsewhere = shutil.move(mine, tmp_path / "far" / "away" / "mine")
    assert load_artifact(elsewhere).model_id == model_id  # by the absolute path of the day
    shutil.move(base, tmp_path / "far" / "away" / "base")
    assert load_artifact(elsewhere).model_id == model_id  # by the relative one


def test_without_its_base_or_with_another_one_it_is_refused(folders: tuple[Path, Path]) -> None:
    base, mine = folders
    shutil.rmtree(base)
    with pytest.raises(ArtifactError, match="is an adapter of synthetic-"):
        load_artifact(mine)
    write_artifact(base, seed=1)
    with pytest.raises(ArtifactError, match="another model"):
        load_artifact(mine)


def test_damage_is_told(folders: tuple[Path, Path]) -> None:
    _, mine = folders
    payload = (mine / ADAPTER).read_bytes()
    (mine / ADAPTER).write_bytes(payload[:-1] + b"x")
    with pytest.raises(ArtifactError, match="checksum"):
        load_artifact(mine)
    (mine / ADAPTER).write_bytes(payload)
    edit(mine, process={"constant": 1, "unheard": 2})
    with pytest.raises(ArtifactError, match="damaged"):
        load_artifact(mine)
    edit(mine, numeric=["flops"])
    with pytest.raises(ArtifactError, match="other features"):
        load_artifact(mine)
    (mine / ADAPTER).unlink()
    with pytest.raises(ArtifactError, match="not a model folder"):
        load_artifact(mine)


def test_nothing_else_is_written_over(folders: tuple[Path, Path], tmp_path: Path) -> None:
    base, mine = folders
    artifact = load_artifact(base)
    with pytest.raises(ArtifactError, match="base model itself"):
        check_target(base, artifact)
    write_artifact(tmp_path / "other")
    with pytest.raises(ArtifactError, match="not an adapted model"):
        check_target(tmp_path / "other", artifact)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ArtifactError, match="not an adapted model"):
        check_target(tmp_path / "file", artifact)
    (tmp_path / "empty").mkdir()
    for free in (tmp_path / "empty", tmp_path / "new", mine):
        check_target(free, artifact)
    assert (base / TENSORS).is_file()
