"""The checkpoint of a training run: one file, the same for any number of processes."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from cdmpp.errors import DataError
from cdmpp.model.nn.network import LatencyNetwork
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
