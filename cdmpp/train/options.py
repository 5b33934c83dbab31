"""Options of the steps of a training, readable without pydantic; :mod:`cdmpp.train.config` has those of a whole run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cdmpp.model.nn.losses import Discrepancy
from cdmpp.utils.options import Options, number

#: Precision of the matrix products of a training run.
Precision = Literal["highest", "medium"]


@dataclass(frozen=True)
class OptimiserConfig(Options):
    """AdamW with warm-up and cosine decay, on an exponential average of the weights."""

    steps: int = number(20_000, least=1)
    #: Wall-clock budget; steps then only bound it, and no two runs are alike.
    seconds: float | None = number(None, above=0)
    batch_rows: int = number(2048, least=16)
    #: Folder of a model whose weights training starts from; columns and devices match by name.
    start_from: str | None = None
    #: Sealed networks that start_from was trained on; the new model does not count as without them.
    start_has_seen: tuple[str, ...] = ()
    learning_rate: float = number(2e-3, above=0)
    weight_decay: float = number(0.02, least=0)
    warmup_steps: int = number(500, least=0)
    average_decay: float = number(0.999, least=0, below=1)
    clip_norm: float = number(1.0, above=0)
    #: Share of rows whose device is hidden.
    hide_device: float = number(0.25, least=0, most=1)
    #: Share of the rows of hidden devices that get a virtual device's figures.
    virtual_hidden: float = number(0.0, least=0, most=1)
    #: The same for devices that are not hidden.
    virtual_known: float = number(0.0, least=0, most=1)
    #: Share of rows whose framework is hidden.
    hide_framework: float = number(0.1, least=0, most=1)
    quantile_weight: float = number(0.5, least=0)
    #: Of the order among programs of one task.
    ranking_weight: float = number(0.0, least=0)
    #: Programs of one task and device that are drawn into a batch together.
    group_tasks: int = number(1, least=1, most=256)
    #: Steps between checkpoints.
    checkpoint_every: int = number(500, least=1)
    threads: int | None = number(None, least=1)
    #: Of matrix products but for the last tenth of the steps; medium is faster where the processor multiplies bfloat16,
    #: and predictions are always computed with highest.
    precision: Precision = "highest"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ranking_weight and self.group_tasks == 1:
            raise ValueError("ranking_weight needs group_tasks of at least 2")


@dataclass(frozen=True)
class DomainConfig(Options):
    """A regulariser that reduces the distance between latents of the training rows and of an unlabelled target.

    The target's rows are those of the training part on ``target_devices``, or of tasks of
    ``target_networks``; their latencies are not read, neither here nor as labels.
    """

    loss: Literal["none"] | Discrepancy = "none"
    weight: float = number(0.1, least=0)
    #: Unlabelled target rows of a step.
    rows: int = number(512, least=16)
    #: Of data.holdout_devices.
    target_devices: tuple[str, ...] = ()
    #: Of the records' networks, whatever their size.
    target_networks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.loss != "none") != bool(self.target_devices or self.target_networks):
            raise ValueError("a loss goes with target_devices or target_networks, and they with it")
