"""The network of a group: trained without its devices, or read where it is."""

from __future__ import annotations

from pathlib import Path

from benchmarks.unseen_devices.figures import Array
from cdmpp.errors import ArtifactError
from cdmpp.model.artifact.folder import MANIFEST
from cdmpp.model.artifact.load import load_artifact
from cdmpp.model.artifact.model import Artifact
from cdmpp.model.artifact.trained import save_artifact
from cdmpp.model.nn.batch import NetworkInputs
from cdmpp.train.config import TrainConfig
from cdmpp.train.dataset import Dataset
from cdmpp.train.finish import calibrate, fit_domain
from cdmpp.train.fit import train, training_rows


def train_model(config: TrainConfig, dataset: Dataset, training: Array, folder: Path) -> None:
    """Train a network and write its model folder; ``training``: rows that its domain is fitted to."""
    network, summary = train(dataset, config, folder.with_name(f"{folder.name}.run"), progress=_progress)
    held = config.data.holdout_devices
    save_artifact(
        folder,
        network,
        fit_domain(dataset, training, config.seed),
        name=config.name,
        devices=["" if d.name in held else d.name for d in dataset.devices],
        calibration=calibrate(network, NetworkInputs(dataset.store, dataset.device_matrix), dataset, config),
        device_specs=dataset.devices,
        details={"config": config.model_dump(mode="json"), "train": summary},
    )


def _progress(step: int, steps: int, metrics: dict[str, float]) -> None:
    print(f"\r{step}/{steps} loss {metrics['loss']}", end="\n" if step == steps else "", flush=True)


def network_of(config: TrainConfig, dataset: Dataset, folder: Path) -> Artifact:
    """The model in ``folder``; it is trained first where there is none, continuing an interrupted run.

    ``dataset``: with the data sheets alone of the devices that the configuration holds out. ``folder``: of the model;
    the run grows beside it.
    Raises ArtifactError: the existing model was trained on a device that the configuration holds out.
    """
    if not (folder / MANIFEST).is_file():
        print(f"{config.name}: training {config.optimiser.steps} steps", flush=True)
        train_model(config, dataset, training_rows(dataset, config)[0], folder)
    artifact = load_artifact(folder)
    seen = set(config.data.holdout_devices) & set(artifact.devices)
    if seen:
        raise ArtifactError(
            f"{folder} was trained on {', '.join(sorted(seen))}", hint="choose another folder for --models"
        )
    return artifact
