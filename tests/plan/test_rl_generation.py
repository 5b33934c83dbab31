"""Generation simulator: against hand calculation and token-by-token references, paused and resumed, compiled or not."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdmpp.errors import InfeasibleError
from cdmpp.plan.rl import generation as module
from cdmpp.plan.rl.generation import GenerationEngine, SampleQueues, generate
from cdmpp.utils.jit import COMPILED
from tests.plan.rl_cases import dealt


def make_engine(max_batch: int = 4, **options: Any) -> GenerationEngine:
    return GenerationEngine(1.0 + 0.5 * np.arange(max_batch + 1), **options)


def ints(*values: int) -> Any:
    return np.array(values, dtype=np.int64)


class ReferenceInstance:
    """State of one instance in :func:`simulate_shared_queue`."""

    def __init__(self) -> None:
        self.now, self.may_take, self.blocked = 0.0, True, False
        self.running: list[list[int]] = []  # sample, tokens left, tokens held; in order of entry
        self.preempted: list[tuple[int, int, int]] = []

    def used(self) -> int:
        return sum(entry[2] for entry in self.running)


def simulate_shared_queue(
    engine: GenerationEngine, lengths: list[int], instances: int
) -> tuple[list[float], list[int], int]:
    """Reference: instances on one queue, token by token; the earliest takes a sample or generates a token.

    Returns finish times, the instance of each sample, and preemptions.
    """
    queue = [(sample, length, engine.prompt_tokens) for sample, length in enumerate(lengths)]
    states = [ReferenceInstance() for _ in range(instances)]
    fill = [engine.prefill_s] * len(lengths)
    finish, home, preemptions = [0.0] * len(lengths), [-1] * len(lengths), 0
    while queue or any(state.running or state.preempted for state in states):
        index = min(
            (state.now, len(state.running), index)
            for index, state in enumerate(states)
            if state.running or state.preempted or queue
        )[2]
        state = states[index]
        waiting = state.preempted or queue
        if waiting and state.may_take and not state.blocked and len(state.running) < engine.max_batch:
            sample, left, held = waiting[0]
            if not state.running or state.used() + held + min(engine.reserve_tokens, left) <= engine.memory_tokens:
                waiting.pop(0)
                home[sample] = index
                state.now += fill[sample]
                state.running.append([sample, left, held])
                continue
        state.may_take = False
        while len(state.running) > 1 and state.used() + len(state.running) > engine.memory_tokens:
            sample, left, held = state.running.pop()
            fill[sample] = engine.prefill_s + engine.refill_s() * (lengths[sample] - left)
            state.preempted.insert(0, (sample, left, held))
            state.blocked = True
            preemptions += 1
        state.now += float(engine.seconds_per_token[len(state.running)])
        for entry in state.running:
            entry[1] -= 1
            entry[2] += 1
        for entry in [entry for entry in state.running if entry[1] == 0]:
            finish[entry[0]] = state.now
            state.running.remove(entry)
            state.blocked, state.may_take = False, True
    return finish, home, preemptions


@settings(max_examples=200)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=14),
    batch=st.integers(1, 5),
    prompt=st.integers(0, 3),
    prefill=st.sampled_from([0.0, 0.75]),
    spare=st.integers(0, 25),
    reserve=st.integers(0, 6),
    instances=st.integers(1, 5),
)
def test_shared_queue_equals_token_by_token_reference(
    lengths: list[int], batch: int, prompt: int, prefill: float, spare: int, reserve: int, instances: int
) -> None:
    # Recomputing a token takes an exact binary fraction of a second, so that ties are ties in both.
    engine = make_engine(
        batch,
        prompt_tokens=prompt,
        prefill_s=prefill * max(prompt, 1),
        reserve_tokens=reserve,
        memory_tokens=max(lengths) + prompt + spare,
    )
    result = generate(engine, ints(*lengths), SampleQueues.shared(len(lengths), instances))
    finish, home, preemptions = simulate_shared_queue(engine, lengths, instances)
    assert result.finish_s.tolist() == finish
    assert result.home.tolist() == home
    assert result.preemptions == preemptions
    assert not result.left.any()


def test_queues_of_one_instance_give_the_recorded_figures() -> None:
    lengths = 1 + np.arange(400, dtype=np.int64) * 7919 % 1009
    engine = make_engine(16, memory_tokens=6000, prompt_tokens=24, prefill_s=0.75, reserve_tokens=9)
    result = generate(engine, lengths, dealt(400, 7))
    assert result.preemptions == 377
    assert result.end_s == 18094.84375
    assert result.finish_s.sum() == 3906245.5625


def test_instance_with_room_takes_the_next_sample_of_a_shared_queue() -> None:
    # One sample at a time, 1.5 s a token. Dealt, instance 0 would get 6 + 2 + 2 tokens and end at 15 s.
    result = generate(make_engine(1), ints(6, 1, 2, 1, 2), SampleQueues.shared(5, 2))
    assert result.home.tolist() == [0, 1, 1, 1, 1]
    assert result.finish_s.tolist() == [9, 1.5, 4.5, 6, 9]
    assert generate(make_engine(1), ints(6, 1, 2, 1, 2), dealt(5, 2)).end_s == 15


def test_instances_take_samples_from_their_own_queue_only() -> None:
    lengths = ints(*(1 + 7 * sample % 13 for sample in range(24)))
    queues = SampleQueues.of([np.arange(9), np.arange(9, 24)], [2, 3])
    both = generate(make_engine(2), lengths, queues)
    first = generate(make_engine(2), lengths[:9], SampleQueues.shared(9, 2))
    second = generate(make_engine(2), lengths[9:], SampleQueues.shared(15, 3))
    assert both.finish_s.tolist() == [*first.finish_s, *second.finish_s]
    assert both.home.tolist() == [*first.home, *(second.home + 2)]


def test_paused_shared_queue_reports_running_and_waiting_samples() -> None:
    lengths = ints(*(3 + 7 * sample % 13 for sample in range(40)))
    queues, engine = SampleQueues.shared(40, 3), make_engine(4)
    whole = generate(engine, lengths, queues)
    half = generate(engine, lengths, queues, until_s=whole.end_s / 2)
    ended, waits = np.isfinite(half.finish_s), half.home < 0
    assert (half.finish_s[ended] == whole.finish_s[ended]).all()
    assert (half.home[~waits] == whole.home[~waits]).all()
    assert (half.left[waits] == lengths[waits]).all()
    # Samples are taken in order, and no instance is idle while samples wait.
    assert waits.tolist() == sorted(waits)
    assert waits.any()
    running = ~ended & ~waits
    assert np.bincount(half.home[running]).tolist() == [4, 4, 4]
    assert (half.left[running] > 0).all()


@settings(max_examples=60)
@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=10), batch=st.integers(1, 4), share=st.floats(0, 1))
def test_paused_and_resumed_generation_is_at_most_one_token_later(lengths: list[int], batch: int, share: float) -> None:
    engine, row = make_engine(batch), ints(*lengths)
    queues = dealt(len(row), 1)
    whole = generate(engine, row, queues)
    pause_s = share * whole.end_s
    half = generate(engine, row, queues, until_s=pause_s)
    ended = np.isfinite(half.finish_s)
    assert (half.finish_s[ended] == whole.finish_s[ended]).all()
    assert (half.left[ended] == 0).all()
    assert (half.left[~ended] > 0).all()
    left = np.flatnonzero(~ended)
    rest = generate(
        engine,
        half.left,
        SampleQueues.of([left]),
        done=row - half.left,
        resident=half.left < row,
        start_s=np.array([pause_s]),
    )
    # The token in progress at the pause is generated again.
    token_s = float(engine.seconds_per_token[-1])
    assert (rest.finish_s[left] >= whole.finish_s[left] - 1e-9).all()
    assert (rest.finish_s[left] <= whole.finish_s[left] + token_s * (1 + 1e-9)).all()


def test_preempted_sample_recomputes_its_tokens() -> None:
    engine = make_engine(2, memory_tokens=8, prompt_tokens=2, prefill_s=1.0)
    result = generate(engine, ints(6, 6), dealt(2, 1))
    assert result.preemptions == 1
    # Both enter (2 s) and generate two tokens at 2 s; the second is preempted. The first generates four more at
    # 1.5 s. The second recomputes 2 + 2 tokens at 0.5 s each, and generates its last four.
    assert result.finish_s.tolist() == [2 + 4 + 6, 12 + 2 + 6]


def test_memory_too_small_for_the_longest_sample_is_refused_with_the_smallest_sufficient_one() -> None:
    with pytest.raises(InfeasibleError, match="longest") as error:
        make_engine(memory_tokens=99, prompt_tokens=20).check(80)
    assert "holds 100 tokens" in error.value.message
    make_engine(memory_tokens=100, prompt_tokens=20).check(80)


@pytest.mark.skipif(not COMPILED, reason="numba is not installed: there is no compiled form")
def test_compiled_and_plain_simulation_give_equal_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    lengths = np.rint(rng.lognormal(5, 1, 200)).astype(np.int64) + 1
    memory_tokens = int(lengths.max()) + 900
    engine = make_engine(16, prompt_tokens=30, prefill_s=0.3, memory_tokens=memory_tokens, reserve_tokens=9)
    queues = SampleQueues.of([np.arange(50), np.arange(50, 200)], [1, 3])
    compiled = generate(engine, lengths, queues)
    monkeypatch.setattr(module, "_run", module._run.py_func)  # type: ignore[attr-defined]
    plain = generate(engine, lengths, queues)
    assert compiled.preemptions == plain.preemptions > 0
    assert compiled.finish_s.tobytes() == plain.finish_s.tobytes()
    assert compiled.home.tolist() == plain.home.tolist()
