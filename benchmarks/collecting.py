"""Speed of a collection, and its overhead beside the timed runs.

``python -m benchmarks.collecting [--network NAME ...] [--candidates 40] [--cap-s 600] [--skip-tvm]``, on an
idle machine. Two parts, each a real collection into a folder that is thrown away:

1. Some networks, one after the other: programs a second, and what a program costs outside its timed runs:
   the median of building, linking, loading and inputs, plus lowering, sampling and the start of all workers
   spread over 1,000 programs. (Drawing is paid for 32 schedules a task, however few are kept.)
2. The same candidates of one task through this package and through TVM's LocalBuilder and LocalRunner, both
   from their own start, the latter stopped at a cap.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from cdmpp.data.measure.collect import Collector
from cdmpp.data.measure.sampling import prepare_sampler, sample_programs
from cdmpp.data.measure.settings import CollectSettings
from cdmpp.data.measure.store import FIRST, Store, StoredMeasurement
from cdmpp.data.measure.targets import Configuration, configurations

NETWORKS = ("bert-tiny", "resnet18", "mobilenet-v2", "llama-block", "vae-3d", "moe-top2")
#: Programs over which the one-time start is spread.
AMORTISED = 1000
COLUMNS = (
    "network",
    "programs",
    "wall s",
    "programs/s",
    "lower and sample s",
    "start s",
    "timed s",
    "building and loading s",
    "outside s",
)


def timed_s(measurement: StoredMeasurement) -> float:
    """Seconds of the kept repeats of a measurement."""
    return (measurement.number or 0) * sum(measurement.repeats_s)


def networks_part(names: tuple[str, ...], chosen: tuple[Configuration, ...], settings: CollectSettings) -> list[Any]:
    """A row of :data:`COLUMNS` for each network."""
    rows = []
    for name in names:
        with tempfile.TemporaryDirectory() as folder, Store(Path(folder)) as store:
            collector = Collector(store, settings, chosen)
            started = time.perf_counter()
            collector.prepare([name])
            prepared, begun = time.perf_counter(), time.time()
            collector.measure()
            ended = time.perf_counter()
            found = list(store.measurements(FIRST))
            good = [m for m in found if not m.failure]
            # What is paid once: lowering, sampling, and all before the first measurement is kept.
            once = prepared - started
            start = min(m.measured_at for m in good) - begun
            overhead = statistics.median(m.overhead_s for m in good)
            rows.append(
                (
                    name,
                    len(found),
                    ended - started,
                    len(found) / (ended - started),
                    once,
                    start,
                    sum(map(timed_s, good)),
                    overhead,
                    overhead + (once + start) / AMORTISED,
                )
            )
            print(f"  {name}: {len(found)} programs, {len(found) - len(good)} failed", flush=True)
    return rows


def candidates(count: int, target: dict[str, Any]) -> list[str]:
    """TVM JSON of schedules of one convolution with ReLU; runs in a process of its own."""
    import tvm
    from tvm import te, topi

    from cdmpp.programs.tvm_json import find_prim_func, load, structural_hash

    prepare_sampler("llvm")
    image = te.placeholder((1, 64, 28, 28), name="image")
    weight = te.placeholder((64, 64, 3, 3), name="weight")
    result = topi.nn.relu(topi.nn.conv2d(image, weight, 1, 1, 1))
    text = str(tvm.ir.save_json(te.create_prim_func([image, weight, result])))
    nodes, root = load(text)
    digest = structural_hash(nodes, find_prim_func(nodes, root))
    return [p.tvm_json for p in sample_programs(text, digest, target, count - 1, 0)]


def ours(texts: list[str], chosen: tuple[Configuration, ...]) -> tuple[int, float]:
    """Number of measured programs, and seconds including start-up."""
    from cdmpp.data.measure.sampling import SampledProgram
    from cdmpp.programs.frontends.tasks import Task, TaskList

    with tempfile.TemporaryDirectory() as folder, Store(Path(folder)) as store:
        store.add_network("one", TaskList("one", (Task("conv2d", "task", texts[0], 1),)))
        programs = [SampledProgram(f"{i:08x}", text, "sampled") for i, text in enumerate(texts)]
        store.add_programs("task", programs, len(texts))
        started = time.perf_counter()
        Collector(store, CollectSettings(repeat_share=0.0), chosen).measure()
        seconds = time.perf_counter() - started
        return sum(not m.failure for m in store.measurements(FIRST)), seconds


def tvm_local(texts: list[str], target: dict[str, Any], done: Any) -> None:
    """TVM's own builder and runner on the same programs; ``done`` counts what they finished."""
    import tvm
    from tvm.s_tir import meta_schedule as ms

    goal = tvm.target.Target(target)
    builder = ms.builder.LocalBuilder()
    config = ms.runner.EvaluatorConfig(number=1, repeat=10, min_repeat_ms=4)
    runner = ms.runner.LocalRunner(evaluator_config=config)
    modules = [tvm.IRModule({"main": tvm.ir.load_json(t).with_attr("global_symbol", "main")}) for t in texts]
    built = builder.build([ms.builder.BuilderInput(module, goal) for module in modules])
    inputs = []
    for module, result in zip(modules, built, strict=True):
        if result.error_msg is None:
            arguments = ms.arg_info.ArgInfo.from_prim_func(module["main"])
            inputs.append(ms.runner.RunnerInput(result.artifact_path, "cpu", arguments))
    for future in runner.run(inputs):
        with done.get_lock():
            done.value += future.result().error_msg is None


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", action="append", help="network of part 1, repeatable; default: two of six")
    parser.add_argument("--schedules", type=int, default=4)
    parser.add_argument("--builders", type=int, help="building processes; default: one per core")
    parser.add_argument("--candidates", type=int, default=40)
    parser.add_argument("--cap-s", type=float, default=600.0)
    parser.add_argument("--skip-tvm", action="store_true", help="leave part 2 out")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    given = parser.parse_args()
    chosen = configurations(("native@1",))
    target = dict(chosen[0].target)
    print(f"on {chosen[0].name}, {target}", flush=True)
    settings = CollectSettings(schedules=given.schedules, repeat_share=0.0, builders=given.builders)
    rows = networks_part(tuple(given.network or NETWORKS[:2]), chosen, settings)
    print("  ".join(COLUMNS))
    for name, *figures in rows:
        print(f"{name:14s} " + "  ".join(f"{f:.3g}" for f in figures))
    figures = {"networks": [dict(zip(COLUMNS, row, strict=True)) for row in rows]}
    if not given.skip_tvm:
        spawn = multiprocessing.get_context("spawn")
        with spawn.Pool(1) as pool:
            texts = pool.apply(candidates, (given.candidates, target))
        count, seconds = ours(texts, chosen)
        print(f"cdmpp: {count} of {len(texts)} in {seconds:.1f} s, {count / seconds:.2f}/s", flush=True)
        done = spawn.Value("i", 0)
        other = spawn.Process(target=tvm_local, args=(texts, target, done))
        started = time.perf_counter()
        other.start()
        other.join(given.cap_s)
        theirs = time.perf_counter() - started
        capped = other.is_alive()
        if capped:
            other.kill()
        rate = done.value / theirs
        print(
            f"LocalBuilder + LocalRunner: {done.value} of {len(texts)} in {theirs:.1f} s"
            f"{' (stopped at the cap)' if capped else ''}, {rate:.3f}/s"
            + (f"; cdmpp is {count / seconds / rate:.1f} times as fast" if rate else "")
        )
        figures["tvm"] = [
            {
                "candidates": len(texts),
                "cdmpp": count,
                "cdmpp_s": seconds,
                "capped": capped,
                "tvm": done.value,
                "tvm_s": theirs,
            }
        ]
    if given.json:
        given.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
