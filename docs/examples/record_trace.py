"""Records the traces of docs/traces.md: torchrun --nproc-per-node 2 docs/examples/record_trace.py FOLDER"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule

WIDTH, BATCH, LAYERS = 512, 64, 4


def main(folder: Path) -> None:
    """Train a small network on the CPU with gloo, and write the trace of three iterations."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH))]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers, nn.Linear(WIDTH, 10)), bucket_cap_mb=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data, target = torch.randn(BATCH, WIDTH), torch.randint(0, 10, (BATCH,))
    with profile(
        activities=[ProfilerActivity.CPU],
        record_shapes=True,
        schedule=schedule(wait=3, warmup=2, active=3, repeat=1),
        on_trace_ready=lambda p: p.export_chrome_trace(str(folder / f"trace_rank{dist.get_rank()}.json.gz")),
    ) as profiler:
        for _ in range(8):
            loss = nn.functional.cross_entropy(model(data), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            profiler.step()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
