"""Max-min fair shares: who holds few places loses none to who holds many."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cdmpp_server.shares import excess


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
