"""A short search for good schedules of one task, in a worker process.

It is MetaSchedule's evolutionary search with its XGBoost cost model and a small population. The caller
measures each round and reports the latencies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cdmpp.data.measure.sampling import SampledProgram, prepare_sampler, scheduled_program, task_seed, tune_context
from cdmpp.errors import MissingDependencyError, install_hint

#: Candidates per round. The search learns from each round before it proposes the next one.
ROUND = 16
#: A tenth of TVM's population, so that a round takes seconds instead of minutes on two cores.
POPULATION, GENERATIONS, MEASURED_SHARE = 64, 2, 0.25
#: Latency in seconds that is reported for a failed program.
FAILED_S = 1e10


class Search:
    """The search of one task.

    Parameters
    ----------
    tvm_json, task_hash : str
        The unscheduled PrimFunc and its hash.
    target : mapping
        TVM target as JSON.
    trials : int
        Number of programs to measure.
    seed : int
    """

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


_search: Search | None = None


def prepare_search(kind: str) -> None:
    """Import the packages for a search on one kind of target."""
    try:
        import xgboost  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(
            "a search needs xgboost, which TVM's cost model uses", hint=f"{install_hint('measure')}, or omit --tune"
        ) from error
    prepare_sampler(kind)


def begin(tvm_json: str, task_hash: str, target: Mapping[str, Any], trials: int, seed: int) -> list[SampledProgram]:
    """Begin a task's search in this worker; return its first round."""
    global _search
    _search = Search(tvm_json, task_hash, target, trials, seed)
    return _search.propose()


def continue_search(latencies_s: Sequence[float | None]) -> list[SampledProgram]:
    """Report the latencies of the last round; return the next one."""
    if _search is None:
        raise RuntimeError("no search has begun in this process")
    _search.learn(latencies_s)
    return _search.propose()
