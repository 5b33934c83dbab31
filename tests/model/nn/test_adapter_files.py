"""An adapted model's folder: found with its base, refused without, damaged or in the way."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from cdmpp.errors import ArtifactError
from cdmpp.model.artifact.folder import MANIFEST, SEAL, TENSORS, sealed, trained_identity
from cdmpp.model.artifact.load import ADAPTER, check_target, load_artifact
from cdmpp.predict.predictor import LatencyPredictor
from tests.model.nn.synthetic import write_artifact

TEXT = "linear:m={},n=256,k=512"


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A base and a model adapted from it, beside each other."""
    base, adapted = tmp_path / "base", tmp_path / "mine"
    write_artifact(base)
    predictor = LatencyPredictor.load(base)
    texts = [TEXT.format(m) for m in (16, 64, 256, 1024, 4096, 8192)]
    measured = [(t, 1.5 * (a.latency_s or 0)) for t, a in zip(texts, predictor.predict(texts, "h200"), strict=True)]
    predictor.adapt(measured, "h200").save(adapted)
    return base, adapted


def edit(folder: Path, **values: Any) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(sealed({**manifest, **values})))


def test_nothing_of_the_base_is_copied(folders: tuple[Path, Path]) -> None:
    base, adapted = folders
    assert sorted(f.name for f in adapted.iterdir()) == [ADAPTER, MANIFEST]
    manifest = json.loads((adapted / MANIFEST).read_text())
    assert manifest["kind"] == "adapter" and manifest["base"]["path"] == "../base"
    assert manifest["base"]["model_id"] == load_artifact(base).model_id


def test_both_may_be_moved_together_and_the_base_may_stay_where_it_was(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    base, adapted = folders
    model_id = load_artifact(adapted).model_id
    (tmp_path / "far" / "away").mkdir(parents=True)
    elsewhere = shutil.move(adapted, tmp_path / "far" / "away" / "mine")
    assert load_artifact(elsewhere).model_id == model_id  # by the absolute path of the day
    shutil.move(base, tmp_path / "far" / "away" / "base")
    assert load_artifact(elsewhere).model_id == model_id  # by the relative one


def test_without_its_base_or_with_another_one_it_is_refused(folders: tuple[Path, Path]) -> None:
    base, adapted = folders
    shutil.rmtree(base)
    with pytest.raises(ArtifactError, match="is an adapter of synthetic-"):
        load_artifact(adapted)
    write_artifact(base, seed=1)
    with pytest.raises(ArtifactError, match="another model"):
        load_artifact(adapted)


def test_adapter_of_an_earlier_version_is_loaded_unless_it_has_tuned_weights(folders: tuple[Path, Path]) -> None:
    _, adapted = folders
    texts = [TEXT.format(m) for m in (16, 512)]
    expected = LatencyPredictor.load(adapted).predict(texts, "h200")
    edit(adapted, tuned=False)
    assert LatencyPredictor.load(adapted).predict(texts, "h200") == expected
    edit(adapted, tuned=True)
    with pytest.raises(ArtifactError, match="has tuned weights"):
        load_artifact(adapted)


def test_damaged_files_are_refused(folders: tuple[Path, Path]) -> None:
    _, adapted = folders
    payload = (adapted / ADAPTER).read_bytes()
    (adapted / ADAPTER).write_bytes(payload[:-1] + b"x")
    with pytest.raises(ArtifactError, match="checksum"):
        load_artifact(adapted)
    (adapted / ADAPTER).write_bytes(payload)
    edit(adapted, process={"constant": 1, "unheard": 2})
    with pytest.raises(ArtifactError, match="damaged"):
        load_artifact(adapted)
    edit(adapted, numeric=["flops"])
    with pytest.raises(ArtifactError, match="other features"):
        load_artifact(adapted)
    (adapted / ADAPTER).unlink()
    with pytest.raises(ArtifactError, match="not a model folder"):
        load_artifact(adapted)


def test_nothing_else_is_written_over(folders: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapted = folders
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
    for free in (tmp_path / "empty", tmp_path / "new", adapted):
        check_target(free, artifact)
    assert (base / TENSORS).is_file()


def test_the_identity_covers_the_adapter_and_the_manifest_of_its_base(folders: tuple[Path, Path]) -> None:
    base, adapted = folders
    manifest = json.loads((adapted / MANIFEST).read_text())
    (adapted / MANIFEST).write_text(json.dumps({**manifest, "width": 0.5}))
    with pytest.raises(ArtifactError, match="checksum"):
        load_artifact(adapted)
    edit(adapted, width=0.5)
    with pytest.raises(ArtifactError, match="names itself"):
        load_artifact(adapted)
    edit(adapted, width=manifest["width"])
    assert load_artifact(adapted).model_id == manifest["model_id"]
    own = json.loads((base / MANIFEST).read_text())
    changed = own | {"calibration": {"in": 0.5, "near": 1.0, "out": 1.5}}
    (base / MANIFEST).write_text(json.dumps(sealed(changed | {"model_id": trained_identity(changed)})))
    with pytest.raises(ArtifactError, match="another model"):
        load_artifact(adapted)


def test_folders_of_earlier_versions_load_with_the_identity_of_their_content(folders: tuple[Path, Path]) -> None:
    base, adapted = folders
    names = [json.loads((folder / MANIFEST).read_text())["model_id"] for folder in (base, adapted)]
    for folder in (base, adapted):
        manifest = json.loads((folder / MANIFEST).read_text())
        del manifest[SEAL]
        manifest["model_id"] = "old"
        if "base" in manifest:
            manifest["base"]["model_id"] = "old"
        (folder / MANIFEST).write_text(json.dumps(manifest))
    assert [load_artifact(folder).model_id for folder in (base, adapted)] == names


@pytest.mark.parametrize("value", [None, "x", 3, [], [1], {}, {"a": 1}], ids=repr)
def test_any_value_of_any_field_is_refused_or_harmless(folders: tuple[Path, Path], value: Any) -> None:
    _, adapted = folders
    original = json.loads((adapted / MANIFEST).read_text())
    places = [(name,) for name in original]
    places += [(name, key) for name in ("base", "device", "process", "names", "sha256") for key in original[name]]
    refused = 0
    for *outer, last in places:
        changed = json.loads(json.dumps(original))
        (changed[outer[0]] if outer else changed)[last] = value
        (adapted / MANIFEST).write_text(json.dumps(sealed(changed)))
        try:
            answer = LatencyPredictor.load(adapted).predict(["softmax:rows=4096,cols=512"], "h200")[0]
            assert answer.latency_s is not None and answer.latency_s > 0
        except ArtifactError as error:
            assert error.hint
            refused += 1
    assert refused > len(places) // 2
