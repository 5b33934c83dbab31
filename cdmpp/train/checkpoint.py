"""State of a training run: its checkpoint, and its start from the weights of a trained model.

A checkpoint is one file, the same for any number of processes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.numpy import load
from safetensors.torch import load_file, save_file

from cdmpp.errors import ArtifactError, DataError
from cdmpp.model.artifact.folder import TENSORS, check_seal, no_model_folder, read_manifest
from cdmpp.model.nn.config import NetworkConfig, member_prefixes
from cdmpp.model.nn.network import LatencyNetwork
from cdmpp.model.nn.weights import transferred
from cdmpp.train.config import TrainConfig
from cdmpp.train.dataset import Dataset

CHECKPOINT = "checkpoint.safetensors"
_ANOTHER = "choose another folder for this one (--run), or remove that folder"
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class State:
    """What a run has at a step.

    Attributes
    ----------
    network : LatencyNetwork
    optimiser : torch.optim.AdamW
    average : dict of str to Tensor
        Exponential average of the weights, by name.
    """

    network: LatencyNetwork
    optimiser: torch.optim.AdamW
    average: dict[str, torch.Tensor]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Copies of all tensors, by name in the file."""
        tensors = {f"network.{k}": v.detach().clone() for k, v in self.network.state_dict().items()}
        tensors |= {f"average.{k}": v.clone() for k, v in self.average.items()}
        names = [name for name, _ in self.network.named_parameters()]
        for index, state in self.optimiser.state_dict()["state"].items():
            tensors |= {f"optimiser.{names[index]}.{k}": v.clone() for k, v in state.items()}
        return tensors

    def reset_average(self) -> None:
        """Set the average to the present weights."""
        for name, parameter in self.network.named_parameters():
            self.average[name].copy_(parameter.detach())

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        """Set all tensors to those of a file."""
        self.network.load_state_dict({k[8:]: v for k, v in tensors.items() if k.startswith("network.")})
        for name in self.average:
            self.average[name].copy_(tensors[f"average.{name}"])
        state = self.optimiser.state_dict()
        state["state"] = {
            i: {k: tensors[f"optimiser.{name}.{k}"] for k in _MOMENTS}
            for i, (name, _) in enumerate(self.network.named_parameters())
            if f"optimiser.{name}.step" in tensors
        }
        self.optimiser.load_state_dict(state)


def identity_of(dataset: Dataset, config: TrainConfig) -> dict[str, str]:
    """Fields of a checkpoint that must match for it to be continued: the configuration of the steps, and the data,
    because ``--records`` may add to it."""
    return {
        "config": config.model_dump_json(exclude={"finish", "name"}),
        "data": dataset.fingerprint,
        "devices": json.dumps([device.name for device in dataset.devices]),
        # The networks that use a task decide its part and are not in the fingerprint.
        "parts": hashlib.sha256(dataset.rows.part.tobytes()).hexdigest()[:32],
    }


def write_checkpoint(out: Path, identity: dict[str, str], state: State, step: int, seconds: float) -> None:
    """Write the state to a temporary file and rename it, so that a kill leaves the old or the new checkpoint."""
    metadata = {"step": str(step), "seconds": str(seconds), **identity}
    aside = out / (CHECKPOINT + ".tmp")
    save_file(state.tensors(), str(aside), metadata)
    os.replace(aside, out / CHECKPOINT)


def read_checkpoint(out: Path, identity: dict[str, str]) -> tuple[int, float, dict[str, torch.Tensor]] | None:
    """Steps, seconds and tensors of the checkpoint in a run folder; None without one.

    Raises
    ------
    DataError
        The folder holds a run of another configuration or other data.
    """
    path = out / CHECKPOINT
    if not path.exists():
        return None
    from safetensors import safe_open

    with safe_open(str(path), framework="pt") as file:
        metadata = file.metadata() or {}
    if metadata.get("config") != identity["config"]:
        raise DataError(f"{out} holds a run with another configuration", hint=_ANOTHER)
    # A checkpoint without these fields may belong to any data.
    if any(metadata.get(name) != value for name, value in identity.items()):
        raise DataError(f"{out} holds a run on other data", hint=_ANOTHER)
    return int(metadata["step"]), float(metadata["seconds"]), load_file(str(path))


#: Fields of the data's configuration that decide which programs are in the test part.
_SPLIT = ("split", "test_share", "validation_share", "test_networks")
#: Fields of the network that do not change its arrays.
_FREE = ("dropout", "schedule_version")


def start_from(folder: Path, network: LatencyNetwork, dataset: Dataset, config: TrainConfig) -> None:
    """Set the network's weights to those of a trained model.

    The model may have been trained with fewer input columns and with other devices (:mod:`cdmpp.model.nn.weights`).
    The scalers of new columns stay as they were fitted to the dataset.

    Raises
    ------
    ArtifactError
        The folder holds no trained model, is damaged, or its manifest does not name its columns.
    DataError
        The model has another network, or was trained on rows that this run holds out.
    """
    manifest = read_manifest(folder)
    check_seal(folder, manifest)
    if "columns" not in manifest or "network" not in manifest:
        raise ArtifactError(
            f"{folder} does not name its input columns",
            hint="start_from takes a model that cdmpp train wrote with this version or a later one",
        )
    _check_network(folder, manifest, config)
    _check_split(folder, manifest, config)
    try:
        payload = (folder / TENSORS).read_bytes()
    except OSError as error:
        raise no_model_folder(folder, error) from None
    if hashlib.sha256(payload).hexdigest() != manifest["sha256"].get(TENSORS):
        raise ArtifactError(f"{folder / TENSORS} does not match its checksum", hint="copy the model folder again")
    arrays = {name[8:]: value for name, value in load(payload).items() if name.startswith("network.")}
    fitted = {name: value.numpy() for name, value in network.named_buffers() if name.endswith(("_mean", "_scale"))}
    names = [device.name for device in dataset.devices]
    try:
        state: dict[str, Any] = {}
        for prefix in member_prefixes(config.network):
            member_arrays = {
                name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)
            }
            member_arrays = {name: value for name, value in member_arrays.items() if not name.startswith("members.")}
            member = transferred(member_arrays, config.network, manifest["columns"], manifest["devices"], names, fitted)
            state |= {prefix + name: value for name, value in member.items()}
        network.load_state_dict({name: torch.from_numpy(value) for name, value in state.items()})
    except (KeyError, RuntimeError, ValueError) as error:
        raise ArtifactError(f"{folder} cannot be the start of this network: {str(error)[:300]}") from None


def check_start(config: TrainConfig, sealed: Sequence[str]) -> None:
    """Refuse a start from a model that may have been trained on programs of sealed networks.

    Parameters
    ----------
    config : TrainConfig
    sealed : sequence of str
        Networks that the run's data seal (:mod:`cdmpp.data.sealed`).

    Raises
    ------
    DataError
        The model's manifest does not say that these networks were sealed.
    """
    start = config.optimiser.start_from
    if start is None or not sealed:
        return
    stored = read_manifest(Path(start)).get("data", {}).get("sealed", ())
    seen = sorted(set(sealed) - set(stored))
    if seen:
        raise DataError(
            f"{start} may have been trained on the sealed networks {', '.join(seen)}",
            hint="leave optimiser.start_from out: train once from the beginning, then start from that model",
        )


def _check_network(folder: Path, manifest: dict[str, Any], config: TrainConfig) -> None:
    wanted = config.network.model_dump(exclude=set(_FREE))
    stored = NetworkConfig().model_dump() | manifest["network"]
    other = [f"{name} = {stored[name]!r}, not {value!r}" for name, value in wanted.items() if stored.get(name) != value]
    if other:
        raise DataError(
            f"{folder} has another network: {', '.join(other)}",
            hint="set [network] to the values of the model in optimiser.start_from, or leave start_from out",
        )


def _check_split(folder: Path, manifest: dict[str, Any], config: TrainConfig) -> None:
    """Refuse a model that has seen the rows on which this run is tested."""
    data, stored = config.data, manifest.get("config", {}).get("data", {})
    seen = sorted(set(data.holdout_devices) & {name for name in manifest["devices"] if name})
    if seen:
        raise DataError(
            f"{folder} was trained on {', '.join(seen)}, which data.holdout_devices holds out",
            hint="leave optimiser.start_from out",
        )
    for name in _SPLIT:
        value = data.model_dump(mode="json")[name]
        if stored.get(name) != value:
            raise DataError(
                f"{folder} was trained with data.{name} = {stored.get(name)!r}, not {value!r}: it may have seen the "
                "test part of this run",
                hint=f"set data.{name} to {stored.get(name)!r}, or leave optimiser.start_from out",
            )
