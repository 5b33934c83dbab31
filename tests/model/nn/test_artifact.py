"""Model folders: round trip, and every way to be damaged."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from cdmpp.devices import lookup
from cdmpp.errors import ArtifactError, UnknownDeviceError
from cdmpp.model.artifact.folder import MANIFEST, SEAL, TENSORS, sealed, trained_identity
from cdmpp.model.artifact.load import load_artifact
from cdmpp.model.artifact.trained import save_artifact
from cdmpp.model.nn.config import RETIRED
from cdmpp.predict.predictor import LatencyPredictor
from tests.model.nn.synthetic import DEVICES, network, random_inputs, write_artifact

pytestmark = pytest.mark.slow

PROGRAM = "softmax:rows=4096,cols=512"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_artifact(tmp_path / "model")
    return tmp_path / "model"


def edit(folder: Path, **changes: Any) -> None:
    """Change fields as somebody does who also renews the checksum."""
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(sealed(manifest | changes)))


def rename(folder: Path) -> None:
    """Give the manifest the identity of its content."""
    manifest = json.loads((folder / MANIFEST).read_text())
    edit(folder, model_id=trained_identity(manifest))


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
    custom_device = lookup("l4").model_copy(update={"name": "my-card", "compute_units": 44})
    artifact = load_artifact(folder)
    save_artifact(
        folder,
        artifact.network,
        artifact.domain,
        name="own",
        devices=["t4", "my-card", ""],
        calibration=artifact.calibration,
        details={},
        device_specs=[lookup("t4"), custom_device, lookup("l4")],
    )
    predictor = LatencyPredictor.load(folder)
    assert set(predictor.artifact.manifest["device_specs"]) == {"my-card"}
    assert predictor.artifact.trained_devices == [(1, lookup("t4")), (2, custom_device)]
    by_name, by_figures = (predictor.predict([PROGRAM], device)[0] for device in ("my-card", custom_device))
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
    "manifest is nested too deeply": (lambda f: (f / MANIFEST).write_text("[" * 200_000), "not JSON"),
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
    edit(folder, network=network_options(folder) | RETIRED)
    rename(folder)
    assert load_artifact(folder).config == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("positions", "none"),
        ("positions", "structural"),
        ("device_inputs", "absolute"),
        ("leaf_times", False),
        ("shared", True),
    ],
)
def test_folder_with_a_removed_option_is_refused(folder: Path, name: str, value: Any) -> None:
    edit(folder, network=network_options(folder) | {name: value})
    with pytest.raises(ArtifactError, match=f"option {name} = {value!r}") as caught:
        load_artifact(folder)
    assert caught.value.code == "artifact_error"
    assert "retrain" in caught.value.hint


HALVED = {"in": 0.5, "near": 1.0, "out": 1.5}


def test_a_changed_manifest_is_refused(folder: Path) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(manifest | {"calibration": HALVED}))
    with pytest.raises(ArtifactError, match="checksum"):
        load_artifact(folder)
    # The layout of the file may change.
    (folder / MANIFEST).write_text(json.dumps(dict(reversed(manifest.items()))))
    assert load_artifact(folder).model_id == manifest["model_id"]


@pytest.mark.parametrize(
    "changes",
    [
        {"calibration": HALVED},
        {"devices": [*DEVICES[:-1], ""]},
        {"domain": {"reach": 2.0, "contexts": []}},
        {"name": "other"},
    ],
)
def test_no_two_models_that_predict_differently_share_an_identity(folder: Path, changes: dict[str, Any]) -> None:
    before = load_artifact(folder).model_id
    edit(folder, **changes)
    with pytest.raises(ArtifactError, match="names itself"):
        load_artifact(folder)
    rename(folder)
    assert load_artifact(folder).model_id != before
    # Without a checksum, as earlier versions wrote it, a folder loads, with the identity of its content.
    manifest = json.loads((folder / MANIFEST).read_text())
    named = manifest["model_id"]
    del manifest[SEAL]
    (folder / MANIFEST).write_text(json.dumps(manifest | {"model_id": before}))
    assert load_artifact(folder).model_id == named != before


def test_reports_are_no_part_of_the_identity(folder: Path) -> None:
    before = load_artifact(folder).model_id
    edit(folder, metrics={"overall": {}}, libraries={"python": "4.0"})
    assert load_artifact(folder).model_id == before


STRANGE: tuple[Any, ...] = (None, "x", 3, -1.5, True, [], [1], [["a"]], {}, {"a": 1}, {"in": 0}, {"in": "x"}, 10**400)


@pytest.mark.parametrize("value", STRANGE, ids=lambda value: repr(value)[:12])
def test_any_value_of_any_field_is_refused_or_harmless(folder: Path, value: Any) -> None:
    """No field of a wrong type leaks another error, when the model is loaded or when it predicts."""
    original = json.loads((folder / MANIFEST).read_text())
    refused = 0
    places = [(name,) for name in original]
    places += [(name, key) for name in ("calibration", "domain", "network", "sha256") for key in original[name]]
    for *outer, last in places:
        changed = json.loads(json.dumps(original))
        inner = changed[outer[0]] if outer else changed
        for removed in (False, True):
            inner.pop(last) if removed else inner.update({last: value})
            (folder / MANIFEST).write_text(json.dumps(sealed(changed)))
            try:
                predictor = LatencyPredictor.load(folder)
            except ArtifactError as error:
                assert error.hint and len(str(error)) < 1500
                refused += 1
                continue
            answer = predictor.predict([PROGRAM], "t4")[0]
            assert answer.lower_s < answer.latency_s < answer.upper_s
            assert predictor.support()["model_id"] == predictor.model_id
    assert refused > len(places)
