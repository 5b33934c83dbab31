"""Configuration of a training run (``configs/*.toml``)."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cdmpp.data.splits import TEST_SHARE, VALIDATION_SHARE
from cdmpp.errors import DataError
from cdmpp.model.nn.config import NetworkConfig
from cdmpp.model.nn.losses import Discrepancy
from cdmpp.utils.files import MAX_CONFIG_BYTES, read_text

#: Precision of the matrix products of a training run.
Precision = Literal["highest", "medium"]


class DataConfig(BaseModel):
    """Training data and its split."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    public: bool = Field(True, description="all ops_* tables of the public data folder")
    schedules: tuple[str, ...] = Field(
        (), description="sources of public tables of schedules, whose programs are built at each start"
    )
    schedule_share: float = Field(1.0, gt=0, le=1, description="of their configurations, the same on every device")
    records: tuple[str, ...] = Field((), description="further records or raw tables, paths")
    holdout_devices: tuple[str, ...] = Field((), description="devices without training rows")
    max_rows_per_source: int | None = Field(None, ge=1, description="seeded subsample of each source's train rows")
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


class OptimiserConfig(BaseModel):
    """AdamW with warm-up and cosine decay, on an exponential average of the weights."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    steps: int = Field(20_000, ge=1)
    seconds: float | None = Field(
        None, gt=0, description="wall-clock budget; steps then only bound it, and no two runs are alike"
    )
    batch_rows: int = Field(2048, ge=16)
    start_from: str | None = Field(
        None, description="folder of a model whose weights training starts from; columns and devices match by name"
    )
    learning_rate: float = Field(2e-3, gt=0)
    weight_decay: float = Field(0.02, ge=0)
    warmup_steps: int = Field(500, ge=0)
    average_decay: float = Field(0.999, ge=0, lt=1)
    clip_norm: float = Field(1.0, gt=0)
    hide_device: float = Field(0.25, ge=0, le=1, description="share of rows whose device is hidden")
    virtual_hidden: float = Field(
        0.0, ge=0, le=1, description="share of the rows of hidden devices that get a virtual device's figures"
    )
    virtual_known: float = Field(0.0, ge=0, le=1, description="the same for devices that are not hidden")
    hide_framework: float = Field(0.1, ge=0, le=1, description="share of rows whose framework is hidden")
    quantile_weight: float = Field(0.5, ge=0)
    ranking_weight: float = Field(0.0, ge=0, description="of the order among programs of one task")
    ranking: Literal["pairwise", "listwise"] = Field(
        "pairwise", description="pairwise: logistic loss on pairs; listwise: softmax over the programs of a task"
    )
    group_tasks: int = Field(
        1, ge=1, le=256, description="programs of one task and device that are drawn into a batch together"
    )
    group_programs: int = Field(
        1, ge=1, le=256, description="rows of one program, on several devices, that are drawn into a batch together"
    )
    checkpoint_every: int = Field(500, ge=1, description="steps")
    threads: int | None = Field(None, ge=1)
    precision: Precision = Field(
        "highest",
        description="of matrix products but for the last tenth of the steps; medium is faster where the "
        "processor multiplies bfloat16, and predictions are always computed with highest",
    )

    @model_validator(mode="after")
    def _check_ranking(self) -> Self:
        if self.ranking_weight and self.group_tasks == 1:
            raise ValueError("ranking_weight needs group_tasks of at least 2")
        return self


class DomainConfig(BaseModel):
    """A regulariser that reduces the distance between latents of the training rows and of an unlabelled target.

    The target's rows are those of the training part on ``target_devices``, or of tasks of
    ``target_networks``; their latencies are not read, neither here nor as labels.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    loss: Literal["none"] | Discrepancy = "none"
    weight: float = Field(0.1, ge=0)
    rows: int = Field(512, ge=16, description="unlabelled target rows of a step")
    target_devices: tuple[str, ...] = Field((), description="of data.holdout_devices")
    target_networks: tuple[str, ...] = Field((), description="of the records' networks, whatever their size")

    @model_validator(mode="after")
    def _check_target(self) -> Self:
        if (self.loss != "none") != bool(self.target_devices or self.target_networks):
            raise ValueError("a loss goes with target_devices or target_networks, and they with it")
        return self


class ReferenceConfig(BaseModel):
    """Training of the original network (:mod:`cdmpp.train.reference`), with its published values."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    batch_rows: int = Field(600, ge=2)
    learning_rate: float = Field(1.6766e-5, gt=0, description="the cycle goes from a tenth to ten times this")
    weight_decay: float = Field(1.3071e-3, ge=0)
    clip_norm: float = Field(2.0, gt=0)
    cycle_steps: int | None = Field(
        2000, ge=1, description="of half a cycle; none: one cycle over the budget of steps or seconds"
    )


class FinishConfig(BaseModel):
    """Calibration and baselines, after the last step."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    near_factor: float = Field(2.0, ge=1, description="width of an interval outside the domain, relative to inside")
    out_factor: float = Field(3.0, ge=1)
    xgboost_rows: int = Field(300_000, ge=100, description="seeded subsample that the baseline is fitted on")
    xgboost_trees: int = Field(400, ge=1)
    utilisation_rows: int = Field(300_000, ge=16, description="of a family, seeded subsample")
    utilisation_steps: int = Field(2000, ge=1)
    baselines: tuple[Literal["roofline", "mean", "xgboost", "utilisation"], ...] = Field(
        ("roofline", "mean", "xgboost"), description="baselines in the error table"
    )
    held_out_rows: int | None = Field(
        None, ge=1, description="seeded sample of each source's rows of a held-out device in its error table"
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

    def of_one_network(self) -> TrainConfig:
        """The same configuration without further members."""
        return self.model_copy(update={"network": self.network.model_copy(update={"members": 1})})

    @classmethod
    def of_manifest(cls, fields: Mapping[str, Any]) -> TrainConfig:
        """Configuration stored with a model (:meth:`NetworkConfig.of_manifest`).

        Raises
        ------
        UnsupportedOptionError
            An option has a value that this version does not support.
        """
        # "ratio" is the only label that was ever shipped, and the only one left.
        kept = {name: value for name, value in fields.items() if name not in ("label", "network")}
        return cls(**kept, network=NetworkConfig.of_manifest(fields["network"]))

    @model_validator(mode="after")
    def _check_target_devices(self) -> Self:
        seen = set(self.domain.target_devices) - set(self.data.holdout_devices)
        if seen:
            raise ValueError(f"domain.target_devices has {', '.join(sorted(seen))}, which data.holdout_devices lacks")
        return self


def load_config(path: str | Path) -> TrainConfig:
    """Read a TOML file.

    Raises
    ------
    DataError
        The file is missing, not TOML, or a field is unknown or out of range (the message names it).
    """
    try:
        content: dict[str, Any] = tomllib.loads(read_text(path, MAX_CONFIG_BYTES))
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}", hint="pass --config FILE.toml") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is not TOML: {error}") from None
    try:
        return TrainConfig.model_validate(content)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:4])
        raise DataError(f"{path}: {problems}", hint="see configs/base.toml for every field") from None
