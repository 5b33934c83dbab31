"""The generation simulator: by hand, token by token, stopped and resumed, compiled and not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdmpp.compose.jit import COMPILED
from cdmpp.errors import InfeasibleError
from cdmpp.planning.rl import Engine, Queues, generate
from cdmpp.planning.rl import generation as module


def engine(batch: int = 4, **more: Any) -> Engine:
    return Engine(1.0 + 0.5 * np.arange(batch + 1), **more)


def ints(*values: int) -> Any:
    return np.array(values, dtype=np.int64)


def by_token(one: Engine, lengths: list[int]) -> tuple[list[float], int]:
    """One instance, one token at a time, in plain words of the same rules."""
    waiting = [(number, length, one.prompt_tokens) for number, length in enumerate(lengths)]
    running: list[list[int]] = []  # number, left, held; in order of entry
    now, blocked, preemptions = 0.0, False, 0
    finish = [0.0] * len(lengths)
    fill = [one.prefill_s] * len(lengths)
    while waiting or running:
        while waiting and len(running) < one.batch and not blocked:
            number, left, held = waiting[0]
            used = sum(each[2] for each in running)
            if running and used + held + min(one.reserve_tokens, left) > one.memory_tokens:
                break
            waiting.pop(0)
            now += fill[number]
            running.append([number, left, held])
        while len(running) > 1 and sum(each[2] for each in running) + len(running) > one.memory_tokens:
            number, left, held = running.pop()
            fill[number] += one.refill_s() * (lengths[number] - left) - (fill[number] - one.prefill_s)
            waiting.insert(0, (number, left, held))
            blocked = True
            preemptions += 1
        now += float(one.seconds_per_token[len(running)])
        for each in running:
            each[1] -= 1
            each[2] += 1
        for each in [each for each in running if each[1] == 0]:
            finish[each[0]] = now
            running.remove(each)
            blocked = False
    return finish, preemptions


class Taker:
    """An instance of :func:`by_turns`."""

    def __init__(self) -> None:
        self.now, self.asks, self.blocked = 0.0, True, False
        self.running: list[list[int]] = []  # number, left, held; in order of entry
        self.back: list[tuple[int, int, int]] = []

    def used(self) -> int:
        return sum(each[2] for each in self.running)


def by_turns(one: Engine, lengths: list[int], instances: int) -> tuple[list[float], list[int], int]:
    """Instances on one queue, one token at a time: whoever is earliest takes a sample or makes a token."""
    queue = [(number, length, one.prompt_tokens) for number, length in enumerate(lengths)]
    takers = [Taker() for _ in range(instances)]
    fill = [one.prefill_s] * len(lengths)
    finish, home, preemptions = [0.0] * len(lengths), [-1] * len(lengths), 0
    while queue or any(each.running or each.back for each in takers):
        able = [
            (each.now, len(each.running), place)
            for place, each in enumerate(takers)
            if each.running or each.back or queue
        ]
        place = min(able)[2]
        me = takers[place]
        waiting = me.back or queue
        if waiting and me.asks and not me.blocked and len(me.running) < one.batch:
            number, left, held = waiting[0]
            if not me.running or me.used() + held + min(one.reserve_tokens, left) <= one.memory_tokens:
                waiting.pop(0)
                home[number] = place
                me.now += fill[number]
                me.running.append([number, left, held])
                continue
        me.asks = False
        while len(me.running) > 1 and me.used() + len(me.running) > one.memory_tokens:
            number, left, held = me.running.pop()
            fill[number] = one.prefill_s + one.refill_s() * (lengths[number] - left)
            me.back.insert(0, (number, left, held))
            me.blocked = True
            preemptions += 1
        me.now += float(one.seconds_per_token[len(me.running)])
        for each in me.running:
            each[1] -= 1
            each[2] += 1
        for each in [each for each in me.running if each[1] == 0]:
            finish[each[0]] = me.now
            me.running.remove(each)
            me.blocked, me.asks = False, True
    return finish, home, preemptions


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=14),
    batch=st.integers(1, 5),
    prompt=st.integers(0, 3),
    prefill=st.sampled_from([0.0, 0.75]),
    spare=st.integers(0, 25),
    reserve=st.integers(0, 6),
    instances=st.integers(1, 5),
)
def test_a_shared_queue_is_equal_to_turns_token_by_token(
    lengths: list[int], batch: int, prompt: int, prefill: float, spare: int, reserve: int, instances: int
) -> None:
    # A token of refilling takes an exact part of a second: ties are ties in both.
    one = engine(
        batch,
        prompt_tokens=prompt,
        prefill_s=prefill * max(prompt, 1),
        reserve_tokens=reserve,
        memory_tokens=max(lengths) + prompt + spare,
    )
    found = generate(one, ints(*lengths), Queues.shared(len(lengths), instances))
    finish, home, preemptions = by_turns(one, lengths, instances)
    assert found.finish_s.tolist() == finish
    assert found.home.tolist() == home
    assert found.preemptions == preemptions
    assert not found.left.any()


def test_queues_of_one_instance_each_are_simulated_as_they_were_one_by_one() -> None:
    """Figures of the loop over single instances that turns between instances took the place of."""
    lengths = 1 + np.arange(400, dtype=np.int64) * 7919 % 1009
    one = engine(16, memory_tokens=6000, prompt_tokens=24, prefill_s=0.75, reserve_tokens=9)
    found = generate(one, lengths, Queues.dealt(400, 7))
    assert found.preemptions == 377
    assert found.end_s == 18094.84375
    assert found.finish_s.sum() == 3906245.5625


def test_whichever_instance_has_room_takes_the_next() -> None:
    # One at a time, 1.5 s a token: dealt, instance 0 would get 6 + 2 + 2 tokens and end at 15 s.
    found = generate(engine(1), ints(6, 1, 2, 1, 2), Queues.shared(5, 2))
    assert found.home.tolist() == [0, 1, 1, 1, 1]
    assert found.finish_s.tolist() == [9, 1.5, 4.5, 6, 9]
    assert generate(engine(1), ints(6, 1, 2, 1, 2), Queues.dealt(5, 2)).end_s == 15


def test_groups_of_instances_take_from_their_own_queue_only() -> None:
    lengths = ints(*(1 + 7 * place % 13 for place in range(24)))
    parts = [np.arange(9), np.arange(9, 24)]
    both = generate(engine(2), lengths, Queues.of(parts, [2, 3]))
    first = generate(engine(2), lengths[:9], Queues.shared(9, 2))
    second = generate(engine(2), lengths[9:], Queues.shared(15, 3))
    assert both.finish_s.tolist() == [*first.finish_s, *second.finish_s]
    assert both.home.tolist() == [*first.home, *(second.home + 2)]


def test_stopped_a_shared_queue_tells_who_took_what_and_what_still_waits() -> None:
    lengths = ints(*(3 + 7 * place % 13 for place in range(40)))
    queues, one = Queues.shared(40, 3), engine(4)
    whole = generate(one, lengths, queues)
    half = generate(one, lengths, queues, until_s=whole.end_s / 2)
    ended, waits = np.isfinite(half.finish_s), half.home < 0
    assert (half.finish_s[ended] == whole.finish_s[ended]).all()
    assert (half.home[~waits] == whole.home[~waits]).all()
    assert (half.left[waits] == lengths[waits]).all()
    # Taken in order, and no instance is idle while samples wait.
    assert waits.tolist() == sorted(waits)
    assert waits.any()
    running = ~ended & ~waits
    assert np.bincount(half.home[running]).tolist() == [4, 4, 4]
    assert (half.left[running] > 0).all()


def test_the_batch_shrinks_as_samples_end_and_grows_as_others_enter() -> None:
    # Batch 2: samples 0 and 1 run at 2 s a token; at 4 s sample 1 ends and 2 enters; at 6 s it ends as well.
    found = generate(engine(2), ints(4, 2, 1), Queues.dealt(3, 1))
    assert found.finish_s.tolist() == [6 + 1.5, 4, 6]
    assert found.end_s == 7.5


def test_a_lone_sample_takes_its_length_at_batch_one_and_its_prefill() -> None:
    found = generate(engine(prefill_s=3.0, prompt_tokens=5), ints(10), Queues.dealt(1, 1))
    assert found.finish_s.tolist() == [3 + 10 * 1.5]


def test_instances_do_not_disturb_each_other() -> None:
    lengths = ints(9, 3, 5, 7)
    both = generate(engine(), lengths, Queues.dealt(4, 2))
    left = generate(engine(), lengths[[0, 2]], Queues.dealt(2, 1))
    right = generate(engine(), lengths[[1, 3]], Queues.dealt(2, 1))
    assert both.finish_s.tolist() == [left.finish_s[0], right.finish_s[0], left.finish_s[1], right.finish_s[1]]
    assert generate(engine(), lengths, Queues.dealt(4, 9)).end_s == 9 * 1.5


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=12),
    batch=st.integers(1, 5),
    prompt=st.integers(0, 3),
    prefill=st.sampled_from([0.0, 0.75]),
    spare=st.integers(0, 25),
    reserve=st.integers(0, 6),
)
def test_equal_to_decoding_token_by_token(
    lengths: list[int], batch: int, prompt: int, prefill: float, spare: int, reserve: int
) -> None:
    one = engine(
        batch,
        prompt_tokens=prompt,
        prefill_s=prefill,
        reserve_tokens=reserve,
        memory_tokens=max(lengths) + prompt + spare,
    )
    found = generate(one, ints(*lengths), Queues.dealt(len(lengths), 1))
    finish, preemptions = by_token(one, lengths)
    assert found.preemptions == preemptions
    assert found.finish_s.tolist() == pytest.approx(finish, rel=1e-12)
    assert not found.left.any()


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=10), batch=st.integers(1, 4), share=st.floats(0, 1))
def test_stopped_and_resumed_it_is_at_most_a_token_later(lengths: list[int], batch: int, share: float) -> None:
    one, row = engine(batch), ints(*lengths)
    queues = Queues.dealt(len(row), 1)
    whole = generate(one, row, queues)
    stop = share * whole.end_s
    half = generate(one, row, queues, until_s=stop)
    ended = np.isfinite(half.finish_s)
    assert (half.finish_s[ended] == whole.finish_s[ended]).all()
    assert (half.left[ended] == 0).all()
    assert (half.left[~ended] > 0).all()
    left = np.flatnonzero(~ended)
    rest = generate(
        one, half.left, Queues.of([left]), done=row - half.left, resident=half.left < row, start_s=np.array([stop])
    )
    # The token that was being decoded is begun again.
    token = float(one.seconds_per_token[-1])
    assert (rest.finish_s[left] >= whole.finish_s[left] - 1e-9).all()
    assert (rest.finish_s[left] <= whole.finish_s[left] + token * (1 + 1e-9)).all()


def test_a_sample_that_left_for_lack_of_memory_pays_for_its_tokens_again() -> None:
    one = engine(2, memory_tokens=8, prompt_tokens=2, prefill_s=1.0)
    found = generate(one, ints(6, 6), Queues.dealt(2, 1))
    assert found.preemptions == 1
    # Both enter (2 s) and make two tokens at 2 s; the second leaves; the first makes four more at 1.5 s; the
    # second comes back for the prefill of 2 + 2 tokens at half a second each, and makes its last four.
    assert found.finish_s.tolist() == [2 + 4 + 6, 12 + 2 + 6]


def test_memory_that_does_not_hold_the_longest_sample_is_refused_with_the_smallest_that_would() -> None:
    with pytest.raises(InfeasibleError, match="longest") as error:
        engine(memory_tokens=99, prompt_tokens=20).check(80)
    assert "holds 100 tokens" in error.value.message
    engine(memory_tokens=100, prompt_tokens=20).check(80)


@pytest.mark.skipif(not COMPILED, reason="numba is not installed: there is one form only")
def test_compiled_and_plain_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    lengths = np.rint(rng.lognormal(5, 1, 200)).astype(np.int64) + 1
    one = engine(16, prompt_tokens=30, prefill_s=0.3, memory_tokens=int(lengths.max()) + 900, reserve_tokens=9)
    queues = Queues.of([np.arange(50), np.arange(50, 200)], [1, 3])
    compiled = generate(one, lengths, queues)
    monkeypatch.setattr(module, "_run", module._run.py_func)  # type: ignore[attr-defined]
    plain = generate(one, lengths, queues)
    assert compiled.preemptions == plain.preemptions > 0
    assert compiled.finish_s.tobytes() == plain.finish_s.tobytes()
    assert compiled.home.tolist() == plain.home.tolist()
