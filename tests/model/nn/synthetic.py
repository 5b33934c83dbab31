"""Small synthetic inputs: random operators, made-up latencies. Nothing here was measured."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cdmpp.devices.registry import lookup
from cdmpp.features.encode import encode_operator
from cdmpp.features.schema import WIDTH
from cdmpp.model.artifact.trained import save_artifact
from cdmpp.model.domain.score import Context, Domain
from cdmpp.model.nn.config import NetworkConfig
from cdmpp.model.nn.figures import stack_devices, summarise
from cdmpp.model.nn.inputs import DEVICE_LOGS, INPUT_WIDTH, query_inputs
from cdmpp.model.nn.network import LatencyNetwork
from cdmpp.model.nn.rows import ProgramStore
from cdmpp.train.config import TrainConfig
from cdmpp.train.dataset import Dataset, MeasuredRows
from cdmpp.train.options import OptimiserConfig
from tests.features.shapes import random_specs

TINY = NetworkConfig(
    width=16, layers=2, heads=2, feed_forward=24, head_width=32, head_layers=2, device_width=4, head="structured"
)
DEVICES = ("t4", "l4", "a100-pcie-40gb")


def network(seed: int = 0, config: NetworkConfig = TINY, devices: int = 3) -> LatencyNetwork:
    """A network with random weights everywhere (the last layer starts at zero), in evaluation mode."""
    torch.manual_seed(seed)
    made = LatencyNetwork(config, devices)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return made.eval()


def random_inputs(rows: int, leaves: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Arguments of the network's forward but the mask."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "leaves": torch.rand(rows, leaves, WIDTH, generator=generator) * 10,
        "positions": torch.randint(0, 60, (rows, leaves), generator=generator).sort(dim=1).values,
        "inputs": torch.randn(rows, INPUT_WIDTH, generator=generator),
        "logs": torch.randn(rows, len(DEVICE_LOGS), generator=generator),
        "device": torch.randint(0, 4, (rows,), generator=generator),
    }


@cache
def dataset(rows: int = 600, programs: int = 120, seed: int = 0) -> Dataset:
    """Random operators on three devices; the latency is twice the reference, with noise."""
    rng = np.random.default_rng(seed)
    store = ProgramStore(programs)
    for key, spec in enumerate(random_specs(programs, seed)):
        encoded = encode_operator(spec)
        store.add(np.array([key]), encoded, summarise(encoded))
    store.finish()
    devices = tuple(lookup(name) for name in DEVICES)
    program, device = rng.integers(0, programs, rows), rng.integers(0, len(devices), rows).astype(np.int32)
    names = ("backend", "protocol", "framework", "source", "op")
    codes = {name: np.zeros(rows, dtype=np.int16) for name in names}
    matrix = stack_devices(devices)
    reference = query_inputs(
        store.summary[program], matrix[device], codes["backend"], codes["protocol"], codes["framework"]
    )[2]
    log_latency = reference + np.log(2) + 0.1 * rng.standard_normal(rows)
    part = rng.choice(3, programs, p=(0.8, 0.1, 0.1)).astype(np.int8)[program]
    return Dataset(
        store=store,
        rows=MeasuredRows(
            program=program,
            device=device,
            log_latency=log_latency,
            part=part,
            report=np.ones(rows, dtype=bool),
            **codes,
        ),
        devices=devices,
        sources=("synthetic",),
        ops=("any",),
        kinds=(("linear", "float32"),),
        kind=np.zeros(programs, dtype=np.int16),
        task=np.full(programs, -1),
        fingerprint=f"synthetic{seed}",
    )


def training(steps: int = 12, **optimiser: Any) -> TrainConfig:
    """A run of a few steps."""
    settings = {"batch_rows": 64, "warmup_steps": 3, "checkpoint_every": 4, "average_decay": 0.9}
    return TrainConfig(network=TINY, optimiser=OptimiserConfig(steps=steps, **(settings | optimiser)))


def write_artifact(folder: Path, seed: int = 0, config: NetworkConfig = TINY) -> dict[str, Any]:
    """A model folder with random weights; returns its manifest."""
    data = dataset(programs=60, seed=seed)
    trained = [Context(d, "linear", "float32", "kernel", "library") for d in DEVICES]
    contexts = frozenset(key for c in trained for key in (*c.keys(), f"{c.device}&"))
    return save_artifact(
        folder,
        network(seed, config),
        Domain.fit(data.store.summary, contexts, seed, centres=8),
        name="synthetic",
        devices=list(DEVICES),
        calibration={"in": 1.0, "near": 2.0, "out": 3.0},
        details={"metrics": {}},
    )
