"""Runs schedules of ``torch.distributed.pipelining`` on forked processes and compares them with the whole module.

``python pipeline_worker.py CASES.json``: a list of ``{"csv": paths, "ranks": n, "micro_batches": m}``. A rank runs the
schedules of several models one after the other. It prints the last loss and the largest difference as JSON. Processes
are forked, so torch is imported once; they meet in a file, so no port is chosen.
"""

import csv
import json
import os
import re
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime, _simulate_comms_compute

WIDTH, SAMPLES = 8, 2


def stages_of(path: str) -> list[list[int]]:
    """Stages of each rank."""
    with open(path, newline="") as file:
        return [sorted({int(re.match(r"\d+", cell)[0]) for cell in row}) for row in csv.reader(file)]


def network(stages: int) -> nn.ModuleList:
    """One block for each stage."""
    torch.manual_seed(0)
    return nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(stages))


def batch(micro_batches: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of a step."""
    torch.manual_seed(1)
    return torch.randn(SAMPLES * micro_batches, WIDTH), torch.randn(SAMPLES * micro_batches, WIDTH)


def work(case: dict[str, Any], rank: int, folder: Path) -> None:
    """One rank: load the schedule, run a step, save loss and gradients."""
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=case["ranks"])
    gradients: dict[str, torch.Tensor] = {}
    for number, path in enumerate(case["csv"]):
        local = stages_of(path)
        total = sum(map(len, local))
        blocks = network(total)
        parts = [PipelineStage(blocks[s], s, total, torch.device("cpu")) for s in local[rank]]
        schedule = _PipelineScheduleRuntime(parts, case["micro_batches"], loss_fn=nn.functional.mse_loss)
        schedule._load_csv(path)  # torch checks the order and derives the communication
        _check_progress(schedule)
        inputs, targets = batch(case["micro_batches"])
        losses: list[torch.Tensor] = []
        arguments = (inputs,) if 0 in local[rank] else ()
        last = {"target": targets, "losses": losses} if total - 1 in local[rank] else {}
        schedule.step(*arguments, **last)
        gradients |= {f"{number}.{s}.{name}": p.grad for s in local[rank] for name, p in blocks[s].named_parameters()}
    loss = torch.stack(losses).mean().item() if losses else None
    torch.save({"loss": loss, "gradients": gradients}, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def _check_progress(schedule: _PipelineScheduleRuntime) -> None:
    """torch's own simulation of the schedule, which raises where ranks wait for each other."""
    order = {
        rank: [action for action in row if re.search("[FBIW]$", action.computation_type.value)]
        for rank, row in schedule.pipeline_order_with_comms.items()
    }
    _simulate_comms_compute(order, lambda stage: schedule.stage_index_to_group_rank[stage], schedule._num_stages)


def run(case: dict[str, Any]) -> dict[str, float]:
    """All ranks of a case, and the unpipelined module."""
    with tempfile.TemporaryDirectory() as name:
        folder, children = Path(name), []
        for rank in range(case["ranks"]):
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    work(case, rank, folder)
                    code = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    sys.stderr.flush()
                    os._exit(code)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        if any(codes):
            raise RuntimeError(f"exit codes of the ranks: {codes}")
        saved = [torch.load(folder / f"{rank}.pt") for rank in range(case["ranks"])]
    expected: dict[str, torch.Tensor] = {}
    for number, path in enumerate(case["csv"]):
        blocks = network(sum(map(len, stages_of(path))))
        inputs, targets = batch(case["micro_batches"])
        loss = nn.functional.mse_loss(nn.Sequential(*blocks)(inputs), targets)
        loss.backward()
        expected |= {f"{number}.{name}": p.grad for name, p in blocks.named_parameters()}
    gradients = {name: g for item in saved for name, g in item["gradients"].items()}
    assert gradients.keys() == expected.keys()
    return {
        "loss": next(item["loss"] for item in saved if item["loss"] is not None),
        "expected_loss": loss.item(),
        "difference": max((gradients[name] - expected[name]).abs().max().item() for name in expected),
        "largest": max(g.abs().max().item() for g in expected.values()),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps([run(case) for case in json.loads(Path(sys.argv[1]).read_text())]))
