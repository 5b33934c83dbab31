"""Checkpoints of a training run: one file, the same for any number of processes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from cdmpp.errors import DataError
from cdmpp.model.nn.network import LatencyNetwork

CHECKPOINT = "checkpoint.safetensors"
#: Averaged weights alone, a quarter of a checkpoint.
WEIGHTS = "weights.safetensors"
_ANOTHER = "choose another folder for this one (--run), or remove that folder"
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class State:
    """What a run has at a step."""

    network: LatencyNetwork
    optimiser: torch.optim.AdamW
    average: dict[str, torch.Tensor]  # exponential average of the weights, by name

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


def write_checkpoint(out: Path, identity: dict[str, str], state: State, step: int, seconds: float) -> None:
    """Write the state to a temporary file and rename it, so that a kill leaves the old or the new checkpoint."""
    _save(out / CHECKPOINT, state.tensors(), {"step": str(step), "seconds": str(seconds), **identity})


def _save(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    aside = path.with_name(path.name + ".tmp")
    save_file(tensors, str(aside), metadata)
    os.replace(aside, path)


def read_checkpoint(out: Path, identity: dict[str, str]) -> tuple[int, float, dict[str, torch.Tensor]] | None:
    """Steps, seconds and tensors of the checkpoint in a run folder; None without one. That of another configuration or
    other data is a DataError."""
    return _read(out / CHECKPOINT, identity)


def _read(path: Path, identity: dict[str, str]) -> tuple[int, float, dict[str, torch.Tensor]] | None:
    out = path.parent
    if not path.exists():
        return None
    with safe_open(str(path), framework="pt") as file:
        metadata = file.metadata() or {}
    if metadata.get("config") != identity["config"]:
        raise DataError(f"{out} holds a run with another configuration", hint=_ANOTHER)
    # A checkpoint without these fields may belong to any data.
    if any(metadata.get(name) != value for name, value in identity.items()):
        raise DataError(f"{out} holds a run on other data", hint=_ANOTHER)
    return int(metadata["step"]), float(metadata["seconds"]), load_file(str(path))


def write_weights(out: Path, identity: dict[str, str]) -> None:
    """Write the averaged weights of the checkpoint in a run folder beside it, in the same way."""
    stored = read_checkpoint(out, identity)
    if stored is None:
        raise DataError(f"{out} has no checkpoint", hint="train first")
    step, seconds, tensors = stored
    names = [name.removeprefix("network.") for name in tensors if name.startswith("network.")]
    weights = {name: tensors.get(f"average.{name}", tensors[f"network.{name}"]) for name in names}
    _save(out / WEIGHTS, weights, {"step": str(step), "seconds": str(seconds), **identity})


def read_weights(out: Path, identity: dict[str, str]) -> tuple[int, float, dict[str, torch.Tensor]]:
    """Steps, seconds and state of the network that :func:`write_weights` wrote; errors as of
    :func:`read_checkpoint`."""
    stored = _read(out / WEIGHTS, identity)
    if stored is None:
        raise DataError(f"{out} has no {WEIGHTS}", hint=f"python -m cdmpp.train.loop {out} writes it")
    return stored
