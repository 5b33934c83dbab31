"""Script that records a trace of torch.profiler on the CPU, alone or as one rank of data-parallel training (gloo)."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function, schedule


def network(width: int = 192) -> nn.Sequential:
    """A small network with products, normalisation and softmax."""
    torch.manual_seed(0)
    layers = [nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, width), nn.Softmax(-1)]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def record(path: Path, model: nn.Module, *, shapes: bool = True, iterations: int = 3, width: int = 192) -> None:
    """Train for some iterations and write their trace."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data, target = torch.randn(64, width), torch.randint(0, 10, (64,))

    def step() -> None:
        with record_function("forward"):
            loss = nn.functional.cross_entropy(model(data), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def write(profiler: profile) -> None:
        profiler.export_chrome_trace(str(path))

    for _ in range(2):
        step()
    with profile(
        activities=[ProfilerActivity.CPU],
        record_shapes=shapes,
        schedule=schedule(wait=1, warmup=1, active=iterations, repeat=1),
        on_trace_ready=write,
    ) as profiler:
        for _ in range(2 + iterations):
            step()
            profiler.step()


def main(folder: Path, rank: int, world: int) -> None:
    """Record one process, or one rank of several."""
    torch.set_num_threads(1)
    if world == 1:
        record(folder / "trace.json.gz", network())
        return
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    model = nn.parallel.DistributedDataParallel(network(), bucket_cap_mb=0.1)
    record(folder / f"rank{rank}.json", model)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
