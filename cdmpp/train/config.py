"""Configuration of a training run (``configs/*.toml``)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cdmpp.data.splits import TEST_SHARE, VALIDATION_SHARE
from cdmpp.errors import DataError
from cdmpp.model.nn.config import NetworkConfig
from cdmpp.train.options import DomainConfig, OptimiserConfig
from cdmpp.utils.files import read_toml


class DataConfig(BaseModel):
    """Training data and its split."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    public: bool = Field(True, description="all ops_* tables of the public data folder")
    schedules: tuple[str, ...] = Field(
        (), description="sources of public tables of schedules, whose programs are built at each start"
    )
    schedule_share: float = Field(1.0, gt=0, le=1, description="of Kernel Tuner's configurations, the same everywhere")
    schedules_per_task: int | None = Field(
        None, ge=1, description="of ansor and metaschedule, per task and device: the two fastest, the others by a hash"
    )
    records: tuple[str, ...] = Field((), description="further records or raw tables, paths")
    holdout_devices: tuple[str, ...] = Field((), description="devices without training rows")
    weights: dict[str, float] = Field(default_factory=dict, description="sampling weight of each source; default 1")
    split: Literal["shape", "network"] = Field(
        "shape", description="shape: hash of the operator's shape or the task; network: whole networks"
    )
    test_share: float = Field(TEST_SHARE, gt=0, lt=0.5, description="of shapes and tasks, split = shape")
    validation_share: float = Field(VALIDATION_SHARE, gt=0, lt=0.5)
    test_networks: tuple[str, ...] = Field((), description="split = network: networks whose tasks are the test part")

    @model_validator(mode="after")
    def _check_test_networks(self) -> Self:
        if (self.split == "network") != bool(self.test_networks):
            raise ValueError('test_networks go with split = "network", and that with them')
        return self


class ReferenceConfig(BaseModel):
    """Training of the original network (:mod:`cdmpp.train.reference`), with its published values."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    batch_rows: int = Field(600, ge=2)
    learning_rate: float = Field(1.6766e-5, gt=0, description="the cycle goes from a tenth to ten times this")
    weight_decay: float = Field(1.3071e-3, ge=0)
    clip_norm: float = Field(2.0, gt=0)
    layers: int = Field(11, ge=1, description="of the encoder")
    feed_forward: int = Field(2048, ge=1, description="of the encoder")
    dropout: float = Field(0.1, ge=0, lt=1, description="of the encoder")


class FinishConfig(BaseModel):
    """Calibration and baselines, after the last step."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    near_factor: float = Field(2.0, ge=1, description="width of an interval outside the domain, relative to inside")
    out_factor: float = Field(3.0, ge=1)
    boosters: bool = Field(False, description="correct library kernels of the training contexts by trees")
    xgboost_rows: int = Field(
        300_000, ge=100, description="of a source, seeded subsample that the baseline is fitted on"
    )
    xgboost_trees: int = Field(1200, ge=1)
    utilisation_rows: int = Field(300_000, ge=16, description="of a family, seeded subsample")
    utilisation_steps: int = Field(2000, ge=1)
    baselines: tuple[Literal["roofline", "mean", "xgboost", "utilisation"], ...] = Field(
        ("roofline", "mean", "xgboost"), description="baselines in the error table"
    )


class TrainConfig(BaseModel):
    """One training run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = "base"
    seed: int = 0
    data: DataConfig = DataConfig()
    network: NetworkConfig = NetworkConfig()
    optimiser: OptimiserConfig = OptimiserConfig()
    domain: DomainConfig = DomainConfig()
    reference: ReferenceConfig | None = Field(
        None, description="train the original with these values, on this data and budget"
    )
    finish: FinishConfig = FinishConfig()

    @classmethod
    def of_manifest(cls, fields: Mapping[str, Any]) -> TrainConfig:
        """Configuration stored with a model (:meth:`NetworkConfig.of_manifest`); an UnsupportedOptionError for a value
        that this version does not support."""
        # Retired options of the training do not change the network.
        retired = ("label", "max_rows_per_source", "held_out_rows", "ranking", "group_programs")
        kept = {
            name: {k: v for k, v in value.items() if k not in retired} if isinstance(value, Mapping) else value
            for name, value in fields.items()
            if name not in retired
        }
        return cls(**(kept | {"network": NetworkConfig.of_manifest(fields["network"])}))

    @model_validator(mode="after")
    def _check_target_devices(self) -> Self:
        seen = set(self.domain.target_devices) - set(self.data.holdout_devices)
        if seen:
            raise ValueError(f"domain.target_devices has {', '.join(sorted(seen))}, which data.holdout_devices lacks")
        return self


def load_config(path: str | Path) -> TrainConfig:
    """Read a TOML file; the DataError names a field that is unknown or out of range."""
    content = read_toml(path, "pass --config FILE.toml")
    try:
        return TrainConfig.model_validate(content)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:4])
        raise DataError(f"{path}: {problems}", hint="see configs/base.toml for every field") from None
