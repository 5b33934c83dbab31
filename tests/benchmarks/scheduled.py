"""Records of made-up scheduled programs of several networks, with a split file that seals some."""

from pathlib import Path

import numpy as np

from benchmarks.schedules.parts import Scheduled, ScheduleSplit
from cdmpp.data.records import Measurement, from_measurements, write_records
from cdmpp.data.split_file import make_splits, write_splits
from cdmpp.model.nn.config import NetworkConfig
from cdmpp.train.config import DataConfig, TrainConfig
from cdmpp.train.options import OptimiserConfig
from tests.data.test_device_specs import cpu
from tests.train.schedules import digest, program

DEVICES = tuple(cpu(name) for name in ("one-1t-avx2", "one-2t-avx2", "two-1t-avx2"))
NETWORKS = tuple(f"net{n}" for n in range(10))
TASKS, SEALED, TEST = 90, 2, ("net1", "net2")
ORIGINS = ("default", "sampled", "sampled", "active", "active", "good")


def rows() -> list[Measurement]:
    """Six schedules of each task on every device; task t is of network t mod 10, every seventh of net0 as well."""
    result = []
    for task in range(TASKS):
        users = ";".join(sorted({NETWORKS[task % 10]} | ({"net0"} if task % 7 == 0 else set())))
        for n, origin in enumerate(ORIGINS):
            text = program(8 + task, 2 ** (1 + n % 3), (0, 2)[n // 3])
            about = {"backend": "tvm", "task": f"task{task}", "provenance": {"networks": users, "origin": origin}}
            program_fields = {"program_hash": digest(text), **about}
            for device in DEVICES:
                seconds = 1e-6 * (1 + task + n)
                result.append(Measurement(text, "tvm_json", device.name, seconds, device_spec=device, **program_fields))
    return result


def tasks(data: Scheduled, index: np.ndarray) -> set[str]:
    return {data.table.tvm.tasks[key] for key in data.dataset.rows.program[index].tolist()}


def networks(data: Scheduled, index: np.ndarray) -> set[str]:
    return set().union(*(data.dataset.networks[key] for key in data.dataset.rows.program[index].tolist()))


def trained(split: ScheduleSplit) -> np.ndarray:
    return np.flatnonzero((split.part == 0) | (split.part == 1))


def write_folder(folder: Path) -> TrainConfig:
    """Write records and splits, and return a configuration that reads them."""
    table = from_measurements(rows())
    write_records(table, folder / "records.parquet")
    write_splits(make_splits(table, test_networks=TEST, sealed=SEALED, sealed_from=NETWORKS), folder / "splits.parquet")
    return TrainConfig(
        data=DataConfig(public=False, records=(str(folder),), test_share=0.2, validation_share=0.1),
        network=NetworkConfig(
            width=16, layers=1, heads=2, feed_forward=16, head_width=16, head_layers=1, head="ratio", schedule=True
        ),
        optimiser=OptimiserConfig(steps=2, batch_rows=16, warmup_steps=1, ranking_weight=0.05, group_tasks=4),
    )
