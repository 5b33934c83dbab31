"""Schedules of a task, in a worker process: samples of MetaSchedule's post-order-apply space, and a short search.

The search is MetaSchedule's evolutionary search with its XGBoost cost model and a small population. The caller
measures each round and reports the latencies.
"""

from __future__ import annotations

import hashlib
import logging
import os
import random
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cdmpp.data.measure.building import main_module
from cdmpp.errors import MissingDependencyError, install_hint
from cdmpp.programs.frontends.imports import import_intrinsics
from cdmpp.programs.tvm_json import find_prim_func, load, structural_hash

logger = logging.getLogger(__name__)
#: Candidates per draw of replay-trace. The programs of a seed depend on it.
DRAW = 32
#: The space counts as exhausted after this many draws without a new program.
IDLE_DRAWS = 2
#: Candidates per round. The search learns from each round before it proposes the next one.
ROUND = 16
#: A tenth of TVM's population, so that a round takes seconds instead of minutes on two cores.
POPULATION, GENERATIONS, MEASURED_SHARE = 64, 2, 0.25
#: Latency in seconds that is reported for a failed program.
FAILED_S = 1e10
#: Irregular schedules: sizes of inner loops, of vectors, and the largest loop that is unrolled.
FACTORS, VECTORS, UNROLLED = (2, 3, 5, 6, 7, 12, 13, 24, 48, 100), (2, 3, 4, 7, 8, 12, 16, 24, 32, 64), 24


@dataclass(frozen=True)
class SampledProgram:
    """A scheduled program."""

    hash: str  # structural; traces with equal programs count once
    tvm_json: str
    # "default" (untuned), "sampled" (random schedule of a design space), "irregular" (random loops and annotations),
    # "good" (best predicted of a pool), "active" (of a pool, models disagree on it), or "tuned" (proposed by a search)
    origin: str


def prepare_sampler(kind: str) -> None:
    """Import the packages for sampling on one kind of target, once per worker.

    ``TuneContext()`` imports ``tvm.s_tir.tensor_intrin``, whose CUDA part alone takes seconds (TVM 0.27).
    The package is entered in ``sys.modules`` beforehand with the part that this kind of target uses.
    """
    import tvm.s_tir

    name = "tvm.s_tir.tensor_intrin"
    if name not in sys.modules:
        package = types.ModuleType(name)
        package.__path__ = [os.path.join(p, "tensor_intrin") for p in tvm.s_tir.__path__]
        sys.modules[name] = package
        import_intrinsics("cuda" if kind == "cuda" else "x86" if kind == "llvm" else kind)
    from tvm.s_tir import meta_schedule  # noqa: F401


def tune_context(tvm_json: str, target: Mapping[str, Any], seed: int, strategy: Any = "replay-trace") -> Any:
    """Return a ``TuneContext`` of a task, and its design spaces."""
    import tvm
    from tvm.s_tir import meta_schedule as ms

    context = ms.TuneContext(
        main_module(tvm_json),
        target=tvm.target.Target(dict(target)),
        space_generator="post-order-apply",
        search_strategy=strategy,
        rand_state=seed,
        num_threads=1,
    )
    return context, context.generate_design_space()


def default_program(tvm_json: str, task_hash: str, target: Mapping[str, Any]) -> SampledProgram:
    """Return the untuned program of a task.

    On a CPU it is the task as lowered. On a GPU, TVM's fallback rule binds its loops to threads.
    """
    if target["kind"] == "llvm":
        return SampledProgram(task_hash, tvm_json, "default")
    import tvm
    from tvm.s_tir import dlight

    # TVM's DefaultGPUSchedule refuses functions of several blocks ("Duplicated block name root").
    with tvm.target.Target(dict(target)):
        bound = dlight.ApplyDefaultSchedule(dlight.gpu.Fallback())(main_module(tvm_json))
    return scheduled_program(bound, "default")


def sample_programs(
    tvm_json: str, task_hash: str, target: Mapping[str, Any], count: int, seed: int
) -> list[SampledProgram]:
    """Return the untuned default, and up to ``count`` distinct schedules of a task; fewer if the space is exhausted.

    The draws depend only on seed, task and target, a TVM target as JSON; CPUs need ``num-cores``. The first n programs
    of a larger count equal those of the smaller count, so that a collection can be extended.
    """
    try:
        default = default_program(tvm_json, task_hash, target)
    except Exception as error:  # TVM raises many kinds of errors
        logger.warning("task %s: no default for %s: %s", task_hash, target["kind"], error)
        default = SampledProgram(task_hash, tvm_json, "default")  # its build fails, and the record contains the error
    programs = {default.hash: default}
    if count == 0:  # without a design space, which some tasks do not have
        return [default]
    import tvm_ffi
    from tvm.s_tir import meta_schedule as ms

    context, spaces = tune_context(tvm_json, target, task_seed(task_hash, seed))
    strategy = context.search_strategy
    idle, drawn = 0, set[int]()
    # An upper bound that no space reaches: replay-trace stops by itself after max_trials.
    strategy.pre_tuning(max_trials=DRAW * 1000, num_trials_per_iter=DRAW, design_spaces=spaces)
    while len(programs) <= count and idle < IDLE_DRAWS:
        candidates = strategy.generate_measure_candidates()
        if not candidates:
            break
        before = len(programs)
        for candidate in candidates:
            key = tvm_ffi.structural_hash(candidate.sch.mod["main"])  # cheaper than the program's text and hash
            if key not in drawn and len(programs) <= count:
                drawn.add(key)
                program = scheduled_program(candidate.sch.mod, "sampled")
                programs.setdefault(program.hash, program)
        idle = idle + 1 if len(programs) == before else 0
        # Placeholder results: replay-trace only counts them.
        results = [ms.runner.RunnerResult([1.0], None) for _ in candidates]
        strategy.notify_runner_results(candidates, results)
    return list(programs.values())


def irregular_programs(tvm_json: str, task_hash: str, count: int, seed: int) -> list[SampledProgram]:
    """Return up to ``count`` distinct schedules of a CPU task that no design space has.

    Every block is rearranged at random: splits that do not divide, loops in any order, vectors that cross rows or lie
    over broadcast operands, parallel and unrolled loops at any depth.
    """
    from tvm.s_tir import Schedule

    draw = random.Random(task_seed(task_hash, seed))
    programs: dict[str, SampledProgram] = {}
    for _ in range(4 * count):
        schedule = Schedule(main_module(tvm_json), seed=1)
        root = schedule.get_sblock("root")
        for block in schedule.get_child_blocks(root):
            _rearrange(schedule, block, draw)
        program = scheduled_program(schedule.mod, "irregular")
        if program.hash != task_hash:
            programs.setdefault(program.hash, program)
        if len(programs) == count:
            break
    return list(programs.values())


def _rearrange(schedule: Any, block: Any, draw: random.Random) -> None:
    """Apply random primitives to the loops of a block; those that would change its result are left out."""
    from tvm.error import InternalError
    from tvm.s_tir.schedule import ScheduleError

    def apply(share: float, primitive: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return primitive(*arguments) if draw.random() < share else None
        except (ScheduleError, InternalError):
            return None

    def extent(loop: Any) -> int:
        return int(schedule.get(loop).extent)

    def loops(limit: float = float("inf")) -> list[Any]:
        return [loop for loop in schedule.get_loops(block) if 1 < extent(loop) <= limit]

    def split(share: float, loop: Any, sizes: Sequence[int]) -> None:
        if smaller := [size for size in sizes if size < extent(loop)]:
            apply(share, schedule.split, loop, [None, draw.choice(smaller)])

    if not loops():
        return
    fused = apply(0.3, schedule.fuse, *schedule.get_loops(block))
    for loop in [fused] if fused else draw.sample(loops(), min(2, len(loops()))):
        split(0.5, loop, FACTORS)
    order = loops()
    draw.shuffle(order)
    apply(0.0 if fused else 0.4, schedule.reorder, *order)
    split(0.6, loops()[-1], VECTORS)
    if extent(inner := loops()[-1]) <= VECTORS[-1]:
        apply(0.8, schedule.vectorize, inner)
    apply(0.5, schedule.parallel, draw.choice(loops()))
    for loop in draw.sample(loops(UNROLLED), min(1, len(loops(UNROLLED)))):
        apply(0.4, schedule.unroll, loop)
    apply(0.3, schedule.decompose_reduction, block, draw.choice(loops()))


def scheduled_program(module: Any, origin: str) -> SampledProgram:
    """Return the function ``main`` of a scheduled module."""
    import tvm

    text = str(tvm.ir.save_json(module["main"]))
    nodes, root = load(text)
    return SampledProgram(structural_hash(nodes, find_prim_func(nodes, root)), text, origin)


def task_seed(task_hash: str, seed: int) -> int:
    """Derive a seed for a task: positive and below 2^31, as TVM requires."""
    digest = hashlib.sha256(f"{seed}\0{task_hash}".encode()).digest()
    return int.from_bytes(digest[:4], "big") % (2**31 - 1) + 1


class Search:
    """The search of one task, an unscheduled PrimFunc, that measures ``trials`` programs."""

    def __init__(self, tvm_json: str, task_hash: str, target: Mapping[str, Any], trials: int, seed: int) -> None:
        from tvm.s_tir import meta_schedule as ms

        strategy = ms.search_strategy.EvolutionarySearch(
            population_size=POPULATION, genetic_num_iters=GENERATIONS, init_measured_ratio=MEASURED_SHARE
        )
        self._context, spaces = tune_context(tvm_json, target, task_seed(task_hash, seed), strategy)
        self._database = ms.database.MemoryDatabase()
        self._workload = self._database.commit_workload(self._context.mod)
        self._model = ms.cost_model.XGBModel(num_warmup_samples=ROUND)
        self._context.search_strategy.pre_tuning(
            max_trials=trials,
            num_trials_per_iter=min(ROUND, trials),
            design_spaces=spaces,
            database=self._database,
            cost_model=self._model,
        )
        self._candidates: list[Any] = []

    def propose(self) -> list[SampledProgram]:
        """Return the next round; empty when the search has ended."""
        self._candidates = list(self._context.search_strategy.generate_measure_candidates() or ())
        return [scheduled_program(c.sch.mod, "tuned") for c in self._candidates]

    def learn(self, latencies_s: Sequence[float | None]) -> None:
        """Report the latencies of the last round, in seconds; None for a failed program."""
        from tvm.s_tir import meta_schedule as ms

        results = []
        for candidate, latency in zip(self._candidates, latencies_s, strict=True):
            seconds = [FAILED_S if latency is None else latency]
            results.append(ms.runner.RunnerResult(seconds, None))
            self._database.commit_tuning_record(
                ms.database.TuningRecord(
                    candidate.sch.trace, self._workload, seconds, self._context.target, candidate.args_info
                )
            )
        self._model.update(self._context, self._candidates, results)
        self._context.search_strategy.notify_runner_results(self._candidates, results)


#: The search of a worker; :func:`begin_search` makes it.
_search: Search


def prepare_search(kind: str) -> None:
    """Import the packages for a search on one kind of target."""
    try:
        import xgboost  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(
            "a search needs xgboost, which TVM's cost model uses", hint=f"{install_hint('measure')}, or omit --tune"
        ) from error
    prepare_sampler(kind)


def begin_search(
    tvm_json: str, task_hash: str, target: Mapping[str, Any], trials: int, seed: int
) -> list[SampledProgram]:
    """Begin a task's search in this worker; return its first round."""
    global _search
    _search = Search(tvm_json, task_hash, target, trials, seed)
    return _search.propose()


def continue_search(latencies_s: Sequence[float | None]) -> list[SampledProgram]:
    """Report the latencies of the last round; return the next one."""
    _search.learn(latencies_s)
    return _search.propose()
