"""Model folders: round trip, and every way to be damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from cdmpp.artifact.folder import MANIFEST, TENSORS
from cdmpp.artifact.load import load_artifact
from cdmpp.artifact.trained import save_artifact
from cdmpp.devices import lookup
from cdmpp.errors import ArtifactError, UnknownDeviceError
from cdmpp.predictor import LatencyPredictor
from tests.nn.synthetic import DEVICES, network, random_inputs, write_artifact

PROGRAM = "softmax:rows=4096,cols=512"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_artifact(tmp_path / "model")
    return tmp_path / "model"


def edit(folder: Path, **changes: Any) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(manifest | changes))


def test_round_trip(folder: Path) -> None:
    loaded = load_artifact(folder)
    assert loaded.devices == DEVICES
    assert loaded.calibration == {"in": 1.0, "near": 2.0, "out": 3.0}
    assert loaded.model_id.startswith("synthetic-")
    assert not loaded.network.training
    inputs = random_inputs(rows=5, leaves=3)
    with torch.inference_mode():
        for one, two in zip(loaded.network(mask=None, **inputs), network()(mask=None, **inputs), strict=True):
            assert torch.equal(one, two)
    assert sorted(p.name for p in folder.iterdir()) == [MANIFEST, TENSORS]


def test_a_device_that_no_table_knows_goes_with_the_model(folder: Path) -> None:
    mine = lookup("l4").model_copy(update={"name": "my-card", "compute_units": 44})
    artifact = load_artifact(folder)
    save_artifact(
        folder,
        artifact.network,
        artifact.domain,
        name="own",
        devices=["t4", "my-card", ""],
        calibration=artifact.calibration,
        details={},
        device_specs=[lookup("t4"), mine, lookup("l4")],
    )
    predictor = LatencyPredictor.load(folder)
    assert set(predictor.artifact.manifest["device_specs"]) == {"my-card"}
    assert predictor.artifact.trained_devices == [(1, lookup("t4")), (2, mine)]
    by_name, by_figures = (predictor.predict([PROGRAM], device)[0] for device in ("my-card", mine))
    assert by_name.latency_s == by_figures.latency_s > 0
    with pytest.raises(UnknownDeviceError):
        predictor.predict([PROGRAM], "your-card")
    edit(folder, device_specs={})
    with pytest.raises(ArtifactError, match="my-card"):
        load_artifact(folder)


def test_the_name_follows_the_content(tmp_path: Path) -> None:
    folders = (("a", 0), ("b", 0), ("c", 1))
    same, again, other = (write_artifact(tmp_path / name, seed)["model_id"] for name, seed in folders)
    assert same == again != other


def test_writing_again_replaces_the_folder(folder: Path) -> None:
    (folder / "left.txt").write_text("over")
    manifest = write_artifact(folder, seed=2)
    assert load_artifact(folder).model_id == manifest["model_id"]
    assert sorted(p.name for p in folder.parent.iterdir()) == [folder.name]
    assert not (folder / "left.txt").exists()


def test_no_pickle_in_it(folder: Path) -> None:
    for path in folder.iterdir():
        assert path.suffix in (".json", ".safetensors")
        assert b"torch._utils" not in path.read_bytes()


def damage_checksum(folder: Path) -> None:
    payload = bytearray((folder / TENSORS).read_bytes())
    payload[-1] ^= 1
    (folder / TENSORS).write_bytes(payload)


def truncate(folder: Path) -> None:
    payload = (folder / TENSORS).read_bytes()
    (folder / TENSORS).write_bytes(payload[: len(payload) // 2])


def other_tensors_with_their_checksum(folder: Path) -> None:
    import hashlib

    from safetensors.torch import save

    payload = save({"network.out.bias": torch.zeros(3)})
    (folder / TENSORS).write_bytes(payload)
    edit(folder, sha256={TENSORS: hashlib.sha256(payload).hexdigest()})


DAMAGE = {
    "checksum": (damage_checksum, "checksum"),
    "truncated": (truncate, "checksum"),
    "other tensors": (other_tensors_with_their_checksum, "damaged"),
    "feature schema": (lambda f: edit(f, feature_schema="0" * 16), "feature_schema"),
    "input schema": (lambda f: edit(f, input_schema="0" * 16), "input_schema"),
    "format": (lambda f: edit(f, format_version=999), "format"),
    "no checksum": (lambda f: edit(f, sha256={}), "damaged"),
    "network of another size": (lambda f: edit(f, network={"width": 32}), "damaged"),
    "unknown network field": (lambda f: edit(f, network={"wings": 2}), "damaged"),
    "unknown device": (lambda f: edit(f, devices=["t4", "l4", "nothing-of-ours"]), "nothing-of-ours"),
    "no devices": (lambda f: edit(f, devices=None), "damaged"),
    "manifest is not JSON": (lambda f: (f / MANIFEST).write_text("{"), "not JSON"),
    "manifest is a list": (lambda f: (f / MANIFEST).write_text("[]"), "format"),
    "no manifest": (lambda f: (f / MANIFEST).unlink(), "not a model folder"),
    "no tensors": (lambda f: (f / TENSORS).unlink(), "not a model folder"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_folders_are_refused(kind: str, folder: Path) -> None:
    damage, words = DAMAGE[kind]
    damage(folder)
    with pytest.raises(ArtifactError, match=words) as caught:
        LatencyPredictor.load(folder)
    assert caught.value.hint


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="not a model folder"):
        load_artifact(tmp_path / "nowhere")


def network_options(folder: Path) -> dict[str, Any]:
    options: dict[str, Any] = json.loads((folder / MANIFEST).read_text())["network"]
    return options


def test_folder_with_retired_options_at_their_supported_value_loads(folder: Path) -> None:
    expected = load_artifact(folder).config
    edit(folder, network=network_options(folder) | {"device_inputs": "ratio", "leaf_times": True})
    assert load_artifact(folder).config == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [("positions", "none"), ("positions", "structural"), ("device_inputs", "absolute"), ("leaf_times", False)],
)
def test_folder_with_a_removed_option_is_refused(folder: Path, name: str, value: Any) -> None:
    edit(folder, network=network_options(folder) | {name: value})
    with pytest.raises(ArtifactError, match=f"option {name} = {value!r}") as caught:
        load_artifact(folder)
    assert caught.value.code == "artifact_error"
    assert "retrain" in caught.value.hint
