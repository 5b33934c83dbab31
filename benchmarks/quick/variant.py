"""What a variant can change, the network that it is by default, and the fixed sample that it is fitted to.

The sample has training rows, held-out rows of known devices, and rows of two groups of held-out devices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from benchmarks.unseen_devices.study import Study, sample, train_model
from cdmpp.data.records import read_records, write_records
from cdmpp.data.splits import TRAIN, VALIDATION
from cdmpp.data.table import MeasurementTable
from cdmpp.model.artifact.load import load_artifact
from cdmpp.model.artifact.model import Artifact
from cdmpp.model.nn.config import NetworkConfig
from cdmpp.programs.operators import operator_family
from cdmpp.train.config import DataConfig, FinishConfig, TrainConfig
from cdmpp.train.dataset import Dataset, MeasuredRows, choose_parts, make_dataset
from cdmpp.train.options import OptimiserConfig
from cdmpp.train.run import load_training_table

Array = np.ndarray[Any, np.dtype[Any]]

#: Two groups of devices that no variant trains on: the V100 (NeuSight, DeepBench) and the L40S (serving tables).
HELD_OUT = ("v100-pcie-32gb", "v100-sxm2-32gb", "l40s")
#: Rows of the training part; held-out rows of a source, on known devices and on those held out.
TRAINING_ROWS, HELD_OUT_ROWS = 400_000, 3_000
_SEED = 34


@dataclass(frozen=True)
class QuickSample:
    """The encoded sample."""

    #: Table and dataset; row i of one is row i of the other.
    study: Study
    #: The same with the data sheets alone of the held-out devices.
    dataset: Dataset

    @property
    def table(self) -> MeasurementTable:
        """The rows as a table."""
        return self.study.table

    @cached_property
    def held_out(self) -> Array:
        """Mask of the rows of held-out devices."""
        names = [device.name for device in self.dataset.devices]
        return np.isin(self.dataset.rows.device, [names.index(name) for name in HELD_OUT if name in names])

    @property
    def training(self) -> Array:
        """Indices of the training rows."""
        return np.flatnonzero((self.dataset.rows.part == TRAIN) & ~self.held_out)

    @property
    def known(self) -> Array:
        """Indices of the held-out rows of known devices, ordered by program."""
        index = np.flatnonzero((self.dataset.rows.part == VALIDATION) & ~self.held_out)
        return index[np.argsort(self.dataset.rows.program[index], kind="stable")]

    @classmethod
    def load(cls, public_data: str | Path | None, folder: Path, change: Any = None) -> QuickSample:
        """Read the sample from ``folder``; it is drawn from the public tables first where it is not there.

        ``change``: takes the table and returns the one to use, without other programs.
        """
        path = folder / "sample.parquet"
        if not path.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            write_records(draw(load_training_table(TrainConfig(), public_data, ["data/cdmpp-measured"])), path)
        # Reading the sample applies the rules of excluded rows again, which compare rows with each other.
        table = read_records(path)
        table = table.select(np.flatnonzero(table.trainable))
        table = table if change is None else change(table)
        config = DataConfig(holdout_devices=HELD_OUT)
        dataset = make_dataset(table, config, schedule=True)
        if len(dataset.rows) != len(table):
            raise ValueError("the sample has programs that cannot be encoded")
        families = np.array([operator_family(operator) for operator, _ in dataset.kinds])
        study = Study(table, dataset, families[dataset.kind[dataset.rows.program]])
        return cls(study, study.without(HELD_OUT))


def draw(table: MeasurementTable) -> MeasurementTable:
    """The rows of the sample.

    Training rows are drawn by program, so that few programs have to be encoded and a program keeps its devices. Sources
    with few rows are kept whole; the others get equal shares.
    """
    part = choose_parts(table, DataConfig())[table.program_key]
    held = np.isin(table.device.array(), HELD_OUT)
    usable = table.trainable & ~table.collective & np.isfinite(table.latency_s) & (table.latency_s > 0)
    rank = np.random.default_rng(_SEED).permutation(table.n_programs)[table.program_key]
    source = table.source.codes
    names = np.unique(source[usable])
    training = {code: np.flatnonzero(usable & (part == TRAIN) & ~held & (source == code)) for code in names}
    shares = equal_shares({code: len(rows) for code, rows in training.items()}, TRAINING_ROWS)
    rows: list[Array] = []
    for code in names:
        rows.append(training[code][np.argsort(rank[training[code]], kind="stable")[: shares[code]]])
        rows.append(
            sample(np.flatnonzero(usable & (part == VALIDATION) & ~held & (source == code)), HELD_OUT_ROWS, _SEED)
        )
        unseen = np.flatnonzero(usable & held & (source == code))
        if table.row_filter is not None:
            unseen = unseen[np.asarray(table.row_filter)[unseen]]
        devices = np.unique(table.device.codes[unseen])
        for device in devices:
            members = unseen[table.device.codes[unseen] == device]
            rows.append(sample(members, HELD_OUT_ROWS // len(devices), _SEED))
    return table.select(np.sort(np.concatenate(rows)))


def equal_shares(sizes: dict[Any, int], total: int) -> dict[Any, int]:
    """Rows of each source, equal where it has as many, ``total`` in all."""
    shares, left = {}, total
    for done, (name, size) in enumerate(sorted(sizes.items(), key=lambda item: item[1])):
        shares[name] = min(size, left // (len(sizes) - done))
        left -= shares[name]
    return shares


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
