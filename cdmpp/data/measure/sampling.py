"""Sampling of a task's schedules from MetaSchedule's post-order-apply space, in a worker process."""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cdmpp.programs.frontends.imports import import_intrinsics
from cdmpp.programs.tvm_json import find_prim_func, load, structural_hash

logger = logging.getLogger(__name__)

#: Candidates per draw of replay-trace. The programs of a seed depend on it.
DRAW = 32
#: The space counts as exhausted after this many draws without a new program.
IDLE_DRAWS = 2


@dataclass(frozen=True)
class SampledProgram:
    """A scheduled program.

    Attributes
    ----------
    hash : str
        Structural hash; traces with equal programs count once.
    tvm_json : str
    origin : {"default", "sampled", "good", "active", "tuned"}
        Untuned program, random schedule, best predicted schedule of a pool, schedule of a pool on which models
        disagree, or program proposed by a search.
    """

    hash: str
    tvm_json: str
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
        _module(tvm_json),
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
        bound = dlight.ApplyDefaultSchedule(dlight.gpu.Fallback())(_module(tvm_json))
    return scheduled_program(bound, "default")


def sample_programs(
    tvm_json: str, task_hash: str, target: Mapping[str, Any], count: int, seed: int
) -> list[SampledProgram]:
    """Return the untuned default, and up to ``count`` distinct schedules of a task.

    The draws depend only on seed, task and target. The first n programs of a larger count equal those of the
    smaller count, so that a collection can be extended.

    Parameters
    ----------
    tvm_json : str
        The unscheduled PrimFunc.
    task_hash : str
    target : mapping
        TVM target as JSON; CPUs need ``num-cores``.
    count, seed : int

    Returns
    -------
    list of SampledProgram
        The default comes first. Fewer than ``count`` + 1 if the space is exhausted.
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
        strategy.notify_runner_results(candidates, _no_results(len(candidates)))
    return list(programs.values())


def _module(tvm_json: str) -> Any:
    import tvm

    function = tvm.ir.load_json(tvm_json)
    return tvm.IRModule({"main": function.with_attr("global_symbol", "main")})


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


def _no_results(count: int) -> list[Any]:
    """Placeholder results: replay-trace only counts them."""
    from tvm.s_tir import meta_schedule as ms

    return [ms.runner.RunnerResult([1.0], None) for _ in range(count)]
