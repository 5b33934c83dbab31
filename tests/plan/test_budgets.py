"""Searches end with their budget and when they are stopped; no test depends on the speed of the machine."""

import sys
import tracemalloc
from typing import Any

import numpy as np
import pytest

from cdmpp.errors import InfeasibleError
from cdmpp.plan.base.solve import read_request, solve_priced
from cdmpp.plan.compress.solver import improve, tensors_of
from cdmpp.plan.fused import FusedProblem, Model, search
from cdmpp.plan.fused.list_scheduling import list_schedule
from cdmpp.plan.registry import PLANNERS
from cdmpp.plan.split.schema import SplitRequest
from cdmpp.predict.requests import budget
from cdmpp.predict.requests.budget import WALL, SearchControl
from cdmpp_server.plan.warm import REQUESTS

STAGE = {"forward_s": 1.0, "backward_s": 2.0}
#: Layers whose best split is neither that of equal counts nor the greedy one.
UNEVEN: dict[str, Any] = {
    "layers": [{"forward_s": float(s), "backward_s": 2.0 * s} for s in (2, 2, 3, 3, 1, 2, 9, 7)],
    "ranks": 3,
    "micro_batches": 4,
}
APPLICATION: dict[str, Any] = {
    "engines": [{"name": "e", "curve": {"batch": [1, 4], "seconds": [1.0, 1.5]}}],
    "primitives": [{"id": str(i), "engine": "e", "after": [str(i - 1)] if i else []} for i in range(6)],
    "arrivals_s": [0.0, 0.2, 0.7, 1.9],
}


class Looks(SearchControl):
    """A control whose budget ends after a number of looks at it; it counts the looks after that."""

    def __init__(self, looks: int) -> None:
        super().__init__(60.0)
        self.looks, self.late = looks, 0

    @property
    def left_s(self) -> float:
        self.looks -= 1
        if self.looks >= 0:
            return 1.0
        self.late += 1
        return 0.0


def requests() -> list[tuple[str, Any]]:
    given = [(kind, values[0]) for kind, values in REQUESTS.items() if kind in ("pipeline", "precision", "compress")]
    return [*given, ("split", {**UNEVEN, "goal": "step"}), ("application", APPLICATION)]


@pytest.mark.parametrize("looks", [0, 1, 2, 5, 9])
@pytest.mark.parametrize(("kind", "value"), requests())
def test_search_ends_soon_after_its_budget_with_a_plan(kind: str, value: Any, looks: int) -> None:
    request = PLANNERS[kind].read({name: item for name, item in value.items() if name != "max_steps"})
    control = Looks(looks)
    answer = solve_priced(request, [], control)
    assert answer.gap >= 0
    assert control.late <= 12


def test_stopped_search_of_fused_pipelines_schedules_no_candidate() -> None:
    control = SearchControl(60.0)
    control.stop()
    found = search(FusedProblem(4, (Model(4, 8, 1.0, 2.0), Model(2, 8, 1.0, 1.0))), control)
    assert found.steps == 0
    assert found.schedule.makespan_s == min(found.baselines.values())


def test_batch_that_runs_at_the_end_of_the_budget_is_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    # A batch of so many candidates that it is not done at the first look at the clock.
    module = sys.modules[search.__module__]
    monkeypatch.setattr(module, "_BATCH_TASKS", 10**9)
    monkeypatch.setattr(module, "_BATCH_CANDIDATES", 3000)
    monkeypatch.setattr(module, "_LOOK_S", 0.0)
    found = search(FusedProblem(8, (Model(8, 32, 1.0, 2.0), Model(4, 32, 1.0, 1.1))), Looks(1))
    assert 0 <= found.steps < 2 * 3000


def test_stopped_list_schedule_returns_no_makespan() -> None:
    problem = FusedProblem(2, (Model(2, 3, 1.0, 2.0),))
    tasks = problem.tasks
    start, peak = np.empty(tasks.size), np.empty(2)
    window, limits = np.full(len(tasks.count), 9), np.full(2, np.inf)
    stop = np.ones(1, np.int64)
    arguments = (tasks.arrays, window, limits, False, np.zeros(tasks.size), 0.0, start, peak, stop)
    assert list_schedule(*arguments) == -2.0
    stop[0] = 0
    assert list_schedule(*arguments) > 0


def test_split_without_time_is_a_baseline_with_a_bound() -> None:
    request = read_request(SplitRequest, UNEVEN)
    best = solve_priced(request, [])
    simple = solve_priced(request, [], Looks(1))
    assert simple.value_s == min(simple.baselines.values()) > best.value_s
    assert simple.lower_bound_s <= best.value_s


def test_split_without_time_is_an_error_where_no_baseline_fits() -> None:
    ranks = [{"memory_bytes": 30.0}, {"memory_bytes": 1.0}]
    layers = [{**STAGE, "weight_bytes": size} for size in (10.0, 10.0, 10.0, 1.0)]
    request = read_request(SplitRequest, {"layers": layers, "ranks": ranks, "micro_batches": 1})
    assert solve_priced(request, []).boundaries == [3]
    with pytest.raises(InfeasibleError, match="budget ended") as error:
        solve_priced(request, [], Looks(0))
    assert error.value.path == "budget_s"


def test_pairs_of_changes_are_made_one_by_one() -> None:
    compressor = {"ratio": 0.1, "gpu": {"compress_s_per_byte": 1e-10, "decompress_s_per_byte": 1e-11}}
    value = {
        "tensors": [{"name": str(i), "bytes": 1e6, "backward": 1e-3} for i in range(400)],
        "compressors": [{**compressor, "name": name} for name in "abcd"],
        "workers": 4,
        "link": {"alpha_s": 1e-5, "bandwidth_bytes_per_s": 1e9},
    }
    tensors = tensors_of(PLANNERS["compress"].read(value))  # type: ignore[arg-type]
    tracemalloc.start()
    improve(tensors, (0,) * 400, lambda: False)
    assert tracemalloc.get_traced_memory()[1] < 20e6  # a list of all pairs takes 200 MB
    tracemalloc.stop()


class SlowProcess:
    """A clock, and the CPU time of a process that has a tenth of it."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def process_time(self) -> float:
        return self.now_s / 10


def test_budget_counts_cpu_time_up_to_a_limit_of_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SlowProcess()
    monkeypatch.setattr(budget, "time", clock)
    control = SearchControl(1.0)
    clock.now_s = 2.0
    assert not control.expired
    clock.now_s = WALL - 0.01
    assert not control.expired
    clock.now_s = WALL
    assert control.expired
    control.restart()
    assert not control.expired


@pytest.mark.slow
def test_search_that_did_not_begin_says_so() -> None:
    request = PLANNERS["application"].read(APPLICATION)
    control = Looks(0)
    answer = solve_priced(request, [], control)
    assert answer.steps == 0 and answer.gap > 0  # type: ignore[attr-defined]
    assert any("did not begin" in line for line in answer.explanation)  # type: ignore[attr-defined]
    assert not any("did not begin" in line for line in solve_priced(request, []).explanation)  # type: ignore[attr-defined]
