"""Weights of a trained network for other columns and devices, and training that starts from them."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from cdmpp.errors import ArtifactError, DataError
from cdmpp.model.artifact.folder import SEAL, read_manifest
from cdmpp.model.artifact.trained import save_artifact
from cdmpp.model.domain.score import Domain
from cdmpp.model.nn.batch import NetworkInputs, predict_rows
from cdmpp.model.nn.config import NetworkConfig
from cdmpp.model.nn.network import LatencyNetwork
from cdmpp.model.nn.weights import network_columns, transferred
from cdmpp.train.config import DataConfig, TrainConfig
from cdmpp.train.fit import train
from tests.model.nn.synthetic import DEVICES, TINY, dataset, network, random_inputs, training

#: Columns that the trained network of these tests lacks.
NEW = {"leaf": ("computes_int4", "read_1_reuse"), "inputs": ("scaling_nvfp4", "framework_triton", "log_operand_us")}


def earlier(config: NetworkConfig = TINY) -> tuple[dict[str, np.ndarray], dict[str, list[str]], LatencyNetwork]:
    """State of a network that does not read some columns, the columns that it reads, and the network that reads all
    and gives the same results."""
    made = network(config=config)
    columns = network_columns(config)
    kept = {axis: [i for i, name in enumerate(names) if name not in NEW[axis]] for axis, names in columns.items()}
    lost = {axis: [i for i, name in enumerate(names) if name in NEW[axis]] for axis, names in columns.items()}
    before = made.head_in.in_features - len(columns["inputs"]) - config.device_width
    with torch.no_grad():
        made.leaf_in.weight[:, lost["leaf"]] = 0
        made.condition.weight[:, lost["inputs"]] = 0
        made.head_in.weight[:, [before + i for i in lost["inputs"]]] = 0
    state = {name: value.numpy().copy() for name, value in made.state_dict().items()}
    logs = range(len(columns["leaf"]), made.leaf_in.in_features)
    state["leaf_in.weight"] = state["leaf_in.weight"][:, [*kept["leaf"], *logs]]
    state["condition.weight"] = state["condition.weight"][:, kept["inputs"]]
    own = range(made.head_in.in_features - config.device_width, made.head_in.in_features)
    head = [*range(before), *(before + i for i in kept["inputs"]), *own]
    state["head_in.weight"] = state["head_in.weight"][:, head]
    for name in ("leaf_mean", "leaf_scale"):
        state[name] = state[name][kept["leaf"]]
    for name in ("input_mean", "input_scale"):
        state[name] = state[name][kept["inputs"]]
    return state, {axis: [names[i] for i in kept[axis]] for axis, names in columns.items()}, made


@pytest.mark.parametrize("schedule", [False, True])
def test_new_columns_do_not_change_the_outputs(schedule: bool) -> None:
    config = replace(TINY, schedule=schedule)
    state, columns, whole = earlier(config)
    if schedule:
        lost = [i for i, name in enumerate(network_columns(config)["inputs"]) if name in NEW["inputs"]]
        with torch.no_grad():
            whole.get_parameter("leaf_times.call.weight")[:, lost] = 0
        state["leaf_times.call.weight"] = np.delete(
            whole.get_parameter("leaf_times.call.weight").detach().numpy(), lost, axis=1
        )
    moved = LatencyNetwork(config, 3).eval()
    new = transferred(state, config, columns, DEVICES, DEVICES)
    moved.load_state_dict({name: torch.from_numpy(value) for name, value in new.items()})
    inputs = random_inputs(5, 3)
    if schedule:
        extra = config.leaf_width - inputs["leaves"].shape[2]
        inputs["leaves"] = torch.cat((inputs["leaves"], torch.zeros(5, 3, extra)), dim=2)
    with torch.inference_mode():
        for one, two in zip(whole(mask=None, **inputs), moved(mask=None, **inputs), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)


def test_devices_are_matched_by_name_and_new_ones_start_as_not_trained_on() -> None:
    state, columns, _ = earlier()
    moved = transferred(state, TINY, columns, ["t4", "", "l4"], ["h100-sxm", "l4", "t4"])
    np.testing.assert_array_equal(moved["device.weight"], state["device.weight"][[0, 0, 3, 1]])


def test_a_column_that_was_constant_takes_the_new_scale_and_loses_its_weights() -> None:
    state, columns, _ = earlier()
    constant = columns["inputs"].index("gpu")
    state["input_scale"][constant] = 0
    place = network_columns(TINY)["inputs"].index("gpu")
    fitted = {name: np.full_like(network().state_dict()[name].numpy(), 7) for name in state if "_mean" in name}
    fitted |= {name: np.full_like(network().state_dict()[name].numpy(), 3) for name in state if "_scale" in name}
    moved = transferred(state, TINY, columns, DEVICES, DEVICES, fitted)
    assert moved["input_scale"][place] == 3 and moved["input_mean"][place] == 7
    assert not moved["condition.weight"][:, place].any()
    other = network_columns(TINY)["inputs"].index("flops")
    assert moved["input_scale"][other] == 1 and moved["condition.weight"][:, other].any()


def test_a_column_that_this_version_lacks_is_refused() -> None:
    state, columns, _ = earlier()
    columns["leaf"][0] = "forgotten"
    with pytest.raises(ValueError, match="does not compute: forgotten"):
        transferred(state, TINY, columns, DEVICES, DEVICES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model trained on the synthetic data set."""
    path = tmp_path_factory.mktemp("start")
    config = training(steps=150)
    trained, _ = train(dataset(), config, path / "run")
    save_artifact(
        path / "model",
        trained,
        Domain(np.zeros((1, 12), dtype=np.float32), 1.0, frozenset()),
        name="start",
        devices=list(DEVICES),
        calibration={"in": 1.0, "near": 2.0, "out": 3.0},
        details={"config": config.model_dump(mode="json")},
    )
    return path / "model"


def starting(folder: Path, **changes: object) -> TrainConfig:
    config = training(steps=1, learning_rate=1e-9, average_decay=0.0, warmup_steps=0)
    optimiser = replace(config.optimiser, start_from=str(folder))
    return config.model_copy(update={"optimiser": optimiser, **changes})


@pytest.mark.slow
def test_training_starts_from_a_model(folder: Path, tmp_path: Path) -> None:
    assert read_manifest(folder)["columns"] == network_columns(TINY)
    data = dataset()
    started, _ = train(data, starting(folder), tmp_path / "run")
    trained, _ = train(data, training(steps=150), tmp_path / "whole")
    inputs = NetworkInputs(data.store, data.device_matrix)
    for one, two in zip(*(predict_rows(made, inputs, data.rows) for made in (started, trained)), strict=True):
        np.testing.assert_allclose(one, two, rtol=0, atol=1e-4)


def test_a_start_that_saw_the_held_out_device_is_refused(folder: Path, tmp_path: Path) -> None:
    config = starting(folder, data=DataConfig(public=False, holdout_devices=("t4",)))
    with pytest.raises(DataError, match=r"was trained on t4, which data\.holdout_devices holds out"):
        train(dataset(), config, tmp_path / "run")


def test_a_start_with_another_split_is_refused(folder: Path, tmp_path: Path) -> None:
    config = starting(folder, data=DataConfig(public=False, test_share=0.2))
    with pytest.raises(DataError, match=r"test_share = 0\.1, not 0\.2"):
        train(dataset(), config, tmp_path / "run")


def test_a_start_with_another_network_is_refused(folder: Path, tmp_path: Path) -> None:
    config = starting(folder, network=replace(TINY, width=32))
    with pytest.raises(DataError, match="width = 16, not 32"):
        train(dataset(), config, tmp_path / "run")


@pytest.mark.parametrize("option", ["device_inputs", "unheard_of"])
def test_a_start_with_an_option_of_another_version_is_refused(folder: Path, tmp_path: Path, option: str) -> None:
    copy = tmp_path / "model"
    shutil.copytree(folder, copy)
    manifest = read_manifest(copy)
    changed = {name: value for name, value in manifest.items() if name != SEAL}
    changed["network"][option] = "absolute"
    (copy / "manifest.json").write_text(json.dumps(changed))
    with pytest.raises(DataError, match=option):
        train(dataset(), starting(copy), tmp_path / "run")


def test_a_start_without_column_names_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "manifest.json").write_text('{"format_version": 1, "devices": []}')
    with pytest.raises(ArtifactError, match="does not name its input columns"):
        train(dataset(), starting(folder), tmp_path / "run")
