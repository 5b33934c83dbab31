"""The emulator against hand-made steps, the replay engine, and itself without reuse."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdmpp.errors import FieldError
from cdmpp.simulate.emulator import SCHEDULES, Emulator, Pass, PassCost, Stage
from cdmpp.simulate.emulator.emulate import Reuse, durations, lower_bound
from cdmpp.simulate.replay import replay
from cdmpp.utils.jit import COMPILED
from tests.simulate.emulator.as_graph import simulate, to_graph

SECONDS = st.sampled_from([0.0, 0.1, 1.0, 2.5, 1 / 3])


@st.composite
def steps(draw):
    """Stages, micro-batches, schedule and transfers that fit together."""
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    ranks = draw(st.integers(1, 4))
    virtual = draw(st.integers(1, 3)) if name in ("gpipe", "interleaved") else 1
    kinds = draw(st.integers(1, 2))

    def cost(make, **more):
        backward = draw(SECONDS)
        weight = draw(st.sampled_from([None, 0.0, backward / 4, backward]))
        return make(
            draw(SECONDS), backward, weight, draw(st.integers(0, 9)) * 1.0, draw(st.integers(0, 2)) * 1.0, **more
        )

    stages = [
        cost(
            Stage,
            weight_bytes=draw(st.integers(0, 9)) * 1.0,
            memory=draw(st.sampled_from(["keep", "keep", "recompute", "offload"])),
            classes=tuple(cost(PassCost) for _ in range(kinds - 1)),
        )
        for _ in range(ranks * virtual)
    ]
    count = draw(st.integers(1, 4)) * ranks
    classes = draw(st.lists(st.integers(0, kinds - 1), min_size=count, max_size=count))
    transfers = draw(st.one_of(SECONDS, st.lists(SECONDS, min_size=len(stages) - 1, max_size=len(stages) - 1)))
    return (stages, classes, name), {
        "ranks": ranks,
        "transfer_s": transfers,
        "host_bandwidth_bytes_per_s": draw(st.sampled_from([1.0, 50.0])),
    }


def same(one, other):
    for field in ("start_s", "end_s", "peak_bytes"):
        assert np.array_equal(getattr(one, field), getattr(other, field)), field
    assert one.makespan_s == other.makespan_s


@settings(max_examples=60)
@given(st.lists(steps(), min_size=1, max_size=3))
def test_reuse_changes_no_bit(asked):
    emulator = Emulator()
    for positional, named in asked + asked:
        same(emulator.simulate(*positional, **named), Emulator(reuse=False).simulate(*positional, **named))
    assert emulator.steps.hits >= len(asked)


@settings(max_examples=40)
@given(steps())
def test_the_replay_engine_finds_the_same_times(asked):
    (stages, classes, name), named = asked
    step = simulate(stages, classes, name, **named)
    emulator = Emulator(reuse=False)
    costs = emulator.table(stages, named["host_bandwidth_bytes_per_s"])
    duration, lag, _ = durations(step.structure, costs, classes, named["transfer_s"])
    graph = to_graph(step.structure, duration, lag)
    found = replay(graph)
    ends = {node.id: end for node, end in zip(graph.nodes, found.end_s.tolist(), strict=True)}
    for row in range(len(step.structure.begin) - 1):
        for task in step.row(row).tolist():
            kind, stage, micro_batch = step.structure.name(task)
            assert ends[f"{kind}{stage}.{micro_batch}"] == step.end_s[task]
    bound = lower_bound(step.structure, costs, classes, named["transfer_s"])
    assert bound <= step.makespan_s


def test_what_is_held_is_bounded():
    emulator = Emulator(steps=Reuse(most=3), stages=Reuse(most_bytes=500))
    for n in range(1, 9):
        emulator.simulate([Stage(float(n), 2.0)] * 2, 2)
    assert emulator.steps.misses == 8
    emulator.simulate([Stage(8.0, 2.0)] * 2, 2)
    assert emulator.steps.hits == 1
    emulator.simulate([Stage(1.0, 2.0)] * 2, 2)
    assert emulator.steps.misses == 9


def test_stretches_that_repeat_are_moved():
    stages = [Stage(1.0, 2.0), Stage(1.1, 2.3), Stage(0.7, 2.0), Stage(1.0, 2.0)]
    emulator = Emulator()
    step = emulator.simulate(stages, 64, "1f1b", transfer_s=0.05)
    assert emulator.frames.hits > 2 * emulator.frames.misses
    assert emulator.stages.hits == 1  # the last stage is as the first
    same(step, simulate(stages, 64, "1f1b", transfer_s=0.05))


def figures() -> list[list[float]]:
    """Times that all compiled functions have a part in."""
    emulator = Emulator()
    stages = [Stage(1.0, 2.0, activation_bytes=3.0), Stage(0.3, 0.7, activation_bytes=2.0)]
    step = emulator.simulate(stages, 20, transfer_s=0.1)
    assert emulator.frames.hits > 0
    return [step.start_s.tolist(), step.end_s.tolist(), step.peak_bytes.tolist()]


def test_without_a_compiler_the_times_are_the_same():
    if not COMPILED:
        pytest.skip("numba is not installed: this is what all tests run")
    code = "from tests.simulate.emulator.test_emulate import figures; print(figures())"
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", code],
        check=True,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[3],
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"},
    )
    assert done.stdout.strip() == str(figures())


def test_recomputing_takes_a_forward_pass_more_and_keeps_the_input():
    kept = Stage(1.0, 2.0, activation_bytes=10.0, boundary_bytes=1.0)
    dropped = Stage(1.0, 2.0, activation_bytes=10.0, boundary_bytes=1.0, memory="recompute")
    step = simulate([dropped] * 4, 8)
    assert step.makespan_s == (8 + 3) * 4.0
    # Inputs of the micro-batches ahead, and the activations of the one in its backward pass.
    assert step.peak_bytes.tolist() == [n * 1.0 + 9.0 for n in (4, 3, 2, 1)]
    assert simulate([kept] * 4, 8).peak_bytes.tolist() == [n * 10.0 for n in (4, 3, 2, 1)]


def test_offloading_hides_behind_passes_where_the_link_is_fast():
    away = Stage(1.0, 2.0, activation_bytes=10.0, memory="offload")
    fast = simulate([away] * 4, 8, "gpipe", host_bandwidth_bytes_per_s=10.0)
    # One copy shows: where a rank turns, the last activations leave before the first ones come back.
    assert fast.makespan_s == (8 + 3) * 3.0 + 1.0
    assert (
        fast.peak_bytes.max()
        <= 30.0
        < simulate([Stage(1.0, 2.0, activation_bytes=10.0)] * 4, 8, "gpipe").peak_bytes.min()
    )
    slow = simulate([away] * 4, 8, "gpipe", host_bandwidth_bytes_per_s=2.0)
    # Everything waits for the last rank's link: from the end of its first forward pass it copies eight times
    # 5 s there and back, and then the last gradient goes down.
    assert slow.makespan_s == 4.0 + 16 * 5.0 + 4 * 2.0


def test_one_offloaded_stage_by_hand():
    # F0 F1 B0 B1 on one rank; copies of 1 s. F1 is needed after B0, so both leave and come back:
    # out0 1-2 beside F1, out1 2-3; B0 needs in0, which starts with F1 at the earliest and behind out0.
    away = Stage(1.0, 2.0, activation_bytes=4.0, memory="offload")
    step = simulate([away], 2, "gpipe", host_bandwidth_bytes_per_s=4.0)
    times = {
        step.structure.name(task): (step.start_s[task], step.end_s[task]) for row in (0, 1) for task in step.row(row)
    }
    assert times["F", 0, 0] == (0.0, 1.0) and times["F", 0, 1] == (1.0, 2.0)
    assert times["out", 0, 0] == (1.0, 2.0)
    assert times["in", 0, 0] == (2.0, 3.0)
    assert times["out", 0, 1] == (3.0, 4.0)
    assert times["B", 0, 0] == (3.0, 5.0)
    assert times["in", 0, 1] == (4.0, 5.0)
    assert times["B", 0, 1] == (5.0, 7.0)
    assert step.peak_bytes.tolist() == [8.0]


@settings(max_examples=60)
@given(steps())
def test_copy_back_never_starts_before_the_pass_before_its_backward_pass(asked):
    (stages, classes, name), named = asked
    step = simulate(stages, classes, name, **named)
    starts = {
        step.structure.name(task): step.start_s[task]
        for row in range(len(step.structure.begin) - 1)
        for task in step.row(row)
    }
    for rank in range(step.structure.ranks):
        row = [step.structure.name(task) for task in step.row(rank)]
        for (kind, stage, micro_batch), before in zip(row[1:], row, strict=False):
            if kind == "B" and ("in", stage, micro_batch) in starts:
                assert starts["in", stage, micro_batch] >= starts[before]


def test_classes_of_micro_batches():
    stage = Stage(1.0, 2.0, activation_bytes=1.0, classes=(PassCost(10.0, 20.0, activation_bytes=5.0),))
    step = simulate([stage], [0, 1, 0], "1f1b")
    assert step.makespan_s == 3.0 + 30.0 + 3.0
    assert step.peak_bytes.tolist() == [5.0]


def test_orders_that_wait_for_each_other():
    orders = [
        [Pass("F", 0, 0), Pass("B", 0, 0), Pass("F", 0, 1), Pass("B", 0, 1)],
        [Pass("F", 1, 1), Pass("F", 1, 0), Pass("B", 1, 0), Pass("B", 1, 1)],
    ]
    with pytest.raises(FieldError, match=r"rank 0 at position 1 has B of micro-batch 0 in stage 0") as error:
        simulate([Stage(1.0, 2.0)] * 2, 2, orders)
    assert error.value.path == "schedule.order.0.1"
    assert "rank 1 at position 0 has F of micro-batch 1 in stage 1" in error.value.message


@pytest.mark.parametrize(
    ("change", "path", "said"),
    [
        (lambda o: o[0].append(Pass("F", 0, 0)), "schedule.order.0.4", "there twice"),
        (lambda o: o[1].pop(), "schedule.order", "B of micro-batch 1 in stage 1 is missing"),
        (lambda o: o[0].append(Pass("W", 5, 0)), "schedule.order.0.4", "no micro-batch 0 in stage 5"),
        (lambda o: o[0].append(o[1].pop()), "schedule.order.1.0", "is on rank 0 already"),
    ],
)
def test_orders_that_are_none(change, path, said):
    orders = [
        [Pass("F", 0, 0), Pass("F", 0, 1), Pass("B", 0, 0), Pass("B", 0, 1)],
        [Pass("F", 1, 0), Pass("B", 1, 0), Pass("F", 1, 1), Pass("B", 1, 1)],
    ]
    change(orders)
    with pytest.raises(FieldError, match=said) as error:
        simulate([Stage(1.0, 2.0)] * 2, 2, orders)
    assert error.value.path == path


def test_the_bound_is_below_every_order():
    stages = [Stage(1.0, 3.0), Stage(2.0, 1.0)]
    passes = [[Pass(kind, s, m) for kind in "FB" for m in range(2)] for s in range(2)]
    found = []
    for orders in itertools.product(*(itertools.permutations(row) for row in passes)):
        try:
            found.append(simulate(stages, 2, [list(row) for row in orders], transfer_s=0.5))
        except FieldError:
            continue
    emulator = Emulator()
    bound = lower_bound(found[0].structure, emulator.table(stages), (0, 0), 0.5)
    assert len(found) > 10
    assert bound <= min(step.makespan_s for step in found)
