"""Pipeline steps per second of the emulator, against the replay engine, with and without reuse.

``python -m benchmarks.planning.emulator`` writes ``benchmarks/results/emulator.json``. For one core set
OMP_NUM_THREADS=1. All methods are timed alternately in one run, and their makespans are compared bit for bit. Times
are processor times, so that other processes matter less. The costs are random: they do not affect the speed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.timing import interleaved, median_ratio
from cdmpp.simulate.emulator import Emulator, Stage
from cdmpp.simulate.emulator.arrays import durations
from cdmpp.simulate.emulator.as_graph import to_graph
from cdmpp.simulate.emulator.candidates import Candidates
from cdmpp.simulate.emulator.evaluate import Ints, evaluate
from cdmpp.simulate.emulator.reuse import Reuse
from cdmpp.simulate.emulator.structure import Structure
from cdmpp.simulate.replay import Replayer, replay
from cdmpp.utils import jit

RESULT = Path(__file__).parents[1] / "results" / "emulator.json"
STAGES, MICRO_BATCHES = 8, 16
CLASSES = (0,) * MICRO_BATCHES
TARGET_PER_S = 10_000


def random_stages(draw: random.Random, count: int = STAGES) -> list[Stage]:
    """Stages of similar length."""
    return [
        Stage(draw.uniform(0.8, 1.2), draw.uniform(1.6, 2.4), activation_bytes=draw.uniform(1, 2)) for _ in range(count)
    ]


def turns(ways: dict[str, tuple[int, Callable[[], object]]], repeats: int, against: str) -> dict[str, Any]:
    """Evaluations per second of each method, and their ratio to those of ``against``, timed alternately."""
    calls = {name: call for name, (_, call) in ways.items()}
    seconds = interleaved(calls, repeats, clock=time.process_time)
    per_evaluation = {name: [s / count for s in seconds[name]] for name, (count, _) in ways.items()}
    return {
        name: {
            "evaluations_per_s": round(1.0 / statistics.median(per_evaluation[name])),
            "times_the_replay_engine": round(median_ratio(per_evaluation[against], per_evaluation[name]), 2),
        }
        for name in ways
    }


def other_costs(repeats: int) -> dict[str, Any]:
    """1F1B with different costs for every candidate, so that nothing can be reused."""
    draw = random.Random(0)
    emulator = Emulator()
    structure = emulator.structure("1f1b", STAGES, STAGES, MICRO_BATCHES)
    stages = [random_stages(draw) for _ in range(256)]
    tables = [emulator.table(costs) for costs in stages]
    arrays = [durations(structure, table, CLASSES, 0.0) for table in tables]
    graph = to_graph(structure, arrays[0][0], arrays[0][1])
    replayer = Replayer(graph)
    as_nodes = [duration[structure.order] for duration, _, _ in arrays]
    turn, start, end = np.empty_like(structure.order), np.empty(structure.tasks), np.empty(structure.tasks)

    def by_arrays(count: int) -> list[float]:
        makespans = []
        for duration, lag, _ in arrays[:count]:
            evaluate(structure.order, structure.begin, duration, structure.deps, lag, turn, start, end)
            makespans.append(float(end.max()))
        return makespans

    def by_emulator(count: int) -> list[float]:
        emulator.stages = Reuse()  # empty: no stage is reused
        return [emulator.run(structure, emulator.table(costs), CLASSES).makespan_s for costs in stages[:count]]

    def by_replayer(count: int) -> list[float]:
        return [replayer.run(duration_s).makespan_s for duration_s in as_nodes[:count]]

    def by_replay(count: int) -> list[float]:
        return [replay(to_graph(structure, *costs[:2])).makespan_s for costs in arrays[:count]]

    assert by_arrays(64) == by_emulator(64) == by_replayer(64) == by_replay(64)
    return turns(
        {
            "replay engine, a graph for each": (4, lambda: by_replay(4)),
            "replay engine, prepared once": (64, lambda: by_replayer(64)),
            "emulator, costs of stages in": (256, lambda: by_emulator(256)),
            "emulator, arrays in": (256, lambda: by_arrays(256)),
        },
        repeats,
        "replay engine, prepared once",
    )


def without_a_compiler(repeats: int) -> int:
    """Evaluations per second without numba, from arrays: in a process that does not compile."""
    code = f"from benchmarks.planning import emulator; print(emulator.plain_per_s({repeats}))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


def plain_per_s(repeats: int) -> int:
    """The measurement of :func:`without_a_compiler`, in this process."""
    emulator = Emulator()
    structure = emulator.structure("1f1b", STAGES, STAGES, MICRO_BATCHES)
    duration, lag, _ = durations(structure, emulator.table(random_stages(random.Random(0))), CLASSES, 0.0)
    turn, start, end = (np.empty_like(a) for a in (structure.order, duration, duration))
    arrays = structure.order, structure.begin, duration, structure.deps, lag, turn, start, end
    seconds = interleaved({"plain": lambda: evaluate(*arrays)}, 10 * repeats, clock=time.process_time)
    return round(1 / statistics.median(seconds["plain"]))


def annealed(structure: Structure, candidates: Candidates, count: int, walk: bool) -> list[Ints]:
    """Orders that simulated annealing with swaps of neighbours evaluates; without ``walk`` around one order."""
    draw = random.Random(0)
    places = [
        at for rank in range(structure.ranks) for at in range(structure.begin[rank], structure.begin[rank + 1] - 1)
    ]
    order, asked = structure.order.copy(), []
    now_s, heat_s = candidates.makespan_s(order), 3.0
    while len(asked) < count:
        new = order.copy()
        at = draw.choice(places)
        new[at], new[at + 1] = new[at + 1], new[at]
        asked.append(new)
        found_s = candidates.makespan_s(new)
        if walk and (found_s <= now_s or draw.random() < np.exp((now_s - found_s) / heat_s)):
            order, now_s = new, found_s
        heat_s *= 0.9995
    return asked


def other_orders(repeats: int, count: int, stages: int, micro_batches: int, walk: bool) -> dict[str, Any]:
    """Simulated annealing over orders, replayed; some of the orders are in a deadlock."""
    emulator, classes = Emulator(), (0,) * micro_batches
    structure = emulator.structure("1f1b", stages, stages, micro_batches)
    costs = emulator.table(random_stages(random.Random(1), stages))

    def candidates(**how: bool) -> Candidates:
        return Candidates(structure, costs, classes, **how)

    orders = annealed(structure, candidates(), count, walk)
    duration, lag, _ = durations(structure, costs, classes, 0.0)

    def by_replay(orders: list[Ints]) -> list[float]:
        changed = [replace(structure, order=order) for order in orders]
        return [replay(to_graph(candidate, duration, lag)).makespan_s for candidate in changed]

    hows = {
        "from the start": {"resume": False},
        "resumed": {"resume": True},
        "resumed and remembered": {"resume": True, "remember": True},
    }
    ways: dict[str, tuple[int, Callable[[], object]]] = {}
    makespans: dict[str, list[float]] = {}
    for name, how in hows.items():
        used = candidates(**how)
        makespans[name] = [used.makespan_s(order) for order in orders]
        ways[name] = (count, partial(_play, candidates, how, orders))
    assert makespans["from the start"] == makespans["resumed"] == makespans["resumed and remembered"]
    runs = [order for order, s in zip(orders, makespans["resumed"], strict=True) if s < float("inf")][:16]
    assert by_replay(runs) == [used.makespan_s(order) for order in runs]
    resumed = _play(candidates, {"resume": True}, orders)
    remembered = _play(candidates, {"resume": True, "remember": True}, orders).orders
    return {
        "candidates": count,
        "that_cannot_run": sum(s == float("inf") for s in makespans["resumed"]),
        "passes_kept": round(resumed.kept / (resumed.kept + resumed.run), 3),
        "hit_rate_of_orders": round(remembered.hits / (remembered.hits + remembered.misses), 3),
        "ways": turns(
            {"replay engine, a graph for each": (2, lambda: by_replay(runs[:2])), **ways},
            repeats,
            "replay engine, a graph for each",
        ),
    }


def _play(make: Callable[..., Candidates], how: dict[str, bool], orders: list[Ints]) -> Candidates:
    candidates = make(**how)
    for order in orders:
        candidates.makespan_s(order)
    return candidates


def memory_modes(repeats: int, count: int) -> dict[str, Any]:
    """A search over recomputation of each stage: whole steps, from their stages."""
    draw = random.Random(2)
    base = Stage(1.0, 2.0, activation_bytes=8.0, boundary_bytes=1.0, weight_bytes=10.0)
    kept, dropped = base, Stage(1.0, 2.0, None, 8.0, 1.0, 10.0, "recompute")
    variants: list[list[Stage]] = []
    now = [kept] * STAGES
    while len(variants) < count:
        now = list(now)
        at = draw.randrange(STAGES)
        now[at] = dropped if now[at] is kept else kept
        variants.append(now)

    def play(reuse: bool) -> tuple[Emulator, list[float]]:
        emulator = Emulator(reuse)
        return emulator, [emulator.simulate(stages, MICRO_BATCHES).makespan_s for stages in variants]

    emulator, makespans = play(True)
    assert makespans == play(False)[1]
    sample = variants[:4]
    structure = emulator.structure("1f1b", STAGES, STAGES, MICRO_BATCHES)

    def by_replay() -> list[float]:
        arrays = [durations(structure, emulator.table(stages), CLASSES, 0.0) for stages in sample]
        return [replay(to_graph(structure, *one[:2])).makespan_s for one in arrays]

    assert by_replay() == makespans[:4]
    steps = emulator.steps
    return {
        "candidates": count,
        "hit_rate_of_steps": round(steps.hits / (steps.hits + steps.misses), 3),
        "hit_rate_of_all": round(emulator.hits / (emulator.hits + emulator.misses), 3),
        "ways": turns(
            {
                "replay engine, a graph for each": (4, by_replay),
                "emulator, no reuse": (count, lambda: play(False)),
                "emulator, reuse": (count, lambda: play(True)),
            },
            repeats,
            "replay engine, a graph for each",
        ),
    }


def long_steps(repeats: int) -> dict[str, Any]:
    """Frames that repeat from micro-batch to micro-batch, in one step."""
    answers = {}
    for stages, micro_batches in ((STAGES, MICRO_BATCHES), (STAGES, 128), (16, 1024)):
        emulator = Emulator()
        structure = emulator.structure("1f1b", stages, stages, micro_batches)
        table = emulator.table([Stage(1.0, 2.0)] * stages)
        duration, lag, step = durations(structure, table, (0,) * micro_batches, 0.05)
        turn, start, end = (np.empty_like(a) for a in (structure.order, duration, duration))
        again = np.empty_like(start), np.empty_like(end)
        evaluate(structure.order, structure.begin, duration, structure.deps, lag, turn, start, end)
        emulator.frames.run(structure, duration, lag, step, *again)
        assert np.array_equal(start, again[0]) and np.array_equal(end, again[1])
        frames = emulator.frames
        hit_rate = frames.hits / (frames.hits + frames.misses)
        arrays = structure.order, structure.begin, duration, structure.deps, lag, turn, start, end
        seconds = interleaved(
            {
                "pass by pass": lambda arrays=arrays: [evaluate(*arrays) for _ in range(10)],
                "stretch by stretch": lambda run=frames.run, rest=(structure, duration, lag, step, *again): [
                    run(*rest) for _ in range(10)
                ],
            },
            repeats,
            clock=time.process_time,
        )
        answers[f"{stages} x {micro_batches}"] = {
            "hit_rate_of_stretches": round(hit_rate, 3),
            "microseconds_pass_by_pass": round(1e5 * statistics.median(seconds["pass by pass"]), 1),
            "times_as_fast": round(median_ratio(seconds["pass by pass"], seconds["stretch by stretch"]), 2),
        }
    return answers


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--candidates", type=int, default=20_000)
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    result = {
        "command": "python -m benchmarks.planning.emulator",
        "stages": STAGES,
        "micro_batches": MICRO_BATCHES,
        "target_evaluations_per_s": TARGET_PER_S,
        "compiled": jit.COMPILED,
        "threads": os.environ.get("OMP_NUM_THREADS", "all"),
        "load_average": round(os.getloadavg()[0], 1),
        "other_costs_each_different": other_costs(options.repeats),
        "without_a_compiler_per_s": without_a_compiler(options.repeats),
        "other_orders": {
            "8 x 16, annealed": other_orders(options.repeats, options.candidates, 8, 16, True),
            "8 x 16, neighbours of one order": other_orders(options.repeats, options.candidates, 8, 16, False),
            "32 x 128, annealed": other_orders(3, options.candidates // 10, 32, 128, True),
        },
        "memory_modes": memory_modes(options.repeats, options.candidates // 10),
        "long_steps_one_after_the_other": long_steps(options.repeats),
    }
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
