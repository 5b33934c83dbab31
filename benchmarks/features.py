"""Speed of feature extraction: operator specifications, and scheduled modules against TVM's PerStoreFeature.

``python -m benchmarks.features [--candidates 512] [--repeats 5]``: one thread each. The scheduled modules
are random schedules of a 256 x 512 x 512 matmul that MetaSchedule samples for a CPU; ours starts from the
same objects and gives all columns, those of the schedule too, as a search's cost model reads them. Sampling imports
TVM's tensor intrinsics, half a minute, unless ``--without-intrinsics``: they change nothing for a CPU. ``--cpu-time``
compares CPU seconds, which other processes change less.
"""

from __future__ import annotations

import os

# Before numpy, torch or TVM are there to read them.
os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "TVM_NUM_THREADS", "MKL_NUM_THREADS"), "1"))

import argparse
import statistics
import sys
import time
import types
from collections.abc import Callable
from typing import Any

from benchmarks.timing import interleaved, median_ratio
from cdmpp.features.encode import encode_operator
from cdmpp.programs.operators import parse_operator

OPERATORS = {
    "linear": "linear:m=512,n=4096,k=1024,dtype=float16",
    "bmm": "bmm:batch=16,m=512,n=512,k=64",
    "conv2d": "conv2d:n=8,c_in=64,h=56,w=56,c_out=64,kh=3,kw=3,pad_h=1,pad_w=1",
    "conv2d backward": "conv2d:n=8,c_in=64,h=56,w=56,c_out=64,kh=3,kw=3,pad_h=1,direction=bwd_data",
    "gelu": "gelu:rows=512,cols=4096",
    "add": "add:rows=512,cols=4096",
    "softmax": "softmax:rows=4096,cols=1024",
    "layernorm": "layernorm:rows=4096,cols=1024,dtype=float16",
    "max_pool2d": "max_pool2d:n=8,c=64,h=112,w=112,kh=3,kw=3,stride_h=2,stride_w=2,pad_h=1,pad_w=1",
    "attention_prefill": "attention_prefill:batch=4,q_len=512,heads=32,kv_heads=8,head_dim=128",
    "attention_decode": "attention_decode:batch=64,past_len=2048,heads=32,kv_heads=8,head_dim=128",
}


def operators(repeats: int) -> tuple[list[tuple[str, float]], float]:
    """(operator, median milliseconds), and the median over all calls."""
    specs = {name: parse_operator(text) for name, text in OPERATORS.items()}

    def call(name: str) -> Callable[[], object]:
        return lambda: encode_operator(specs[name])

    seconds = interleaved({name: call(name) for name in specs}, repeats)
    whole = statistics.median(t for times in seconds.values() for t in times)
    return [(name, 1e3 * statistics.median(times)) for name, times in seconds.items()], 1e3 * whole


def sample(count: int, intrinsics: bool) -> tuple[Any, list[Any]]:
    """A tuning context and candidates of the matmul."""
    if not intrinsics:
        name = "tvm.s_tir.tensor_intrin"
        sys.modules[name] = types.ModuleType(name)
    import tvm
    from tvm import te
    from tvm.s_tir import meta_schedule as ms

    a, b = te.placeholder((256, 512), name="a"), te.placeholder((512, 512), name="b")
    r = te.reduce_axis((0, 512), name="r")
    c = te.compute((256, 512), lambda i, j: te.sum(a[i, r] * b[r, j], axis=r), name="c")
    context = ms.TuneContext(
        tvm.IRModule({"main": te.create_prim_func([a, b, c])}),
        target=tvm.target.Target({"kind": "llvm", "num-cores": 2}),
        space_generator="post-order-apply",
        search_strategy="replay-trace",
        num_threads=1,
        rand_state=1,
    )
    spaces = context.generate_design_space()
    context.pre_tuning(max_trials=count, num_trials_per_iter=count, design_spaces=spaces)
    candidates = list(context.generate_measure_candidates())
    if len(candidates) < count:
        raise SystemExit(f"only {len(candidates)} candidates were sampled")
    return context, candidates


def scheduled(
    count: int, repeats: int, intrinsics: bool, clock: Callable[[], float]
) -> tuple[float, float, float, float]:
    """Milliseconds a candidate (ours, of that reading the program, theirs) and the median ratio theirs / ours."""
    context, candidates = sample(count, intrinsics)
    from tvm.s_tir import meta_schedule as ms

    from cdmpp.integrations.candidates import CandidateEncoder, prim_func
    from cdmpp.integrations.object_walk import build_asts

    extractor = ms.feature_extractor.PerStoreFeature()
    modules = [candidate.sch.mod for candidate in candidates]

    def ours() -> object:
        return CandidateEncoder().encode(modules)

    def read() -> object:
        return build_asts([prim_func(module) for module in modules])

    def theirs() -> object:
        return extractor.extract_from(context, candidates)

    seconds = interleaved({"ours": ours, "read": read, "theirs": theirs}, repeats, warm_up=1, clock=clock)
    mine, reading, other = (1e3 * statistics.median(seconds[n]) / count for n in ("ours", "read", "theirs"))
    return mine, reading, other, median_ratio(seconds["theirs"], seconds["ours"])


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--candidates", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--without-intrinsics", action="store_true")
    parser.add_argument("--cpu-time", action="store_true", help="of the scheduled modules, in place of wall time")
    options = parser.parse_args()
    rows, whole = operators(40 * options.repeats)
    print("| operator specification | median ms |\n| --- | ---: |")
    for name, milliseconds in rows:
        print(f"| {name} | {milliseconds:.2f} |")
    print(f"| **all** | **{whole:.2f}** |\n")
    started = time.perf_counter()
    clock = time.process_time if options.cpu_time else time.perf_counter
    ours, read, theirs, ratio = scheduled(options.candidates, options.repeats, not options.without_intrinsics, clock)
    print(f"| {options.candidates} scheduled modules, one thread | ms a candidate |\n| --- | ---: |")
    print(f"| ours with the schedule's columns, from the module object | {ours:.2f} |")
    print(f"| of that reading the program | {read:.2f} |")
    print(f"| TVM's PerStoreFeature (C++) | {theirs:.2f} |\n| **ours is faster by** | **{ratio:.2f}x** |")
    print(f"\n({time.perf_counter() - started:.0f} s with sampling)", file=sys.stderr)


if __name__ == "__main__":
    main()
