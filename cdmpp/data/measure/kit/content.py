"""Content of a standard job: networks at GPU sizes, which tasks of them, and which of the drawn schedules.

Half of the tasks are in float32 and half in float16, where MetaSchedule's rules use tensor cores. Random schedules of
small tasks leave most of a GPU idle, and tell little about its speed. So a task has enough work, and four of five of
its programs have blocks for at least half of the GPU's units.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import count, zip_longest
from pathlib import Path
from typing import Any

from cdmpp.data.measure.sampling import SampledProgram, scheduled_program
from cdmpp.errors import DataError
from cdmpp.features import launch_summary
from cdmpp.programs.frontends.tasks import HALF, TuningTask
from cdmpp.programs.program import TensorProgram

#: Convolutional networks, transformers, other networks, and operators alone, at batch 1 to 64.
_SIZED = (
    *("resnet50:batch=16", "resnet18:batch=64", "vgg11:batch=8", "densenet121:batch=16"),
    *("convnext:batch=16,image=224", "efficientnet:batch=32,image=224,width=32", "shufflenet:batch=32,image=224"),
    *("resnext:batch=8,image=224,width=128", "unet-block:batch=4,image=64,width=128"),
    *("dcgan:batch=64,width=128", "vae-3d:batch=2,frames=8,image=64,width=64"),
    *("bert-base:batch=1,seq=512", "bert-base:batch=16", "vit:batch=32,width=768,heads=12", "swin:batch=16,side=56"),
    *("gpt2-prefill:batch=8,seq=256", "gpt2-decode:past=1000,width=2048,heads=16,batch=32"),
    *("llama-block:batch=4,seq=256,width=2048,heads=16,kv_heads=4", "llama-block:batch=1,seq=1024,width=2048"),
    *("llama-decode:batch=64,past=1000,width=2048", "t5-decoder:batch=16,seq=128,encoder=256,width=768,heads=12"),
    *("step1x-dit:batch=4,image=32,text=128,width=1024,heads=16", "dit-3d:frames=8,side=16,width=768,heads=12"),
    *("audio-encoder:frames=1500,width=512,heads=8,batch=4", "wav2vec:batch=8,length=32000,width=512"),
    *("mixer:tokens=196,width=768,batch=32", "linear-attention:seq=1024,width=1024,heads=16,batch=4"),
    *("mamba:batch=64,width=1536", "moe-top2:tokens=1024,experts=8,width=1024,hidden=2048"),
    *("products:m=2048,n=1024,k=1024", "products:m=512,n=4096,k=4096", "products:m=1000,n=1536,k=384"),
    *("reductions:a=256,b=512,c=1000", "reductions:a=4096,b=64,c=256"),
    *("filters:width=128,image=56,batch=16", "filters:width=256,image=28,batch=64", "layouts:a=256,b=64,c=512"),
)
#: Networks that TVM's mixed precision cannot import: their operators have numbers as arguments.
_FLOAT32 = (
    *("mobilenet-v2:batch=32", "super-resolution:image=256", "segmenter:batch=8,image=256"),
    "elementwise:rows=8192,columns=4096",
)
#: Networks of the standard job.
NETWORKS = (*(text + kind for text in _SIZED for kind in ("", f"@{HALF}")), *_FLOAT32)
#: Operations and bytes of arguments of a task of GPU size, enough of either, and not too much of both; and elements
#: of its largest result, over which its loops run in parallel.
_LEAST_FLOPS, _LEAST_BYTES, _MOST_FLOPS, _MOST_BYTES, _LEAST_OUTPUTS = 2e7, 2**22, 3e10, 2**30, 2**12
#: Share of a task's programs that may have few blocks.
_FEW_SHARE = 0.2
#: Parts of tasks' names, in the order of their turns: most are products and convolutions.
_KINDS = (("conv", "matmul"), ("softmax", "norm", "mean", "sum", "max", "pool", "variance"))
_TURNS = (0, 0, 1, 0, 0, 1, 0, 2)


def is_gpu_size(work: Mapping[str, float]) -> bool:
    """Whether a task (``flops``, ``bytes``, ``outputs``) occupies a GPU, for not longer than a fraction of a second."""
    is_large = work["flops"] >= _LEAST_FLOPS or work["bytes"] >= _LEAST_BYTES
    is_small = work["flops"] <= _MOST_FLOPS and work["bytes"] <= _MOST_BYTES
    return is_large and is_small and work["outputs"] >= _LEAST_OUTPUTS


def choose_tasks(networks: Mapping[str, Sequence[tuple[str, str]]], limit: int) -> list[str]:
    """Return at most ``limit`` tasks (0: all), one of each network in turn.

    ``networks`` has (hash, name) of each network's tasks. Kinds take turns: of five tasks three are products or
    convolutions, one is a reduction. In a kind they come in the order of their hashes.
    """
    ordered = [list(_by_kind(tasks, start)) for start, tasks in enumerate(networks.values())]
    in_turn = [task for turn in zip_longest(*ordered) for task in turn if task is not None]
    chosen = list(dict.fromkeys(in_turn))
    return chosen[: limit or None]


def _by_kind(tasks: Sequence[tuple[str, str]], start: int) -> Iterator[str]:
    kinds: list[list[str]] = [[] for _ in range(len(_KINDS) + 1)]
    for digest, name in sorted(tasks, reverse=True):
        kinds[next((i for i, parts in enumerate(_KINDS) if any(p in name for p in parts)), -1)].append(digest)
    for turn in count(start):
        if not any(kinds):
            return
        if kinds[_TURNS[turn % len(_TURNS)]]:
            yield kinds[_TURNS[turn % len(_TURNS)]].pop()


def blocks(tvm_json: str) -> int:
    """Return the blocks of a scheduled PrimFunc's largest launch; 1 without thread bindings."""
    kernels = launch_summary(TensorProgram.from_tvm_json(tvm_json), points=1)
    return max((int(kernel["blocks"]) for kernel in kernels), default=1)


class BlockChooser:
    """Chooses schedules with enough blocks; a :class:`cdmpp.data.measure.settings.Chooser`. Four of five programs of a
    task have ``min_blocks``; ``pool`` schedules are drawn beyond those that are taken."""

    def __init__(self, min_blocks: int, pool: int = 16) -> None:
        self.min_blocks, self.pool = min_blocks, pool
        self.description: dict[str, Any] = {"blocks": min_blocks, "pool": pool}

    def __call__(self, programs: Sequence[SampledProgram], schedules: int) -> list[SampledProgram]:
        """Return the default and at most ``schedules`` draws; fewer if too few of them have the blocks."""
        strong: list[SampledProgram] = []
        weak: list[SampledProgram] = []
        for program in programs[1:]:
            (strong if blocks(program.tvm_json) >= self.min_blocks else weak).append(program)
        is_weak = blocks(programs[0].tvm_json) < self.min_blocks
        room = int(_FEW_SHARE * (schedules + 1)) - is_weak
        strong = strong[: schedules - max(0, min(room, len(weak)))]
        room = min(room, int((len(strong) + (not is_weak)) * _FEW_SHARE / (1 - _FEW_SHARE)) - is_weak)
        return [programs[0], *strong, *weak[: max(0, room)]]


def best_of_ansor(path: Path, limit: int) -> dict[str, dict[tuple[str, str], list[str]]]:
    """Return the steps of Ansor's fastest schedules: by network ("ansor-FUNCTION"), and workload and epilogue.

    ``path``: table of search logs, with the columns device, workload, epilogue, steps and latency_us. ``limit``:
    schedules of each workload, the fastest on any NVIDIA GPU.
    """
    from cdmpp.data.arrow import pa, pq

    names = ("device", "workload", "epilogue", "steps", "latency_us")
    try:
        rows = zip(*(pq.read_table(path, columns=[name])[name].to_pylist() for name in names), strict=True)
    except (OSError, KeyError, pa.ArrowInvalid) as error:
        raise DataError(f"{path} is not a table of search logs: {error}", hint="see docs/measuring.md") from None
    timed = sorted((us, *rest) for device, *rest, us in rows if us and not device.startswith("AMD"))
    networks: dict[str, dict[tuple[str, str], list[str]]] = {}
    for _, workload, epilogue, steps in timed:
        workloads = networks.setdefault(f"ansor-{json.loads(workload)[0]}", {})
        kept = workloads.setdefault((workload, epilogue), [])
        if len(kept) < limit:
            kept.append(steps)
    return networks


def ansor_task(workload: str, epilogue: str, schedules: Sequence[str]) -> tuple[TuningTask, list[SampledProgram]]:
    """Return the task of an Ansor workload, and its schedules as programs of today's TVM; in a worker process."""
    from tvm import ir, te

    from cdmpp.data.importers.ansor import ansor_program, workload_tensors

    function = te.create_prim_func(workload_tensors(workload, epilogue)).with_attr("global_symbol", "main")
    untuned = scheduled_program({"main": function}, "default")
    name = "_".join(["fused", json.loads(workload)[0].removesuffix("_layer"), *epilogue.split("_")]).rstrip("_")
    programs = []
    for steps in schedules:
        module = ir.load_json(ansor_program(workload, steps, epilogue=epilogue).tvm_json)
        programs.append(scheduled_program(module, "ansor"))
    return TuningTask(name, untuned.hash, untuned.tvm_json, 1), programs
