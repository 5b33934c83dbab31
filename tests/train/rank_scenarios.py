"""Training runs of a few steps on synthetic rows, for ``torchrun -m tests.train.rank_scenarios FOLDER`` and for one
process. Each rank writes the losses of its steps to ``FOLDER/rankR.json``.
"""

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cdmpp.train.config import DataConfig, TrainConfig
from cdmpp.train.dataset import Dataset
from cdmpp.train.fit import train
from cdmpp.train.options import DomainConfig
from cdmpp.train.ranks import ALONE, Ranks, Stopped, process_group
from cdmpp.train.step import Objective
from tests.model.nn.synthetic import dataset, training

STEPS, STOP_AT = 12, 7


def scenario(name: str) -> tuple[Dataset, TrainConfig]:
    """Data and configuration of a scenario."""
    data = dataset()
    if name == "ranking":
        return replace(data, task=np.arange(120) // 6), training(STEPS, ranking_weight=2.0, group_tasks=8)
    if name == "domain":
        config = training(STEPS, virtual_hidden=0.5, virtual_known=0.5)
        domain = DomainConfig(loss="cmd", weight=0.5, rows=33, target_devices=("t4",))
        return data, config.model_copy(update={"domain": domain, "data": DataConfig(holdout_devices=("t4",))})
    # 65 rows do not divide evenly among two ranks.
    return data, training(STEPS, batch_rows=65)


class KilledError(Exception):
    """Stands for the end of the process."""


def run(
    name: str,
    folder: Path,
    ranks: Ranks = ALONE,
    *,
    stop_at: int | None = None,
    kill_at: int | None = None,
    steps: int = STEPS,
    on: str = "cpu",
) -> list[float]:
    """Train; returns this rank's part of the loss of each step.

    ``stop_at``: step in which this process gets SIGTERM. ``kill_at``: step in which :class:`KilledError` is raised.
    """
    losses: list[float] = []

    class Recorded(Objective):
        def __call__(self, *arguments: Any, **options: Any) -> torch.Tensor:
            if len(losses) + 1 == stop_at:
                os.kill(os.getpid(), signal.SIGTERM)
            if len(losses) + 1 == kill_at:
                raise KilledError
            loss = super().__call__(*arguments, **options)
            losses.append(float(loss.detach()))
            return loss

    data, config = scenario(name)
    config = config.model_copy(update={"optimiser": replace(config.optimiser, steps=steps)})
    train(data, config, folder, ranks=ranks, make_objective=Recorded, on=on)
    return losses


def main(folder: Path) -> None:
    """All scenarios on this rank."""
    torch.set_num_threads(1)
    with process_group() as ranks:
        losses = {name: run(name, folder / name, ranks) for name in ("plain", "ranking", "domain")}
        # A checkpoint of one process, which the test wrote.
        losses["continued"] = run("plain", folder / "continued", ranks)
        try:
            run("plain", folder / "stopped", ranks, stop_at=STOP_AT if ranks.rank == 1 else None)
        except Stopped as stopped:
            losses["stopped"] = [float(stopped.step)]
        (folder / f"rank{ranks.rank}.json").write_text(json.dumps(losses))
        torch.distributed.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
