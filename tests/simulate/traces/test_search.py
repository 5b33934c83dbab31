"""The search over a replayed trace against all combinations, and what it accepts and rejects."""

from __future__ import annotations

import random
from itertools import chain, combinations, product
from pathlib import Path
from typing import Any

import pytest

from cdmpp.errors import FieldError
from cdmpp.simulate.traces import TraceSearch, replay_trace
from cdmpp.simulate.traces.load import read_ranks
from cdmpp.simulate.traces.replay import build_graph
from cdmpp.simulate.traces.search import SearchPlan, SearchSpace, line_latency, search_changes
from tests.seeds import seeds
from tests.simulate.traces.kineto import COMM_STREAM, KinetoTrace

LATENCY, RATE = 60.0, 1 / 0.05  # µs, and MB/ms: 20 µs for a MB
ADD = {"dims": [[64, 64], [64, 64], []], "types": ["float", "float", "Scalar"]}


def step(
    rank: int, backward: list[float], sizes: list[float], *, world: int = 2, adds: int = 2, launch: float = 2.0
) -> KinetoTrace:
    """A forward kernel, backward kernels (µs) with an all-reduce (MB) behind each, and an update at the end."""
    trace = KinetoTrace(rank, world)
    called, at, free = 10.0, 40.0, 0.0

    def run(name: str, seconds: float, begin: float, operator: str = "aten::mm", **inputs: Any) -> float:
        nonlocal called
        trace.op(operator, called, launch, **inputs)
        trace.launch(name, called + 0.1, begin, seconds, call_us=launch - 0.2)
        called += launch + 0.5
        return begin + seconds

    at = run("gemm", 100.0, at)
    for length, size in zip(backward, sizes, strict=True):
        at = run("gemm", length, at)
        begin = max(at, free)
        free = begin + LATENCY + RATE * size
        elements = round(size * 1e6 / 2)
        call: dict[str, Any] = {"Collective name": "allreduce", "In msg nelems": elements, "Out msg nelems": elements}
        call |= {"Group size": world, "dtype": "Half", "Process Group Name": "0", "Process Group Ranks": "[0, 1]"}
        trace.launch("ncclDevKernel_AllReduce_Sum_f16_RING_LL", called, begin, free - begin, COMM_STREAM, **call)
        called += 6
    at = max(at, free) + 1
    for _ in range(adds):
        at = run("vectorized_elementwise_kernel<add>", 3.0, max(at, called + 5), "aten::add_", **ADD)
    trace.runtime("cudaDeviceSynchronize", called, at - called + 2)
    trace.step(3, 0, at + 3)
    return trace


def write(folder: Path, *arguments: Any, **options: Any) -> list[Path]:
    return [step(rank, *arguments, **options).write(folder / f"rank{rank}.json") for rank in (0, 1)]


def searched(paths: list[Path], **options: Any) -> TraceSearch:
    answer = replay_trace(*paths, search=True, **options).search
    assert answer is not None
    return answer


def best_of_all(paths: list[Path]) -> float:
    """The fastest of all combinations of buckets, parts and fused kernels."""
    search = SearchSpace(build_graph(read_ranks(paths)), None)
    keys = list(search.chains)
    subsets = list(chain.from_iterable(combinations(keys, n) for n in range(len(keys) + 1)))
    best = float("inf")
    for buckets, fused in product(product((0, 1, 2, 4), repeat=len(search.buckets)), subsets):
        if buckets[-1]:
            try:
                best = min(best, search.replay(SearchPlan(buckets, frozenset(fused)))[0])
            except FieldError:
                continue
    return best


@pytest.mark.parametrize("seed", seeds(20))
def test_search_is_as_good_as_all_combinations(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    sizes = [rng.choice((0.5, 1, 4, 8)), 2, rng.choice((0.5, 1, 4, 8))]
    paths = write(tmp_path, [rng.uniform(20, 200) for _ in sizes], sizes)
    answer, best = searched(paths), best_of_all(paths)
    assert best <= answer.after_s * (1 + 1e-9)
    assert answer.after_s <= best * 1.01
    assert answer.complete and answer.after_s <= answer.before_s


def test_small_all_reduces_go_together(tmp_path: Path) -> None:
    # Each waits for the one before: 4 x (60 + 20 x MB) µs behind 4 x 10 µs of computation.
    paths = write(tmp_path, [10.0] * 4, [0.1, 0.2, 0.1, 0.2])
    answer = searched(paths)
    assert next(trial.kind for trial in answer.accepted) == "buckets"
    spared_s = sum(trial.saving_s or 0 for trial in answer.accepted if trial.kind == "buckets")
    # Three latencies, less the wait of the first all-reduce for the last gradients.
    assert spared_s == pytest.approx(3 * 60e-6 - 30e-6, abs=1e-6)
    assert "60.0 µs without bytes" in " ".join(answer.remarks)
    labels = {part.label: part.seconds for part in answer.critical_path}
    before = {part.label: part.seconds for part in replay_trace(*paths).critical_path}
    comm = next(label for label in before if "nccl" in label.lower())
    assert labels[comm] < before[comm]


def test_large_all_reduces_stay_apart_and_losses_are_reported(tmp_path: Path) -> None:
    paths = write(tmp_path, [300.0] * 3, [8, 4, 8], adds=0)
    answer = searched(paths)
    assert not any("next" in trial.name or "of " in trial.name for trial in answer.accepted)
    merged = [trial for trial in answer.rejected if trial.kind == "buckets" and "parts" not in trial.name]
    assert merged and all(trial.saving_s is not None and trial.saving_s < 1e-9 for trial in merged)
    assert any((trial.saving_s or 0) < -100e-6 for trial in merged)
    assert answer.after_s == pytest.approx(answer.before_s - sum(t.saving_s or 0 for t in answer.accepted))


def test_fusion_saves_launches_where_the_host_is_the_limit(tmp_path: Path) -> None:
    slow = searched(write(tmp_path, [10.0] * 2, [0.1, 0.4], adds=12, launch=30.0))
    [fused] = [trial for trial in slow.accepted if trial.kind == "fusion"]
    assert fused.name.startswith("one kernel: 12 add_") and fused.saving_s is not None
    # Eleven launches of 29.8 µs, as far as the all-reduces do not become the limit.
    assert 0.5 * 11 * 29.8e-6 < fused.saving_s <= 11 * 29.8e-6


def test_recomputation_is_a_remark(tmp_path: Path) -> None:
    remarks = searched(write(tmp_path, [9.0], [1])).remarks
    assert any(remark.startswith("recomputation is not searched") for remark in remarks)


def test_all_reduces_of_one_size_need_a_latency(tmp_path: Path) -> None:
    paths = write(tmp_path, [10.0] * 3, [0.2] * 3)
    answer = searched(paths)
    assert not any(trial.kind == "buckets" for trial in (*answer.accepted, *answer.rejected))
    assert any("--all-reduce-us" in remark for remark in answer.remarks)
    given = searched(paths, all_reduce_latency_s=60e-6)
    assert given.after_s < answer.after_s


def test_trace_without_all_reduces_has_no_buckets(tmp_path: Path) -> None:
    for options in ({}, {"all_reduce_latency_s": 1e-4}):
        remarks = searched(write(tmp_path, [], []), **options).remarks
        assert sum("buckets are not searched: the trace has no all-reduce" in remark for remark in remarks) == 1
        assert not any(remark.startswith("an all-reduce takes") for remark in remarks)


def test_search_ends_at_the_limit_of_replays(tmp_path: Path) -> None:
    answer = searched(write(tmp_path, [10.0] * 4, [0.1, 0.2, 0.1, 0.2]), max_replays=3)
    assert answer.replays == 3 and not answer.complete


def test_search_begins_with_the_replay_of_the_trace(tmp_path: Path) -> None:
    paths = write(tmp_path, [10.0, 90.0], [1, 4])
    answer = replay_trace(*paths, search=True)
    assert answer.search is not None
    assert answer.search.before_s == pytest.approx(answer.replayed_s, rel=1e-9)
    assert answer.to_dict()["search"]["accepted"] is not None and "search" not in replay_trace(*paths).to_dict()


def test_all_reduce_whose_result_is_needed_earlier_cannot_wait(tmp_path: Path) -> None:
    graph = build_graph(read_ranks(write(tmp_path, [50.0, 50.0, 50.0], [1, 2, 4])))
    # The second backward kernel of rank 0 needs the first result, as in tensor parallelism.
    kernels = [i for i, node in enumerate(graph.nodes) if node.role == "kernel" and node.rank == 0]
    first = next(i for i, node in enumerate(graph.nodes) if node.role == "comm" and node.rank == 0)
    graph.nodes[kernels[2]].deps.append(first)
    answer = search_changes(graph, None, 200)
    cannot = [trial for trial in answer.rejected if trial.seconds is None]
    assert any("wait for each other" in trial.reason for trial in cannot)


def test_latency_is_the_line_at_no_bytes() -> None:
    assert line_latency([(1e6, 70e-6), (2e6, 80e-6), (2e6, 80e-6), (4e6, 100e-6)]) == pytest.approx(60e-6)
    assert line_latency([(1e6, 70e-6), (1.5e6, 80e-6)]) is None
    assert line_latency([]) is None
    # A line that falls below zero, or that lies above the shortest.
    assert line_latency([(1e6, 1e-6), (4e6, 90e-6)]) == 0
    assert line_latency([(1e6, 90e-6), (4e6, 10e-6)]) == pytest.approx(10e-6)


@pytest.mark.parametrize("options", [{"all_reduce_latency_s": 1e-6}, {"search": True, "all_reduce_latency_s": -1.0}])
def test_latency_must_be_used_and_positive(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(FieldError, match="all_reduce_latency_s"):
        replay_trace(*write(tmp_path, [9.0], [1]), **options)
