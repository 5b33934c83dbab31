"""Max-min fair shares: who holds few places loses none to who holds many."""

import asyncio
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from cdmpp.errors import OverloadedError
from cdmpp_server.concurrency import excess
from cdmpp_server.operate.access import current_sender
from cdmpp_server.sandbox.worker import SandboxPool
from tests.waiting import PATIENCE_S


@given(held=st.dictionaries(st.text(max_size=3), st.integers(0, 50), max_size=8), places=st.integers(0, 120))
def test_shares_are_max_min_fair(held: dict[str, int], places: int) -> None:
    given_up = excess(held, places)
    kept = {holder: count - given_up.get(holder, 0) for holder, count in held.items()}
    assert sum(kept.values()) == min(places, sum(held.values()))
    assert all(0 <= kept[holder] <= count for holder, count in held.items())
    # Whoever gives up a place keeps as many as any other holder, except for one place that does not divide.
    for holder in given_up:
        assert kept[holder] >= max(kept.values()) - 1


def test_among_holders_of_equally_many_the_first_gives_up() -> None:
    assert excess({"a": 1, "b": 1, "c": 1}, 2) == {"a": 1}
    assert excess({"a": 2, "b": 9}, 8) == {"b": 3}
    assert excess({}, 3) == {}


def jobs_of(pool: SandboxPool, jobs: list[tuple[str, float]]) -> tuple[list[str], list[Any]]:
    """Senders in the order in which their jobs begin, and the outcome of each job; all are sent at once."""
    order: list[str] = []

    async def job(sender: str) -> None:
        order.append(sender)
        await asyncio.sleep(0)

    async def send(sender: str, cost: float) -> None:
        current_sender.set(sender)
        await pool.run(lambda _: job(sender), cost=cost)

    async def all_of_them() -> list[Any]:
        outcomes = asyncio.gather(*(send(*sent) for sent in jobs), return_exceptions=True)
        return list(await asyncio.wait_for(outcomes, PATIENCE_S))

    outcomes = asyncio.run(all_of_them())
    return order, outcomes


def no_process() -> Any:
    raise AssertionError("no job needs the process")


def test_sender_of_many_large_jobs_does_not_delay_a_small_one() -> None:
    order, outcomes = jobs_of(SandboxPool(1, no_process, 64), [("a", 1000.0)] * 24 + [("b", 40.0)] * 3)
    assert order == ["a", "b", "b", "b"] + ["a"] * 23
    assert outcomes == [None] * 27


def test_senders_of_equal_jobs_take_turns() -> None:
    order, _ = jobs_of(SandboxPool(1, no_process, 64), [("a", 1.0)] * 4 + [("b", 1.0)] * 3)
    # The first job began before those of b were sent.
    assert order == ["a"] + ["a", "b"] * 3


def test_full_queue_refuses_the_last_job_of_the_sender_with_most() -> None:
    pool = SandboxPool(1, no_process, 4)
    order, outcomes = jobs_of(pool, [("a", 1.0)] * 6 + [("b", 1.0)] * 3)
    refused = [isinstance(outcome, OverloadedError) for outcome in outcomes]
    # One of a runs and four wait; b gets half of these places.
    assert refused == [False, False, False, True, True, True, False, False, True]
    assert sorted(order) == ["a", "a", "a", "b", "b"] and pool.waiting == 0
