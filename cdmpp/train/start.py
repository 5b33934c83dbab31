"""The start of a training run from the weights of a trained model."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.numpy import load

from cdmpp.errors import ArtifactError, DataError
from cdmpp.model.artifact.folder import TENSORS, check_seal, no_model_folder, read_manifest
from cdmpp.model.nn.config import NetworkConfig, member_prefixes
from cdmpp.model.nn.network import LatencyNetwork
from cdmpp.model.nn.weights import transferred
from cdmpp.train.config import TrainConfig
from cdmpp.train.dataset import Dataset
from cdmpp.utils.files import MAX_MODEL_BYTES, read_bytes

#: Fields of the data's configuration that decide which programs are in the test part.
_SPLIT = ("split", "test_share", "validation_share", "test_networks")
#: Fields of the network that do not change its arrays.
_FREE = ("dropout", "schedule_version")


def start_from(folder: Path, network: LatencyNetwork, dataset: Dataset, config: TrainConfig) -> None:
    """Set the network's weights to those of a trained model.

    The model may have been trained with fewer input columns and with other devices (:mod:`cdmpp.model.nn.weights`). The
    scalers of new columns stay as they were fitted to the dataset. A damaged folder is an ArtifactError; a model with
    another network, or trained on rows that this run holds out, is a DataError.
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
        payload = read_bytes(folder / TENSORS, MAX_MODEL_BYTES)
    except OSError as error:
        raise no_model_folder(folder, error) from None
    if hashlib.sha256(payload).hexdigest() != manifest["sha256"].get(TENSORS):
        raise ArtifactError(f"{folder / TENSORS} does not match its checksum", hint="copy the model folder again")
    arrays = {name[8:]: value for name, value in load(payload).items() if name.startswith("network.")}
    buffers = {name: value for name, value in network.named_buffers() if name.endswith(("_mean", "_scale"))}
    fitted = {name: value.numpy(force=True) for name, value in buffers.items()}  # they may be on a GPU
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


def check_start(config: TrainConfig, sealed: Sequence[str]) -> list[str]:
    """Refuse a start from a model that may have been trained on programs of sealed networks: its manifest does not say
    that they were sealed, nor does ``start_has_seen`` name them.

    ``sealed``: networks that the run's data seal (:mod:`cdmpp.data.split_file`). Returns those that neither the run nor
    its start has seen.
    """
    start, known = config.optimiser.start_from, config.optimiser.start_has_seen
    if start is None or not sealed:
        return list(sealed)
    stored = read_manifest(Path(start)).get("data", {}).get("sealed", ())
    seen = sorted(set(sealed) - set(stored) - set(known))
    if seen:
        raise DataError(
            f"{start} may have been trained on the sealed networks {', '.join(seen)}",
            hint="leave optimiser.start_from out, or name them in optimiser.start_has_seen",
        )
    return sorted(set(sealed) - set(known))


def _check_network(folder: Path, manifest: dict[str, Any], config: TrainConfig) -> None:
    hint = "set [network] to the values of the model in optimiser.start_from, or leave start_from out"
    try:
        stored = asdict(NetworkConfig.of_manifest(manifest["network"]))
    except (TypeError, ValueError) as error:
        raise DataError(f"{folder} has another network: {error}", hint=hint) from None
    wanted = {name: value for name, value in asdict(config.network).items() if name not in _FREE}
    other = [f"{name} = {stored[name]!r}, not {value!r}" for name, value in wanted.items() if stored[name] != value]
    if other:
        raise DataError(f"{folder} has another network: {', '.join(other)}", hint=hint)


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
