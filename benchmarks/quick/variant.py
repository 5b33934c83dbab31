"""What a variant can change, and the network that it is by default."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from benchmarks.quick.sample import HELD_OUT, QuickSample
from benchmarks.unseen_devices.network import train_model
from cdmpp.data.table import MeasurementTable
from cdmpp.model.artifact.load import load_artifact
from cdmpp.model.artifact.model import Artifact
from cdmpp.model.nn.config import NetworkConfig
from cdmpp.train.config import DataConfig, FinishConfig, TrainConfig
from cdmpp.train.dataset import MeasuredRows
from cdmpp.train.options import OptimiserConfig

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Fitted:
    """A fitted variant."""

    #: A model folder that answers as ``models/base`` does, with peers and the consistency step.
    artifact: Artifact | None = None
    #: log of the seconds of rows of the sample, where the variant is no network.
    log_s: Callable[[MeasuredRows], Array] | None = None


class QuickVariant:
    """The small network; a variant overrides what it changes.

    ``runs`` is the folder of model folders and checkpoints; an interrupted training is continued.
    """

    runs = Path("runs/quick")
    #: Name of the variant: its file.
    name = "base"
    #: Fields of the network and of the optimiser that differ from the reference.
    network: ClassVar[dict[str, Any]] = {}
    optimiser: ClassVar[dict[str, Any]] = {}

    def table(self, table: MeasurementTable) -> MeasurementTable:
        """The rows to train and evaluate on; programs stay."""
        return table

    def config(self, seed: int) -> TrainConfig:
        """Configuration of the training."""
        network = {"width": 48, "layers": 1, "feed_forward": 96, "head_width": 160, "head_layers": 3}
        optimiser = {
            "steps": 3000,
            "batch_rows": 1024,
            "learning_rate": 2e-3,
            "warmup_steps": 200,
            "average_decay": 0.995,
            "hide_device": 0.4,
            "virtual_hidden": 1.0,
            "virtual_known": 0.2,
            "precision": "medium",
            "threads": 2,
        }
        return TrainConfig(
            name=f"{self.name}-{seed}",
            seed=seed,
            data=DataConfig(holdout_devices=HELD_OUT),
            network=NetworkConfig(**({"head": "structured", "schedule": True} | network | self.network)),
            optimiser=OptimiserConfig(**(optimiser | self.optimiser)),
            finish=FinishConfig(xgboost_rows=400_000),
        )

    def fit(self, sample: QuickSample, seed: int) -> Fitted:
        """Train on the training rows of a sample."""
        config = self.config(seed)
        folder = self.runs / config.name
        train_model(config, sample.dataset, sample.training, folder)
        return Fitted(load_artifact(folder))
