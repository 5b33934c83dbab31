"""Order and admission of the queue, with times that the test sets."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdmpp_server.predict.admission import CACHED_WORK, SMALL_SHARE, AdmissionQueue, Batch, Rate, RefusedError
from cdmpp_server.predict.lane import Ticket

BATCH = 64
SMALL = int(SMALL_SHARE * BATCH)
ROW_S = 0.001


def queue(max_queued_rows: int = 100_000) -> AdmissionQueue:
    """An empty queue that has seen batches of :data:`ROW_S` a row."""
    admission = AdmissionQueue(BATCH, max_queued_rows)
    for second in range(100):
        admission.ended(run(admission, BATCH, second), second + BATCH * ROW_S)
    return admission


def run(admission: AdmissionQueue, rows: int, now: float) -> Batch:
    add(admission, rows, now=now)
    return admission.batch(now)


def add(admission: AdmissionQueue, rows: int, sender: str = "", *, now: float = 100.0, left_s: float = 10.0) -> Ticket:
    ticket = admission.admit(sender, rows, rows, now + left_s, now)
    admission.ready(ticket, rows, rows, object())
    return ticket


def test_batches_take_requests_in_order_of_arrival() -> None:
    admission = queue()
    first, second = add(admission, BATCH + 20), add(admission, 100)
    assert admission.batch(0).parts == [(first, BATCH)]
    assert admission.batch(0).parts == [(first, 20), (second, BATCH - 20)]
    assert admission.rows == 100 - (BATCH - 20)


def test_small_requests_have_a_share_of_each_batch() -> None:
    admission = queue()
    large = add(admission, 10 * BATCH)
    small = [add(admission, 1) for _ in range(3 * SMALL)]
    assert admission.batch(0).parts == [*((ticket, 1) for ticket in small[:SMALL]), (large, BATCH - SMALL)]
    # Room that no other request needs is theirs too.
    alone = queue()
    small_alone = [add(alone, 1) for _ in range(2 * SMALL)]
    assert alone.batch(0).parts == [(ticket, 1) for ticket in small_alone]


def test_senders_share_a_batch() -> None:
    admission = queue()
    first, second = add(admission, 10 * BATCH, "a"), add(admission, 10 * BATCH, "a")
    other = add(admission, 10 * BATCH, "b")
    assert dict(admission.batch(0).parts) == {first: BATCH // 2, other: BATCH // 2}
    assert second.rows == 10 * BATCH
    # A sender that was away has no claim on the time before.
    for _ in range(10):
        admission.batch(0)
    late = add(admission, 10 * BATCH, "c")
    assert dict(admission.batch(0).parts)[late] <= BATCH // 2


def test_request_that_is_still_being_read_keeps_its_place() -> None:
    admission = queue()
    unread = admission.admit("", 40, 40, 110, 100)
    ready = add(admission, 40)
    assert admission.batch(100).parts == [(ready, 40)]
    admission.ready(unread, 30, 30, object())
    assert admission.batch(100).parts == [(unread, 30)]
    assert admission.rows == 0


def test_removed_request_leaves_no_trace() -> None:
    admission = queue()
    first, second = add(admission, 100), add(admission, 50)
    admission.batch(100)
    admission.remove(first)
    admission.remove(first)
    assert admission.rows == 50
    admission.remove(second)
    assert admission.rows == admission.ready_rows == 0
    assert admission.batch(100).parts == []


@settings(max_examples=200)
@given(
    requests=st.lists(
        st.tuples(
            st.floats(0, 0.3),  # seconds since the request before
            st.sampled_from([1, 3, SMALL, SMALL + 1, 50, 200, 900]),
            st.sampled_from("aaab" + "c"),
            st.sampled_from([0.2, 1.0, 10.0]),
            st.booleans(),
        ),
        min_size=1,
        max_size=120,
    )
)
def test_admitted_requests_finish_in_time(requests: list[tuple[float, int, str, float, bool]]) -> None:
    """As long as a row costs what it did: also if requests of other senders arrive later, or small ones.

    A request for which nothing waited may be late, because it is never refused.
    """
    admission = queue()
    now, waiting = 100.0, list(requests)
    due = now
    batch: Batch | None = None
    ends = 0.0
    promised: dict[Ticket, float] = {}
    while waiting or batch is not None or admission.rows:
        if batch is None and admission.ready_rows:
            batch = admission.batch(now)
            ends = now + batch.rows * ROW_S
        if waiting and (batch is None or due + waiting[0][0] <= ends):
            gap, rows, sender, left_s, withdrawn = waiting.pop(0)
            now = due = max(now, due + gap)
            alone = admission.rows == 0
            try:
                ticket = add(admission, rows, sender, now=now, left_s=left_s)
            except RefusedError as refused:
                assert 0 < refused.retry_after_s <= 60
                continue
            if withdrawn and not alone:
                admission.remove(ticket)
            elif not alone:
                promised[ticket] = now + left_s
        elif batch is not None:
            now = ends
            for ticket, _ in batch.parts:
                if not ticket.rows and ticket in promised:
                    assert now <= promised.pop(ticket) + 1e-9
            admission.ended(batch, now)
            batch = None
    assert not promised


@pytest.mark.parametrize(("left_s", "admitted"), [(10.0, 5), (1.0, 0)])
def test_requests_are_refused_by_their_own_finish(left_s: float, admitted: int) -> None:
    """Requests of 1 s each: with 10 s, the sixth would end after 6.9 s with the share of small requests, in time."""
    admission = queue()
    add(admission, 1000)
    count = 0
    while True:
        try:
            add(admission, 1000, left_s=left_s)
        except RefusedError as refused:
            assert refused.retry_after_s == pytest.approx(8 / 7 * (2 + count) - 0.7 * left_s)
            break
        count += 1
    assert count == admitted


def test_request_is_refused_if_it_would_make_another_one_late() -> None:
    admission = queue()
    add(admission, 1000, "a", left_s=1.5)  # nothing waited
    add(admission, 100, "b", left_s=10)
    with pytest.raises(RefusedError):
        # Its own time is enough, and in equal shares it would be finished before the first one.
        add(admission, 400, "c", left_s=10)
    add(admission, SMALL, "c", left_s=10)


def test_rows_with_cached_figures_cost_little() -> None:
    admission = queue()
    add(admission, 5000)
    with pytest.raises(RefusedError):
        admission.admit("", 5000, 5000, 110, 100)
    admission = queue()
    add(admission, 5000)
    admission.admit("", 5000, 5000 * CACHED_WORK, 110, 100)


def test_small_requests_are_computed_beside_a_large_batch_for_a_share_of_the_time() -> None:
    admission = queue()
    add(admission, 10 * BATCH)
    add(admission, 1)
    assert admission.beside_in_s(100) is None  # no batch is being computed: they belong into the next one
    large = admission.batch(100)
    assert admission.beside_in_s(100) is None  # it has taken the small one
    small = add(admission, 1)
    assert admission.beside_in_s(100) == 0
    beside = admission.beside(100)
    assert beside.parts == [(small, 1)]
    admission.beside_ended(beside, 100.01)
    add(admission, 1)
    assert admission.beside_in_s(100.01) == pytest.approx(0.04)
    assert admission.beside_in_s(100.06) == 0
    admission.ended(large, 100.07)
    assert admission.beside_in_s(100.07) is None


def test_bodies_that_would_be_refused_are_not_read() -> None:
    admission = queue()
    for _ in range(8):
        admission.learn("new", 20_000, 200)
        admission.learn("cached", 20_000, 0)
    admission.check_unread("new", 20_000, 10, 100)
    add(admission, 6000, "new")

    def refused(sender: str, body_bytes: int) -> int:
        count = 0
        for _ in range(16):
            try:
                admission.check_unread(sender, body_bytes, 10, 100)
            except RefusedError:
                count += 1
        return count

    # One in eight is read, so that the estimate can change.
    assert refused("new", 20_000) == 14
    assert refused("new", 100) == refused("cached", 20_000) == refused("unknown", 20_000) == 0
    admission.learn("new", 20_000, 0)
    assert refused("new", 20_000) == 0


def test_rate_falls_at_once_and_rises_slowly() -> None:
    rate = Rate(100)
    rate.batch(1, 0.01)  # mostly the fixed cost of a batch
    assert rate.row_s < 0.001
    for _ in range(20):
        rate.batch(100, 0.1)
    assert rate.row_s == pytest.approx(0.001)
    for _ in range(3):
        rate.batch(100, 0.4)
    assert rate.row_s > 0.003
    worst = rate.row_s
    for _ in range(10):
        rate.batch(100, 0.1)
    assert 0.6 * worst < rate.row_s < worst
    for _ in range(200):
        rate.batch(100, 0.1)
    assert rate.row_s == pytest.approx(0.001, rel=0.1)
    # One slow batch is not the rate of a queue of seconds.
    rate.batch(100, 0.3)
    assert rate.row_s < 0.0015
    before = rate.row_s
    rate.batch(1, 0.01)
    assert rate.row_s == before


def test_time_without_requests_is_not_part_of_the_rate() -> None:
    admission = queue()
    left = add(admission, BATCH)
    admission.ended(run(admission, BATCH, 200), 200 + BATCH * ROW_S)
    admission.remove(left)
    admission.ended(run(admission, BATCH, 9000), 9000 + BATCH * ROW_S)
    add(admission, 1000, now=9001)
    add(admission, 1000, now=9001, left_s=4)
